"""`attention_error` measures patched attention against softmax on the user's data; `calibrate` fits FAVOR++ to it.

Both run the model with softmax outputs in place of the mechanisms' outputs. Every layer thus sees the q, k and v of the
original model, without the errors of the layers below.
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

EXPLANATION = "error: relative error of attention outputs against softmax; average: the error of averaging all values."


@dataclass(frozen=True)
class AttentionError:
    """Relative errors ‖ô - o‖ / ‖o‖ of attention outputs, over all positions that are not padding.

    `layers`: names of the attention modules. `mechanisms`: name of the mechanism of each layer. `heads`: error of each
    head of each layer. `overall`: error of each layer, over all heads. `average`: error of each layer if the attention
    were a plain average of the values.

    Prints as a table; `to_dict()` converts it to a dict.
    """

    layers: list[str]
    mechanisms: list[str]
    heads: list[list[float]]
    overall: list[float]
    average: list[float]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of plain lists and strings."""
        return asdict(self)

    def __str__(self) -> str:
        columns = zip(self.overall, map(min, self.heads), map(max, self.heads), self.average, strict=True)
        numbers = ([f"{number:.3f}" for number in row] for row in columns)
        rows = [(*names, *row) for *names, row in zip(self.layers, self.mechanisms, numbers, strict=True)]
        sides = {"layer": "<", "attention": "<", "error": ">", "best head": ">", "worst head": ">", "average": ">"}
        return f"{text_table(sides, rows)}\n{EXPLANATION}"


@contextmanager
def softmax_in_place(model: nn.Module, observe: Callable[..., None], gradients: bool = False):
    """Context in which every patched layer returns softmax outputs. `observe(mechanism, qkv, masks, softmax, output)`
    is called with both outputs.

    With `gradients`, for use under `torch.no_grad()`, autograd records the mechanisms and nothing else.
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
) -> list[Any]:
    """Run the model on a batch inside `softmax_in_place` and return its outputs."""
    with torch.no_grad(), softmax_in_place(model, observe, gradients):
        return run_batch(model, batch)


def run_batch(model: nn.Module, batch: Mapping[str, Any]) -> list[Any]:
    """Run the model on a batch in eval mode, without its head if the head has no patched layers, and return the outputs
    of all transformers models in it.
    """
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"A batch must be a dict of the model's keyword arguments, as a tokenizer returns it, not "
            f"{type(batch).__name__}."
        )
    training = {m: m.training for m in model.modules()}
    device = next(model.parameters()).device
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
    outputs = []
    model.eval()
    try:
        for body in _bodies(model, inputs):
            known = inspect.signature(body.forward).parameters
            given = {k: v for k, v in inputs.items() if body is model or k in known}  # drops labels
            if "use_cache" in known:  # with a cache, decoders call the mechanism with a state
                given["use_cache"] = False
            outputs.append(body(**given))
    finally:
        for module, mode in training.items():
            module.training = mode
    return outputs


def _bodies(model: nn.Module, inputs: Mapping[str, Any]) -> list[nn.Module]:
    """The modules to run: the model, or the patched transformers models inside one that does not take the batch as
    keywords (a SentenceTransformer takes one dict). Heads without mechanisms are left out: over a large vocabulary they
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
    """`[B, Lq]`, True for the positions of attention outputs `[B, H, Lq, D]` that are not padding."""
    mask = masks.get("key_mask")
    if mask is not None and mask.shape[1] == exact.shape[2]:
        return mask.bool()
    return torch.ones(exact.shape[0], exact.shape[2], dtype=torch.bool, device=exact.device)


def energy(x: Tensor, valid: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Sum of squares over valid positions, by head: `[B, H, L, D]` → `[H]`."""
    return (x.to(dtype).square() * valid[:, None, :, None]).sum(dim=(0, 2, 3))


def relative_error(error: Tensor, total: Tensor) -> Tensor:
    """Square root of the ratio of two energies: that of the error and that of the exact output."""
    return (error / total.clamp(min=torch.finfo(total.dtype).tiny)).sqrt()


def outer_mechanisms(module: nn.Module) -> list[Mechanism]:
    """All mechanisms in a module that are not nested in another mechanism."""
    found = [m for m in module.modules() if isinstance(m, Mechanism)]
    parts = {id(part) for m in found for part in m.modules() if part is not m}
    return [m for m in found if id(m) not in parts]


def mechanism_sites(model: nn.Module) -> dict[Mechanism, str]:
    """Map each mechanism of a patched model to the name of its attention module. Raises ValueError if it has none."""
    found = {m: site.name for site in find_attention(model) for m in outer_mechanisms(site.module)}
    if not found:
        raise ValueError("This model is not patched; call patch_model(model, ...) first.")
    return found


def sum_errors(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], outputs: Callable[..., Iterable[Tensor]]
) -> dict[str, Tensor]:
    """Sum energies over all batches, `[n + 1, H]` per attention module: of the errors of the n outputs that
    `outputs(name, qkv, masks, output)` yields, and of the softmax output.
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
    """Measure the error of each patched layer and head against the softmax attention it replaces.

    `batch`: a batch as a tokenizer returns it, an iterable of such batches, or one or several texts. Texts need a
    `tokenizer`, which encodes `batch_size` of them at a time, truncated to `max_length` tokens.

    The result also has the error of a plain average of all visible values. A mechanism with a larger error is worse
    than no attention at all.
    """

    def outputs(name: str, args: tuple, masks: dict[str, Any], output: Tensor) -> Iterator[Tensor]:
        query, key, value = args
        yield output
        yield softmax_attention(torch.zeros_like(query), key, value, **masks)  # average of all visible values

    kinds = {name: mechanism.config.name for mechanism, name in mechanism_sites(model).items()}
    sums = sum_errors(model, as_batches(batch, tokenizer, batch_size=batch_size, max_length=max_length), outputs)
    if not sums:
        raise ValueError(
            "The batch reached no patched layer. Is it empty, or is the attention implementation not 'hf_rfattn'? See "
            "model.set_attn_implementation."
        )
    return AttentionError(
        layers=list(sums),
        mechanisms=[kinds[name] for name in sums],
        heads=[relative_error(own, exact).tolist() for own, _, exact in sums.values()],
        overall=[float(relative_error(own.sum(), exact.sum())) for own, _, exact in sums.values()],
        average=[float(relative_error(average.sum(), exact.sum())) for _, average, exact in sums.values()],
    )


def optimal_maps(module: nn.Module) -> list[PositiveFeatures]:
    """The feature maps that `calibrate` applies to."""
    return [m for m in module.modules() if isinstance(m, PositiveFeatures) and m.optimal]


def calibrate(model: nn.Module, batch: Mapping[str, Any]) -> nn.Module:
    """Fit FAVOR++ (`variance="optimal"`) to the queries and keys of a batch, in place, and return the model.

    The measured statistic is saved with the weights. Calibration adds no bias and reduces the variance on
    similar data.
    """
    if not optimal_maps(model):
        raise ValueError("Nothing to calibrate: no layer is patched with variance='optimal'.")

    def observe(mechanism: Mechanism, args: tuple, kwargs: dict[str, Any], exact: Tensor, output: Tensor) -> None:
        query, key, _ = args
        root = (kwargs.get("scale") or query.shape[-1] ** -0.5) ** 0.5
        for feature_map in optimal_maps(mechanism):
            feature_map.calibrate(query.float() * root, key.float() * root, kwargs.get("key_mask"))

    run_with_softmax(model, batch, observe)
    return model
