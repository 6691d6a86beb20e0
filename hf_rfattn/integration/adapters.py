"""PEFT adapters of patched models: they record the base they were trained on and load only onto the same one.

PEFT loads an adapter onto any base model with the same module names. Saving an adapter of a patched model therefore
adds a record to `adapter_config.json`: how the base was patched, and a summary of the mechanism tensors that are not
part of the adapter. Loading the adapter patches an unpatched base, and raises if the base still differs from the
record.

The import hook imports this module after PEFT. It wraps the methods that save models (of PEFT and transformers), save
and load configs, and add adapters to models.
"""

import inspect
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from peft.config import PeftConfigMixin
from peft.peft_model import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..mechanisms.base import random_maps
from .discovery import find_attention, outermost_models
from .names import NAME, SPEC
from .patching import apply_patch, unpatch_model
from .spec import PatchSpec
from .wrapping import wraps_method

RECORD = NAME  # key in adapter_config.json; PEFT without this package warns that it is unknown
TOLERANCE = 0.01  # relative to the norm: above the rounding of bfloat16, below the difference of another draw
_ADVICE = "Load the adapter onto the patched base that it was trained on (saved with save_pretrained)."


def describe(model: nn.Module, adapter: str) -> dict[str, Any] | None:
    """Return the record of an adapter, or None if its base is not patched."""
    base = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), nn.Module())
    specs = {path: part.config.rfattn for path, part in _patched_parts(base).items() if _is_active(part)}
    if not specs:
        return None
    draws = [int(m.draws) for m in random_maps(base) if not m.draws.is_meta]
    patched = {path: {k: v for k, v in spec.items() if k != "softmax"} for path, spec in specs.items()}
    return {"patched": patched, "draws": max(draws, default=0), "mechanisms": _summary(base, adapter)}


def prepare(model: nn.Module, record: Any, adapter: str) -> None:
    """Patch the base as the record says. If that is not possible, raise ValueError and leave the model unchanged."""
    wanted, draws, summary = _read(record)
    base = outermost_models(model)[0]
    parts = _patched_parts(base)
    if not parts:
        if any(isinstance(m, BaseTunerLayer) for m in base.modules()):
            raise ValueError(
                "This adapter was trained on a patched model. Patching this model would change the outputs of its "
                f"other adapters. {_ADVICE}"
            )
        _patch(base, wanted, draws)
    elif not all(map(_is_active, parts.values())):
        raise ValueError(
            "This adapter was trained on a patched model. This model is patched but its attention implementation is "
            f"softmax: call model.set_attn_implementation({NAME!r}) first."
        )
    elif {path: PatchSpec.from_dict(part.config.rfattn) for path, part in parts.items()} != wanted:
        raise ValueError(
            "This adapter was trained on a model with a different patch: "
            f"{json.dumps(record['patched'])}. {_ADVICE} Or call unpatch_model(model) first: loading then patches it."
        )
    found = _summary(base, adapter)
    if any(not _close(numbers, found[name]) for name, numbers in summary.items() if name in found):
        if not parts:
            unpatch_model(base)
        raise ValueError(
            "The mechanisms of this model have other values than those that the adapter was trained with, and the "
            f"adapter does not contain them (modules_to_save=['rf'] would save them). {_ADVICE}"
        )


def _patched_parts(base: nn.Module) -> dict[str, Any]:
    """Patched (nested) models by path, outermost ones only."""
    parts: dict[str, Any] = {}
    for path, module in base.named_modules():
        inside = any(outer == "" or path.startswith(f"{outer}.") for outer in parts)
        if isinstance(module, PreTrainedModel) and getattr(module.config, SPEC, None) is not None and not inside:
            parts[path] = module
    return parts


def _is_active(part: PreTrainedModel) -> bool:
    return part.config._attn_implementation == NAME


def _summary(base: nn.Module, adapter: str) -> dict[str, list[float]]:
    """Three checksums per tensor name over the mechanisms of all layers that are not saved with the adapter.

    Skips tensors that this process does not have in full (sharded by FSDP or DeepSpeed, or on the meta device).
    """
    sums: dict[str, Tensor] = {}
    mechanisms: list[Any] = [m.rf for m in base.modules() if m._modules.get("rf") is not None]
    for number, mechanism in enumerate(mechanisms):
        if adapter in getattr(mechanism, "modules_to_save", ()):
            continue
        for name, tensor in getattr(mechanism, "original_module", mechanism).state_dict(keep_vars=True).items():
            whole = type(tensor.data) is Tensor and not getattr(tensor, "_fsdp_flattened", False)
            if tensor.is_floating_point() and whole and tensor.numel() and not tensor.is_meta:
                x = tensor.detach().flatten().double().cpu()
                angle = torch.arange(len(x), dtype=torch.float64, device="cpu") + number
                sums[name] = sums.get(name, 0) + torch.stack([x.square().sum(), x @ angle.cos(), x @ angle.sin()])
    return {name: [round(v, 6) for v in (math.sqrt(x[0]), *x[1:].tolist())] for name, x in sums.items()}


def _close(a: list[float], b: list[float]) -> bool:
    return all(abs(x - y) <= TOLERANCE * max(a[0], b[0]) + 1e-5 for x, y in zip(a, b, strict=True))


def _read(record: Any) -> tuple[dict[str, PatchSpec], int, dict[str, list[float]]]:
    """Validate and return the parts of a record, which comes from a file."""
    try:
        wanted = {path: PatchSpec.from_dict({**spec, "softmax": "sdpa"}) for path, spec in record["patched"].items()}
        draws, summary = int(record["draws"]), record["mechanisms"]
        if not wanted or draws < 0 or not all(len(v) == 3 and all(map(math.isfinite, v)) for v in summary.values()):
            raise ValueError("it is incomplete")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{RECORD!r} in adapter_config.json is invalid: {error}") from error
    return wanted, draws, summary


def _patch(base: PreTrainedModel, wanted: dict[str, PatchSpec], draws: int) -> None:
    try:
        for path, spec in wanted.items():
            part = base.get_submodule(path)
            sites = find_attention(part)
            beyond = sorted(set(spec.by_layer) - {site.index for site in sites})
            if beyond:
                raise ValueError(f"It was trained on a model with a layer {beyond[0]}, which this model does not have.")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user has seen these warnings when patching the original base
                apply_patch(part, sites, spec)
        for feature_map in random_maps(base) if draws else ():
            feature_map.draws.fill_(draws)
            feature_map.draw()
    except (AttributeError, NotImplementedError, ValueError) as error:
        unpatch_model(base)
        if isinstance(error, NotImplementedError):  # raised by torch for parameters on the meta device
            error = ValueError("with low_cpu_mem_usage=True, call patch_model before loading the adapter.")
        raise ValueError(f"This adapter cannot be loaded onto this base: {error}") from error


@wraps_method(PeftModel, "save_pretrained")
@wraps_method(PreTrainedModel, "save_pretrained")
def _save_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Attach the record to the config of each adapter while the model is being saved."""
    configs = getattr(self, "peft_config", None) or {}
    for adapter, config in configs.items():
        setattr(config, RECORD, describe(self, adapter))
    try:
        return original(self, *args, **kwargs)
    finally:
        for config in configs.values():
            vars(config).pop(RECORD, None)


@wraps_method(PeftConfigMixin, "save_pretrained")
def _save_config(original: Any, self: PeftConfigMixin, save_directory: Any, **kwargs: Any) -> None:
    original(self, save_directory, **kwargs)
    record = getattr(self, RECORD, None)
    if record is not None:
        path = Path(save_directory, "adapter_config.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), RECORD: record}, indent=2, sort_keys=True))


@wraps_method(PeftConfigMixin, "from_peft_type")
def _read_config(original: Any, cls: type[PeftConfigMixin], **kwargs: Any) -> Any:
    """Keep the record, which PEFT would warn about. `kwargs` are the contents of adapter_config.json."""
    record = kwargs.pop(RECORD, None)
    config = original(cls, **kwargs)
    if record is not None:
        setattr(config, RECORD, record)
    return config


@wraps_method(BaseTuner, "inject_adapter")
@wraps_method(PeftModel, "add_adapter")  # called for prompt learning
def _add_adapter(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the base against the record, then drop the record: a later save writes a new one."""
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    adapter = given["adapter_name"]
    config = given.get("peft_config") or self.peft_config[adapter]
    record = vars(config).pop(RECORD, None)
    if record is not None:
        prepare(given.get("model", self), record, adapter)
    return original(self, *args, **kwargs)
