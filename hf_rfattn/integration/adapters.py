"""PEFT adapters of patched models: what they were trained on is saved with them, and they load onto nothing else.

An adapter holds what was trained, and PEFT puts it onto any base that has modules of the same names. So saving one adds
a record to `adapter_config.json`: how the base was patched, and a summary of the mechanisms that the adapter does not
bring itself. Loading one patches a base that is not patched, and refuses a base that is not the same in the end.

The import hook imports this module after PEFT. It wraps the methods where PEFT saves models (`transformers` does too)
and configs, loads configs, and adds adapters to models.
"""

import functools
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
from .discovery import find_attention
from .names import NAME, SPEC
from .patching import apply_patch, unpatch_model
from .spec import PatchSpec

RECORD = NAME  # the key in adapter_config.json: without this package PEFT warns that it does not know it
TOLERANCE = 0.01  # of the norm: bfloat16 stays below it, another draw does not
_LAST = "Load the adapter onto the patched base that it was trained on (saved with save_pretrained)."


def describe(model: nn.Module, adapter: str) -> dict[str, Any] | None:
    """The record of an adapter; None if its base is not patched."""
    base = _base(model)
    patched = {path: part.config.rfattn for path, part in _patched_parts(base).items() if _is_active(part)}
    if base is None or not patched:
        return None
    draws = [m.draws for m in random_maps(base) if not m.draws.is_meta]
    return {
        "patched": {path: {k: v for k, v in spec.items() if k != "softmax"} for path, spec in patched.items()},
        "draws": max(map(int, draws), default=0),
        "mechanisms": _summary(base, adapter),
    }


def prepare(model: nn.Module, record: Any, adapter: str) -> None:
    """Make the base what the record says. Raises ValueError, and leaves the model as it was, if that cannot be."""
    wanted, draws, summary = _read(record)
    base = _base(model)
    if base is None:
        raise ValueError(f"This adapter was trained on a patched model of transformers, not {type(model).__name__}.")
    parts = _patched_parts(base)
    if not parts:
        if any(isinstance(m, BaseTunerLayer) for m in base.modules()):
            raise ValueError(
                "This adapter was trained on a patched model. Patching this one would change what its other adapters "
                f"give. {_LAST}"
            )
        _patch(base, wanted, draws)
    elif not all(map(_is_active, parts.values())):
        raise ValueError(
            "This adapter was trained on a patched model. This one is patched but uses softmax: call "
            f"model.set_attn_implementation({NAME!r}) first."
        )
    elif {path: PatchSpec.from_dict(part.config.rfattn) for path, part in parts.items()} != wanted:
        raise ValueError(
            "This adapter was trained on a model that was patched otherwise: "
            f"{json.dumps(record['patched'])}. {_LAST} Or call unpatch_model(model) first: loading then patches it."
        )
    found = _summary(base, adapter)
    if any(not _close(numbers, found[name]) for name, numbers in summary.items() if name in found):
        if not parts:
            unpatch_model(base)
        raise ValueError(
            "The mechanisms of this model are not those that the adapter was trained with, which were trained or drawn "
            f"otherwise, and are not part of the adapter: that takes modules_to_save=['rf']. {_LAST}"
        )


def _base(model: nn.Module) -> PreTrainedModel | None:
    return next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)


def _patched_parts(base: nn.Module | None) -> dict[str, Any]:
    """The (nested) models that were patched, by their paths, without those inside them."""
    parts: dict[str, Any] = {}
    for path, module in base.named_modules() if base is not None else ():
        inside = any(outer == "" or path.startswith(f"{outer}.") for outer in parts)
        if isinstance(module, PreTrainedModel) and getattr(module.config, SPEC, None) is not None and not inside:
            parts[path] = module
    return parts


def _is_active(part: PreTrainedModel) -> bool:
    return part.config._attn_implementation == NAME


def _summary(base: nn.Module, adapter: str) -> dict[str, list[float]]:
    """Three sums over the tensors of each name in mechanisms that are not saved with the adapter, all layers together.

    Tensors that are not here as a whole (sharded by FSDP or DeepSpeed, or without memory) are left out.
    """
    sums: dict[str, Tensor] = {}
    holders = [m for m in base.modules() if m._modules.get("rf") is not None]
    for number, holder in enumerate(holders):
        mechanism: Any = holder.rf
        if adapter in getattr(mechanism, "modules_to_save", ()):
            continue
        for name, tensor in getattr(mechanism, "original_module", mechanism).state_dict(keep_vars=True).items():
            whole = type(tensor.data) is Tensor and not getattr(tensor, "_fsdp_flattened", False)
            if tensor.is_floating_point() and whole and tensor.numel() and not tensor.is_meta:
                x = tensor.detach().flatten().double().cpu()
                angle = torch.arange(len(x), dtype=torch.float64, device="cpu") + number
                new = torch.stack([x.square().sum(), x @ angle.cos(), x @ angle.sin()])
                sums[name] = sums.get(name, 0) + new
    return {name: [round(v, 6) for v in (math.sqrt(x[0]), *x[1:].tolist())] for name, x in sums.items()}


def _close(a: list[float], b: list[float]) -> bool:
    return all(abs(x - y) <= TOLERANCE * max(a[0], b[0]) + 1e-5 for x, y in zip(a, b, strict=True))


def _read(record: Any) -> tuple[dict[str, PatchSpec], int, dict[str, list[float]]]:
    """The parts of a record, checked: it comes from a file."""
    try:
        wanted = {path: PatchSpec.from_dict({**spec, "softmax": "sdpa"}) for path, spec in record["patched"].items()}
        draws, summary = int(record["draws"]), record["mechanisms"]
        if not wanted or draws < 0 or not all(len(v) == 3 and all(map(math.isfinite, v)) for v in summary.values()):
            raise ValueError("it is not complete")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{RECORD!r} in adapter_config.json makes no sense: {error}") from error
    return wanted, draws, summary


def _patch(base: PreTrainedModel, wanted: dict[str, PatchSpec], draws: int) -> None:
    try:
        for path, spec in wanted.items():
            part = base.get_submodule(path)
            sites = find_attention(part)
            beyond = sorted(set(spec.by_layer) - {site.index for site in sites})
            if beyond:
                raise ValueError(f"This adapter's base has a layer {beyond[0]}, which this model does not have.")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what stays softmax was said when the model was patched
                apply_patch(part, sites, spec)
        for feature_map in random_maps(base) if draws else ():
            feature_map.draws.fill_(draws)
            feature_map.draw()
    except Exception as error:
        unpatch_model(base)
        if isinstance(error, NotImplementedError):  # torch, of parameters without memory
            raise ValueError(
                "With low_cpu_mem_usage=True this adapter's base cannot be patched on loading: leave it out, or call "
                "patch_model on the base first."
            ) from error
        if isinstance(error, AttributeError):  # torch, of a path that is not there
            raise ValueError(f"This adapter was trained on another model: {error}.") from error
        raise


def _saves_record(original: Any) -> Any:
    """Of a model's `save_pretrained`: its adapters' configs know what to write for as long as that lasts."""

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        configs = getattr(self, "peft_config", None) or {}
        for adapter, config in configs.items():
            setattr(config, RECORD, describe(self, adapter))
        try:
            return original(self, *args, **kwargs)
        finally:
            for config in configs.values():
                vars(config).pop(RECORD, None)

    return save_pretrained


def _writes_record(original: Any) -> Any:
    """Of a config's `save_pretrained`."""

    @functools.wraps(original)
    def save_pretrained(self: PeftConfigMixin, save_directory: Any, **kwargs: Any) -> None:
        original(self, save_directory, **kwargs)
        record = getattr(self, RECORD, None)
        if record is not None:
            path = Path(save_directory, "adapter_config.json")
            path.write_text(json.dumps({**json.loads(path.read_text()), RECORD: record}, indent=2, sort_keys=True))

    return save_pretrained


def _reads_record(original: Any) -> Any:
    """Of a config's `from_peft_type`, which gets what is in the file."""

    @functools.wraps(original)
    def from_peft_type(cls: type[PeftConfigMixin], **kwargs: Any) -> Any:
        record = kwargs.pop(RECORD, None)
        config = original(cls, **kwargs)
        if record is not None:
            setattr(config, RECORD, record)
        return config

    return from_peft_type


def _prepares_base(original: Any) -> Any:
    """Of methods that add an adapter. The record has done its work then: a later save writes what the model is then."""

    @functools.wraps(original)
    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        adapter = given["adapter_name"]
        config = given.get("peft_config") or self.peft_config[adapter]
        record = vars(config).pop(RECORD, None)
        if record is not None:
            prepare(given.get("model", self), record, adapter)
        return original(self, *args, **kwargs)

    return add


PeftModel.save_pretrained = _saves_record(PeftModel.save_pretrained)  # type: ignore[method-assign]
PreTrainedModel.save_pretrained = _saves_record(PreTrainedModel.save_pretrained)  # type: ignore[method-assign]
PeftConfigMixin.save_pretrained = _writes_record(PeftConfigMixin.save_pretrained)  # type: ignore[method-assign]
PeftConfigMixin.from_peft_type = classmethod(  # type: ignore[method-assign, assignment]
    _reads_record(PeftConfigMixin.from_peft_type.__func__)  # type: ignore[attr-defined]
)
BaseTuner.inject_adapter = _prepares_base(BaseTuner.inject_adapter)  # type: ignore[method-assign]
PeftModel.add_adapter = _prepares_base(PeftModel.add_adapter)  # type: ignore[method-assign]  # prompts come this way
