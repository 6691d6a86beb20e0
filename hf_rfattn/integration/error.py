"""How far a patched attention is from the softmax it replaces, measured on the user's own batch; and calibration on it.

Both let the batch through the model with softmax outputs put in place of the mechanism's, so that every layer is
judged on the q, k, v of the original model and not on the errors of the layers below.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..features import PositiveFeatures
from ..mechanisms import Mechanism
from ..ops import softmax_attention
from .discovery import find_attention, outermost_models
from .inputs import Data, as_batches
from .text_table import text_table

EXPLANATION = "error: relative to softmax, on its own q, k, v; average: the error of averaging all values."


@dataclass(frozen=True)
class AttentionError:
    """Relative errors ‖ô - o‖ / ‖o‖ of attention outputs over valid positions, by layer and head.

    `layers`: names of modules. `mechanisms`: of each layer. `heads`: an error for each head of each layer. `overall`:
    all heads of a layer together. `average`: the same for plain averaging of the values.

    Prints as a table, and becomes a dict with `to_dict()`.
    """

    layers: list[str]
    mechanisms: list[str]
    heads: list[list[float]]
    overall: list[float]
    average: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and strings."""
        return asdict(self)

    def __str__(self) -> str:
        columns = zip(self.overall, map(min, self.heads), map(max, self.heads), self.average, strict=True)
        numbers = ([f"{number:.3f}" for number in row] for row in columns)
        rows = [(*names, *row) for *names, row in zip(self.layers, self.mechanisms, numbers, strict=True)]
        sides = {"layer": "<", "attention": "<", "error": ">", "best head": ">", "worst head": ">", "average": ">"}
        return f"{text_table(sides, rows)}\n{EXPLANATION}"


@contextmanager
def softmax_in_place(model: nn.Module, observe: Callable[..., None], gradients: bool = False):
    """While open, every patched layer gives softmax outputs, and `observe(mechanism, qkv, masks, softmax, output)`
    sees both.

    With `gradients`, to be used under `torch.no_grad()`, the mechanisms alone are seen by autograd.
    """

    def begin(mechanism: Mechanism, args: tuple) -> None:
        torch.set_grad_enabled(True)

    def hook(mechanism: Mechanism, args: tuple, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        if gradients:
            torch.set_grad_enabled(False)
        exact = softmax_attention(*args, **kwargs)
        observe(mechanism, args, kwargs, exact, output)
        return exact

    mechanisms = outer_mechanisms(model)
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in mechanisms]
    if gradients:
        handles += [m.register_forward_pre_hook(begin) for m in mechanisms]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_with_softmax(
    model: nn.Module, batch: Mapping[str, Any], observe: Callable[..., None], gradients: bool = False
) -> None:
    """Let a batch through the model as `softmax_in_place` has it."""
    with torch.no_grad(), softmax_in_place(model, observe, gradients):
        run_batch(model, batch)


def run_batch(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Let a batch through the model, without dropout, and without a head where no patched layer is in it."""
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"batch must be the model's keyword arguments, as a tokenizer returns them, not {type(batch).__name__}."
        )
    training = {m: m.training for m in model.modules()}
    device = next(model.parameters()).device
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    model.eval()
    try:
        for body in _bodies(model, inputs):
            known = inspect.signature(body.forward).parameters
            given = {k: v for k, v in inputs.items() if body is model or k in known}  # no labels without a head
            if "use_cache" in known:  # a decoder would go through its state, not through the call that is observed
                given["use_cache"] = False
            body(**given)
    finally:
        for module, mode in training.items():
            module.training = mode


def _bodies(model: nn.Module, inputs: Mapping[str, Any]) -> list[nn.Module]:
    """What the batch goes through: the model, or the patched transformers models in one that takes no keywords, as a
    SentenceTransformer, which takes one dict. Without a head, where it holds no mechanism: over a large vocabulary it
    may cost more than all layers.
    """
    roots = [model]
    try:
        inspect.signature(model.forward).bind(**inputs)
    except TypeError:
        roots = [root for root in outermost_models(model) if outer_mechanisms(root)]
    bodies = []
    for root in roots:
        body = root
        if isinstance(root, PreTrainedModel) and not root.config.is_encoder_decoder:
            whole = len(outer_mechanisms(root.base_model)) == len(outer_mechanisms(root))
            body = root.base_model if whole else root
        bodies.append(body)
    return bodies


def valid_queries(exact: Tensor, masks: Mapping[str, Any]) -> Tensor:
    """`[B, Lq]`, True for positions of attention outputs `[B, H, Lq, D]` that are not padding."""
    mask = masks.get("key_mask")
    if mask is not None and mask.shape[1] == exact.shape[2]:
        return mask.bool()
    return torch.ones(exact.shape[0], exact.shape[2], dtype=torch.bool, device=exact.device)


def energy(x: Tensor, valid: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Sum of squares over valid positions, by head: `[B, H, L, D]` → `[H]`."""
    return (x.to(dtype).square() * valid[:, None, :, None]).sum(dim=(0, 2, 3))


def relative_error(error: Tensor, total: Tensor) -> Tensor:
    """Root of an energy over another one, that of the error over that of what is exact."""
    return (error / total.clamp(min=torch.finfo(total.dtype).tiny)).sqrt()


def outer_mechanisms(module: nn.Module) -> list[Mechanism]:
    """All mechanisms in a module but those that are parts of another."""
    found = [m for m in module.modules() if isinstance(m, Mechanism)]
    parts = {id(part) for m in found for part in m.modules() if part is not m}
    return [m for m in found if id(m) not in parts]


def mechanism_sites(model: nn.Module) -> dict[Mechanism, str]:
    """Every mechanism of a patched model with the name of the attention module it stands in; ValueError if none."""
    found = {m: site.name for site in find_attention(model) for m in outer_mechanisms(site.module)}
    if not found:
        raise ValueError("This model is not patched; call patch_model(model, ...) first.")
    return found


def sum_errors(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], outputs: Callable[..., Iterable[Tensor]]
) -> dict[str, Tensor]:
    """Energies `[n + 1, H]`, by attention module, over all batches: of the errors of the n outputs that
    `outputs(name, qkv, masks, output)` gives for each, and of the softmax output.
    """
    names = mechanism_sites(model)
    sums: dict[str, Tensor] = {}

    def observe(mechanism: Mechanism, args: tuple, masks: dict[str, Any], exact: Tensor, output: Tensor) -> None:
        name, valid = names[mechanism], valid_queries(exact, masks)
        errors = [energy(x - exact, valid) for x in outputs(name, args, masks, output)]
        sums[name] = sums.get(name, 0) + torch.stack([*errors, energy(exact, valid)])

    for batch in batches:
        run_with_softmax(model, batch, observe)
    return sums


def attention_error(
    model: nn.Module,
    batch: Data,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = 16,
    max_length: int = 512,
) -> AttentionError:
    """Error of each patched layer and head against the softmax it replaces.

    `batch`: what a tokenizer returns, once or several times, which are then measured together; or texts, one or
    several, with their `tokenizer` (and `batch_size`, `max_length`).

    Beside it stands the error of "average", plain averaging of all visible values: a mechanism above that line does
    worse than no attention.
    """

    def outputs(name: str, args: tuple, masks: dict[str, Any], output: Tensor) -> Iterator[Tensor]:
        query, key, value = args
        yield output
        yield softmax_attention(torch.zeros_like(query), key, value, **masks)  # the average of all visible values

    kinds = {name: mechanism.config.name for mechanism, name in mechanism_sites(model).items()}
    sums = sum_errors(model, as_batches(batch, tokenizer, batch_size=batch_size, max_length=max_length), outputs)
    if not sums:
        raise ValueError("The batch reached no patched layer; is model.set_attn_implementation('hf_rfattn') in force?")
    return AttentionError(
        layers=list(sums),
        mechanisms=[kinds[name] for name in sums],
        heads=[relative_error(own, exact).tolist() for own, _, exact in sums.values()],
        overall=[float(relative_error(own.sum(), exact.sum())) for own, _, exact in sums.values()],
        average=[float(relative_error(average.sum(), exact.sum())) for _, average, exact in sums.values()],
    )


def optimal_maps(module: nn.Module) -> list[PositiveFeatures]:
    """The feature maps that `calibrate` is for."""
    return [m for m in module.modules() if isinstance(m, PositiveFeatures) and m.optimal]


def calibrate(model: nn.Module, batch: Mapping[str, Any]) -> nn.Module:
    """Measure, on one batch, the statistic of queries and keys that `variance="optimal"` needs; returns the model.

    It is stored with the weights, so a calibrated model stays calibrated when saved. Features are unbiased before and
    after.
    """
    if not optimal_maps(model):
        raise ValueError("Nothing to calibrate: no layer was patched with variance='optimal'.")

    def observe(mechanism: Mechanism, args: tuple, kwargs: dict[str, Any], exact: Tensor, output: Tensor) -> None:
        query, key, _ = args
        root = (kwargs.get("scale") or query.shape[-1] ** -0.5) ** 0.5
        for feature_map in optimal_maps(mechanism):
            feature_map.calibrate(query.float() * root, key.float() * root, kwargs.get("key_mask"))

    run_with_softmax(model, batch, observe)
    return model
