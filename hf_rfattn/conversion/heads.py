"""`keep_exact_heads`: gives the heads that matter most to a model's output their exact softmax back."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..integration.discovery import find_attention, outermost_models
from ..integration.error import mechanism_sites, run_batch, run_with_softmax
from ..integration.inputs import Batch, Data, as_batches
from ..integration.names import SPEC
from ..integration.patching import apply_patch
from ..integration.spec import PatchSpec
from ..mechanisms import LinearMechanism, Mechanism
from ..mechanisms.exact_heads import ExactHeadsAttention, ExactHeadsConfig
from ..ops import softmax_attention

Heads = dict[int, tuple[int, ...]]  # by layer number
ROUNDS = 4  # in which exact heads are chosen
SHARE = 1 / 8  # recovers most of what linear attention loses


def keep_exact_heads(
    model: nn.Module,
    batch: Data,
    share: float = SHARE,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = 16,
    max_length: int = 512,
) -> Heads:
    """Give the heads that matter most to the output of the model exact softmax again, in place, and return their
    numbers by layer number.

    `model`: a model patched with linear mechanisms, usually after `convert`; what they have learned is kept. `batch`
    and further arguments: as in `attention_error`. `share`: fraction of all heads that become exact. Their cost is
    quadratic, and generation caches their keys and values.

    >>> from hf_rfattn import patch_model
    >>> from transformers import BertConfig, BertModel
    >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    >>> model = patch_model(BertModel(tiny), "hedgehog")
    >>> heads = keep_exact_heads(model, {"input_ids": torch.arange(16)[None]}, share=1 / 8)
    >>> sorted(layer.attention.self.rf.config.name for layer in model.encoder.layer)
    ['exact_heads', 'hedgehog']
    """
    batches = list(as_batches(batch, tokenizer, batch_size=batch_size, max_length=max_length))
    if not batches:
        raise ValueError("batch is empty; give at least one batch or text.")
    heads = decisive_heads(model, batches, share)
    set_exact_heads(model, heads)
    return heads


def usual_share(model: nn.Module) -> float:
    """Return the default fraction of exact heads: 0 if a mechanism is not linear, in decoders, where exact heads would
    cache all keys, and in models with too few heads.
    """
    mechanisms = mechanism_sites(model)
    linear = all(isinstance(mechanism, LinearMechanism) for mechanism in mechanisms)
    causal = any(getattr(site.module, "is_causal", False) for site in find_attention(model))  # some decoders: False
    decoder = causal or any(m.can_generate() or m.config.is_encoder_decoder for m in outermost_models(model))
    return SHARE if linear and not decoder and SHARE * sum(m.num_heads for m in mechanisms) >= 1 else 0.0


def decisive_heads(model: nn.Module, batches: Sequence[Batch], share: float) -> Heads:
    """Choose the heads with the largest gains, at least one, in several rounds: every exact head changes the gains of
    the others.
    """
    if not 0 < share < 1:
        raise ValueError(f"The share of exact heads must be between 0 and 1, not {share!r}.")
    layers = linear_layers(model)
    sizes = {number: min(mechanism.num_heads for mechanism in of) for number, of in layers.items()}
    chosen: dict[int, list[int]] = {number: [] for number in layers}
    count = max(1, round(share * sum(sizes.values())))
    for part in range(1, ROUNDS + 1):
        more = math.ceil(count * part / ROUNDS) - sum(map(len, chosen.values()))
        if not more:
            continue
        exact = {mechanism: chosen[number] for number, of in layers.items() for mechanism in of}
        found = [gains_of_heads(model, batch, exact) for batch in batches]
        ranked: list[tuple[float, int, int]] = []
        for number, of in layers.items():
            gains = torch.stack([gain[mechanism][: sizes[number]] for gain in found for mechanism in of]).mean(0)
            ranked += [(gain, number, head) for head, gain in enumerate(gains.tolist()) if head not in chosen[number]]
        ranked.sort(reverse=True)
        for _, number, head in ranked[:more]:
            chosen[number].append(head)
    return {number: tuple(sorted(heads)) for number, heads in chosen.items() if heads}


def linear_layers(model: nn.Module) -> dict[int, list[Mechanism]]:
    """Return the mechanisms of a patched model by layer number. Raises ValueError if one of them is not linear.

    Modules with the same number, as in an encoder and its decoder, have the same config and thus the same exact heads.
    """
    numbers = {site.name: site.index for site in find_attention(model)}
    layers: dict[int, list[Mechanism]] = {}
    for mechanism, name in mechanism_sites(model).items():
        if isinstance(mechanism, ExactHeadsAttention):
            raise ValueError(
                "Some heads of this model are exact already. Convert the original model with another share."
            )
        if not isinstance(mechanism, LinearMechanism):
            raise ValueError(
                f"Exact heads need a linear mechanism such as 'hedgehog' or 'favor+' in all patched layers, but {name} "
                f"has {mechanism.config.name!r}."
            )
        layers.setdefault(numbers[name], []).append(mechanism)
    return layers


@torch.enable_grad()  # also in evaluation code
def gains_of_heads(
    model: nn.Module, batch: Batch, exact: Mapping[Mechanism, list[int]] | None = None
) -> dict[Mechanism, Tensor]:
    """Estimate how much closer the output of the model comes to that of softmax if one more head becomes exact, `[H]`.
    `exact`: heads that already are.

    The distance is E = ‖x - x̂‖², where x and x̂ are the last hidden states with softmax and with the mechanisms. To
    first order, replacing the output ô of a head by softmax's o reduces it by -Σ ∂E/∂ô · (o - ô), so one backward pass
    is enough for all heads. A head may have a large error and hardly matter, and the other way round.
    """
    outputs: dict[Mechanism, list[tuple[Tensor, Tensor]]] = {mechanism: [] for mechanism in mechanism_sites(model)}

    def remember(mechanism: Mechanism, args: tuple, masks: dict[str, Any], output: Tensor) -> Tensor:
        output = output if output.requires_grad else output.detach().requires_grad_()
        softmax = softmax_attention(*args, **masks).to(output.dtype)
        outputs[mechanism].append((output, (softmax - output).detach()))
        heads = exact[mechanism] if exact else []
        return output.index_copy(1, torch.tensor(heads, device=output.device), softmax[:, heads]) if heads else output

    targets = run_with_softmax(model, batch, lambda *_: None)
    handles = [mechanism.register_forward_hook(remember, with_kwargs=True) for mechanism in outputs]
    try:
        states = run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    parts = [_distance(*pair, batch) for pair in zip(map(_states, states), map(_states, targets), strict=True)]
    pairs = [(mechanism, *pair) for mechanism, found in outputs.items() for pair in found]
    total = torch.stack(parts).sum()
    unit = total.detach().sqrt().clamp(min=torch.finfo(total.dtype).tiny)  # keeps gradients in the range of float16
    gradients = torch.autograd.grad(total / unit, [output for _, output, _ in pairs], allow_unused=True)
    gains = {mechanism: torch.zeros(mechanism.num_heads) for mechanism in outputs}
    for (mechanism, _, change), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None:  # None: not part of the compared states
            gains[mechanism] -= (unit * (gradient.float() * change.float()).sum(dim=(0, 2, 3))).cpu()
    return gains


def _states(output: Any) -> Tensor:
    """The last hidden states in a model's output, or its logits."""
    for name in ("last_hidden_state", "logits"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output[0]


def _distance(given: Tensor, target: Tensor, batch: Batch) -> Tensor:
    """Squared distance over all positions that are not padding."""
    square = (given.float() - target.float()).square()
    for name in ("decoder_attention_mask", "attention_mask"):  # the output is that of the decoder, if there is one
        mask = batch.get(name)
        if mask is not None and square.ndim == 3 and mask.shape == square.shape[:2]:
            return (square * mask[..., None].to(square.device)).sum()
    return square.sum()


def set_exact_heads(model: nn.Module, heads: Mapping[int, tuple[int, ...]]) -> None:
    """Let these heads of a patched model use exact softmax. The mechanisms stay the same modules."""
    sites = find_attention(model)
    mechanisms = {name: mechanism for mechanism, name in mechanism_sites(model).items()}
    document: Any = next(getattr(s.module.config, SPEC) for s in sites if hasattr(s.module.config, SPEC))
    spec = PatchSpec.from_dict(document)
    layers = {
        number: ExactHeadsConfig(heads=heads[number], rest=config) if number in heads else config
        for number, config in spec.by_layer.items()
    }
    apply_patch(model, sites, replace(spec, by_layer=layers))
    for site in sites:
        if site.name in mechanisms:
            new, old = site.module.rf, mechanisms[site.name]
            if isinstance(new, ExactHeadsAttention):
                new.rest = old  # type: ignore[assignment]
            else:
                site.module.rf = old
