"""`patch_model(model, "auto", ...)`: for each layer the cheapest mechanism whose error on given batches is small."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..mechanisms import Mechanism, MechanismConfig, build_mechanism, resolve_config
from .cost import attention_cost, is_causal
from .discovery import AttentionSite
from .error import energy, mechanism_sites, run_with_softmax, valid_queries

# From the least to the most that a mechanism keeps exact. Edges are what heads of pretrained models often look at.
_EDGES = {"normalizer": "joint", "global_tokens": 1}
CANDIDATES: tuple[MechanismConfig, ...] = (
    *(resolve_config(name) for name in ("average", "linear", "favor+", "hedgehog")),
    *(resolve_config("band", bandwidth=width, global_tokens=1) for width in (16, 32, 64, 128)),
    *(resolve_config("fmm", bandwidth=width, **_EDGES) for width in (16, 32, 64, 128)),
)


@dataclass(frozen=True)
class Option:
    """A candidate for one layer: its error, and its multiply-adds over those of softmax."""

    config: MechanismConfig
    error: float
    cost: float

    def __str__(self) -> str:
        options = self.config.to_dict()
        width = f" {options['bandwidth']}" if "bandwidth" in options else ""
        return f"{self.config.name}{width} (error {self.error:.3f}, {self.cost:.2f} × the work of softmax)"


def choose_mechanisms(
    model: nn.Module,
    sites: Sequence[AttentionSite],
    *,
    batches: Iterable[Mapping[str, Any]] | Mapping[str, Any],
    budget: float = 0.1,
    candidates: Iterable[str | MechanismConfig] = CANDIDATES,
    length: int | None = None,
    seed: int = 0,
) -> tuple[dict[int, MechanismConfig], str]:
    """What each layer number gets, and why, in words. Layers that are left out stay softmax.

    The model must be patched with anything at all sites that are in question; what it is patched with does not matter.
    `length`: of the inputs that work is counted for, by default the longest in the batches.
    """
    configs = [resolve_config(candidate) for candidate in candidates]
    if not configs:
        raise ValueError("candidates is empty.")
    if not budget > 0:
        raise ValueError(f"budget is the largest relative error that a layer may have, above 0, not {budget!r}.")
    names = mechanism_sites(model)
    by_name = {site.name: site for site in sites}
    built: dict[tuple[str, int], Mechanism] = {}
    sums: dict[tuple[str, int], Tensor] = {}
    longest = 0

    def observe(mechanism: Mechanism, args: tuple, masks: dict[str, Any], exact: Tensor, output: Tensor) -> None:
        nonlocal longest
        site = by_name[names[mechanism]]
        longest = max(longest, exact.shape[2])
        valid = valid_queries(exact, masks)
        for number, config in enumerate(configs):
            key = site.name, number
            if key not in built:
                built[key] = _build(site, config, seed, exact)
            if site.cross and not built[key].handles_cross_attention:
                continue
            difference = built[key](*args, **masks) - exact
            sums[key] = sums.get(key, 0) + torch.stack([energy(x, valid).sum() for x in (difference, exact)])

    for batch in [batches] if isinstance(batches, Mapping) else batches:
        run_with_softmax(model, batch, observe)
    if not sums:
        raise ValueError("batches reached no attention module; give what a tokenizer returns.")
    options: dict[int, list[Option]] = {}
    for number, config in enumerate(configs):
        for index in sorted({site.index for site in by_name.values() if (site.name, 0) in built}):
            here = [site for site in sites if site.index == index and (site.name, 0) in built]
            if all((site.name, number) in sums for site in here):
                found = [_option(site, built, sums, number, length or longest) for site in here]
                worst = Option(config, max(o.error for o in found), max(o.cost for o in found))
                options.setdefault(index, []).append(worst)
    return _decide(options, budget, length or longest)


def _build(site: AttentionSite, config: MechanismConfig, seed: int, like: Tensor) -> Mechanism:
    shape = {"num_heads": site.num_heads, "num_kv_heads": site.num_kv_heads, "head_dim": site.head_dim}
    return build_mechanism(config, **shape, layer_idx=site.ordinal, seed=seed).to(like.device)


def _option(site: AttentionSite, built: Mapping, sums: Mapping, number: int, length: int) -> Option:
    mechanism = built[site.name, number]
    cost = attention_cost(mechanism, length, causal=is_causal(site))
    error, total = sums[site.name, number]
    return Option(
        mechanism.config,
        float((error / total.clamp(min=torch.finfo(total.dtype).tiny)).sqrt()),
        cost.multiply_adds / cost.softmax_multiply_adds,
    )


def _decide(
    options: Mapping[int, Sequence[Option]], budget: float, length: int
) -> tuple[dict[int, MechanismConfig], str]:
    chosen: dict[int, MechanismConfig] = {}
    lines = [f"Cheapest attention with an error of at most {budget:g}, for inputs of {length} tokens:"]
    for index, found in options.items():
        cheaper = [option for option in found if option.cost < 1]
        within = [option for option in cheaper if option.error <= budget]
        if within:
            best = min(within, key=lambda option: option.cost)
            chosen[index] = best.config
            lines.append(f"layer {index}: {best}")
        elif cheaper:
            lines.append(f"layer {index}: softmax; the closest is {min(cheaper, key=lambda option: option.error)}")
        else:
            lines.append(f"layer {index}: softmax; at this length it has the least to do")
    return chosen, "\n".join(lines)
