"""Patched checkpoints: the config of a saved model records the patch, and loading restores it exactly.

Mechanisms are submodules and the config is JSON, so transformers saves and loads most of it. The rest is done by
wrapping methods of transformers: `PreTrainedModel.post_init` creates the mechanisms before weights are loaded into
them, `from_pretrained` checks that all their tensors came from the checkpoint, `_initialize_weights` initializes the
mechanisms of a model built on the meta device, and `PreTrainedConfig.save_pretrained` adds the file with which
`trust_remote_code=True` loads the folder where this package is installed but not imported. Without this package,
transformers raises an error that names the attention implementation.
"""

import copy
import shutil
import warnings
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..features import FeatureMap
from ..mechanisms import Mechanism
from .discovery import find_attention, nested_configs
from .names import CODE, NAME, SPEC
from .patching import apply_patch, remember_model
from .spec import DAMAGED, SOFTMAX_NAMES, PatchSpec
from .wrapping import wraps_method

_LOADER = f"{CODE.removesuffix('.py')}.PatchedConfig"
_LOADING: ContextVar[bool] = ContextVar("loading", default=False)  # by from_pretrained


@wraps_method(PreTrainedModel, "_initialize_weights")
def _fill_mechanisms(original: Any, self: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Initialize mechanisms after `to_empty`. When a checkpoint is loaded, it has all values, so nothing is done."""
    done = getattr(module, "_is_hf_initialized", False) or _LOADING.get()
    ours = isinstance(module, (Mechanism, FeatureMap))
    if ours and not done and [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        module.reset_parameters()  # type: ignore[operator]
    original(self, module, *args, **kwargs)


@wraps_method(PreTrainedModel, "post_init")
def _restore(original: Any, model: PreTrainedModel) -> None:
    """Patch a model whose config records a patch. Raises ValueError if the record is invalid."""
    original(model)
    remember_model(model)
    spec = getattr(model.config, SPEC, None)
    if spec is None:
        return
    wanted = PatchSpec.from_dict(spec)
    try:
        sites = find_attention(model)
    except ValueError:
        return  # a nested model without attention
    # Nested models are created before the outer one. Each patches its own layers; from_pretrained checks the whole.
    here = {site.index for site in sites if not site.refusal and (wanted.cross_attention or not site.cross)}
    by_layer = {number: config for number, config in wanted.by_layer.items() if number in here}
    if not by_layer:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user has seen these warnings when patching the model
        apply_patch(model, sites, replace(wanted, by_layer=by_layer), record=False)
    model.config.attn_implementation = NAME  # the saved config may lack this key


@wraps_method(PreTrainedConfig, "save_pretrained")
def _save_config(original: Any, self: PreTrainedConfig, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    config = _portable(self)
    original(config, save_directory, *args, **kwargs)
    if (getattr(config, "auto_map", None) or {}).get("AutoConfig") == _LOADER:
        shutil.copyfile(Path(__file__).with_name(CODE), Path(save_directory, CODE))


def _portable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config to save, without settings that are valid in this process only.

    Its `auto_map` names our file if the model is patched. One entry is enough for all Auto classes, since they all read
    the config first. Models with their own remote code keep their own entries.
    """
    patched = _is_patched(config)
    auto_map = getattr(config, "auto_map", None) or {}
    ours = _LOADER in str(auto_map.get("AutoConfig"))  # prefixed with the repository if loaded from the Hub
    if not patched and not ours:
        return config
    config = copy.deepcopy(config)
    for part in nested_configs(config):
        spec = getattr(part, SPEC, None)
        if isinstance(spec, dict) and spec.get("softmax") not in SOFTMAX_NAMES:  # a custom or Hub kernel
            setattr(part, SPEC, {**spec, "softmax": "sdpa"})
    if type(config).__module__.startswith("transformers."):
        config.auto_map = {n: c for n, c in auto_map.items() if not n.startswith(("AutoConfig", "AutoModel"))}
        if patched:
            config.auto_map["AutoConfig"] = _LOADER
        elif not config.auto_map:
            del config.auto_map
    return config


@wraps_method(PreTrainedModel, "from_pretrained")
def _load_checked(original: Any, cls: type, *args: Any, **kwargs: Any) -> Any:
    wants_info = kwargs.pop("output_loading_info", False)
    # Auto classes write the caller's attn_implementation into the config, where it is None if nobody set it.
    explicit = kwargs.get("attn_implementation") or getattr(kwargs.get("config"), "_attn_implementation", None)
    token = _LOADING.set(True)
    try:
        model, info = original(cls, *args, output_loading_info=True, **kwargs)
    finally:
        _LOADING.reset(token)
    if _is_patched(model.config):
        _check_tensors(model.name_or_path, info)
        _finish_loading(model, activate=explicit is None)
        if explicit not in (None, NAME):
            warnings.warn(
                f"{model.name_or_path} was patched by hf_rfattn; attn_implementation={explicit!r} makes it softmax "
                f"again. To use the patch, omit it or call model.set_attn_implementation({NAME!r}).",
                stacklevel=3,
            )
    return (model, info) if wants_info else model


def _is_patched(config: PreTrainedConfig) -> bool:
    return any(getattr(c, SPEC, None) is not None for c in nested_configs(config))


def _check_tensors(path: str, info: dict[str, Any]) -> None:
    """Raise unless all tensors of the mechanisms came from the checkpoint."""
    problems = {
        "lacks {} mechanism tensors": info["missing_keys"],
        "contains {} mechanism tensors that its config does not describe": info["unexpected_keys"],
        "contains {} mechanism tensors of the wrong shape": [name for name, *_ in info["mismatched_keys"]],
    }
    for what, keys in problems.items():
        names = sorted(key for key in keys if ".rf." in key)
        if names:
            raise ValueError(
                f"{path} {what.format(len(names))}, such as {names[0]}. Loading never initializes mechanisms. {DAMAGED}"
            )


def _finish_loading(model: PreTrainedModel, activate: bool) -> None:
    """Check that the model has all layers that its config patches. `activate`: use the mechanisms even if the config
    lacks the key `attn_implementation`.
    """
    here = {site.index for site in find_attention(model)}
    for config in {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values():
        if getattr(config, SPEC, None) is not None:
            beyond = sorted(set(PatchSpec.from_dict(getattr(config, SPEC)).by_layer) - here)
            if beyond:
                raise ValueError(f"config.{SPEC} patches layer {beyond[0]}, which this model does not have. {DAMAGED}")
            if activate:
                config._attn_implementation = {"": NAME}
