"""`choose_attention`: chooses a mechanism for each layer by its error on the user's data and its cost."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..mechanisms import Mechanism, MechanismConfig, resolve_config
from .cost import attention_cost, is_causal
from .discovery import AttentionSite, find_attention
from .error import relative_error, sum_errors
from .inputs import Data, as_batches
from .names import SPEC
from .patching import build_at, patch_model, unpatch_model
from .spec import SOFTMAX, parse_layers
from .text_table import text_table

Limit = Literal["error", "cost"]

# Ordered by how much of the attention is exact. Bands have a global token, since many heads attend to the first token.
CANDIDATES: tuple[MechanismConfig, ...] = (
    *(resolve_config(name) for name in ("average", "linear", "favor+", "hedgehog")),
    *(resolve_config("band", bandwidth=width, global_tokens=1) for width in (16, 32, 64, 128)),
    *(resolve_config("fmm", bandwidth=w, normalizer="joint", global_tokens=1) for w in (16, 32, 64, 128)),
    *(resolve_config("multipole", exact_keys=keys) for keys in (64, 128, 256)),
)


@dataclass(frozen=True)
class Candidate:
    """A candidate for one layer: its config (None for softmax), relative error, and cost relative to softmax."""

    config: MechanismConfig | None
    error: float
    cost: float

    def __str__(self) -> str:
        return f"{self.config or SOFTMAX} (error {self.error:.3f}, cost {self.cost:.2f})"


_EXACT = Candidate(None, 0.0, 1.0)


class AttentionChoice(dict[int, "MechanismConfig | str"]):
    """A mapping from layer numbers to configs or "softmax", for `patch_model`. Prints as a table with the reasons.

    `chosen`: the chosen candidate of each layer, None if it cannot be patched. `reasons`: why it was chosen.
    `candidates`: all measured candidates of each layer. `length`: the sequence length for which cost is counted.
    `cost`: multiply-adds of all layers that can be patched, relative to softmax.
    """

    def __init__(
        self,
        chosen: dict[int, Candidate | None],
        reasons: dict[int, str],
        candidates: dict[int, list[Candidate]],
        length: int,
        cost: float,
    ):
        super().__init__({layer: (c and c.config) or SOFTMAX for layer, c in chosen.items()})
        self.chosen, self.reasons, self.candidates, self.length, self.cost = chosen, reasons, candidates, length, cost

    def __str__(self) -> str:
        rows = [
            (layer, self[layer], f"{c.error:.3f}" if c else "–", f"{c.cost:.2f}" if c else "–", self.reasons[layer])
            for layer, c in self.chosen.items()
        ]
        table = text_table({"layer": ">", "attention": "<", "error": ">", "cost": ">", "reason": "<"}, rows)
        return (
            f"{table}\nerror: relative error of the attention output against softmax, without training; cost: "
            f"multiply-adds relative to softmax at {self.length:,} tokens ({self.cost:.2f} for all layers)."
        )


def choose_attention(
    model: nn.Module,
    batches: Data,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    budget: float = 0.1,
    limit: Limit = "error",
    length: int | None = None,
    candidates: Iterable[str | MechanismConfig] = CANDIDATES,
    layers: Iterable[int] | str | None = None,
    cross_attention: bool = False,
    seed: int = 0,
    batch_size: int = 16,
    max_length: int = 512,
) -> AttentionChoice:
    """Choose a mechanism for each layer by its error on your data, without training. The model is not changed.

    Pass the result to `patch_model(model, choice)`; print it to see the reasons.

    `batches`: a batch as a tokenizer returns it, an iterable of such batches, or texts. Texts need a `tokenizer`, which
    encodes `batch_size` of them at a time, truncated to `max_length` tokens.
    `limit`: what `budget` limits. With "error", each layer gets the cheapest candidate with a relative error of at most
    `budget`, or stays softmax. With "cost", all layers together may use `budget` times the multiply-adds of softmax,
    and every layer gets the smallest error limit that fits into this cost.
    `length`: sequence length for which cost is counted, by default the longest in the batches. `candidates`: names or
    configs to choose from. `layers`, `cross_attention` and `seed`: as in `patch_model`; pass them there too.

    >>> from transformers import BertConfig, BertModel
    >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    >>> model, batch = BertModel(tiny), {"input_ids": torch.arange(64).view(2, 32)}
    >>> choice = choose_attention(model, batch, budget=0.9, candidates=["average"], length=4096)
    >>> choice[0], choice.reasons[0]
    (AverageConfig(), 'cheapest of 1 within an error of 0.9')
    >>> model = patch_model(model, choice)
    """
    configs = [resolve_config(candidate) for candidate in candidates]
    if not configs:
        raise ValueError("candidates is empty; give names or configs of mechanisms, or leave it out.")
    if limit not in get_args(Limit):
        raise ValueError(f"Unknown limit {limit!r}; choose one of {', '.join(get_args(Limit))}.")
    if not budget > 0:
        raise ValueError(f"budget, which limits the {limit}, must be above 0, not {budget!r}.")
    sites = find_attention(model)
    if any(getattr(site.module.config, SPEC, None) is not None for site in sites):
        raise ValueError("This model is already patched; call unpatch_model(model) first.")
    wanted = {site.index for site in sites} if layers is None else set(parse_layers(layers))
    sites = [s for s in sites if s.index in wanted and (cross_attention or not s.cross)]
    by_name = {site.name: site for site in sites if not site.refusal}
    built = {name: [build_at(site, config, seed) for config in configs] for name, site in by_name.items()}
    longest = 0

    def outputs(name: str, args: tuple, masks: dict[str, Any], output: Tensor) -> Iterator[Tensor]:
        nonlocal longest
        longest = max(longest, output.shape[2])
        for mechanism in built[name]:
            possible = mechanism.handles_cross_attention or not by_name[name].cross
            yield mechanism(*args, **masks) if possible else output + torch.inf

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table shows which layers cannot be patched
        patch_model(model, "average", layers=layers, cross_attention=cross_attention)
    try:
        sums = sum_errors(model, as_batches(batches, tokenizer, batch_size=batch_size, max_length=max_length), outputs)
    finally:
        unpatch_model(model)
    if not sums:
        raise ValueError("The batches reached no attention module; pass batches as a tokenizer returns them.")
    length = length or longest
    found, work = _by_layer(sums, by_name, built, length)

    def cost(decided: Mapping[int, tuple[Candidate, str]]) -> float:
        return sum(decided[layer][0].cost * work[layer] for layer in found) / sum(work.values())

    errors = [budget]
    if limit == "cost":  # find the smallest error limit that this cost allows
        errors = sorted({0.0, *(option.error for options in found.values() for option in options)})
    for error in errors:
        decided = {layer: _cheapest(options, error) for layer, options in found.items()}
        if limit == "error" or cost(decided) <= budget:
            break
    else:
        raise ValueError(
            f"At {length} tokens even the cheapest candidates need {cost(decided):.2f} times the multiply-adds of "
            f"softmax, more than budget={budget:g}. Increase the budget or the length, or give cheaper candidates."
        )
    softmax = {s.index: (None, s.refusal or "the batches did not reach it") for s in sites}
    by_layer = sorted({**softmax, **decided}.items())
    chosen, reasons = {i: candidate for i, (candidate, _) in by_layer}, {i: reason for i, (_, reason) in by_layer}
    return AttentionChoice(chosen, reasons, found, length, cost(decided))


def _by_layer(
    sums: Mapping[str, Tensor],
    sites: Mapping[str, AttentionSite],
    built: Mapping[str, list[Mechanism]],
    length: int,
) -> tuple[dict[int, list[Candidate]], dict[int, int]]:
    """Return the candidates of each layer, over all its modules, and the multiply-adds of its softmax."""
    found: dict[int, list[Candidate]] = {}
    work: dict[int, int] = {}
    for index in sorted({sites[name].index for name in sums}):
        names = [name for name in sums if sites[name].index == index]
        for number, mechanism in enumerate(built[names[0]]):
            costs = [attention_cost(built[name][number], length, causal=is_causal(sites[name])) for name in names]
            work[index] = sum(cost.softmax_multiply_adds for cost in costs)
            errors = [float(relative_error(sums[name][number].sum(), sums[name][-1].sum())) for name in names]
            if all(error < float("inf") for error in errors):
                cost = sum(cost.multiply_adds for cost in costs) / work[index]
                found.setdefault(index, []).append(Candidate(mechanism.config, max(errors), cost))
    return found, work


def _cheapest(options: list[Candidate], error: float) -> tuple[Candidate, str]:
    """Return the cheapest candidate within an error limit, and the reason."""
    cheaper = [option for option in options if option.cost < 1]
    within = [option for option in cheaper if option.error <= error]
    if within:
        best = min(within, key=lambda o: (round(o.cost, 2), o.error))  # ties: the smaller error
        return best, f"cheapest of {len(within)} within an error of {error:.3g}"
    if cheaper:
        return _EXACT, f"no candidate is within {error:.3g}; the closest is {min(cheaper, key=lambda o: o.error)}"
    return _EXACT, "softmax is the cheapest at this length"
