"""Patched checkpoints: a saved model says in its config what was patched, and comes back patched, tensor for tensor.

Mechanisms are submodules and the config is JSON, so most of it works by itself. The rest are wraps of transformers:
`PreTrainedModel.post_init` puts the mechanisms in place before weights are loaded into them, `from_pretrained` checks
that every one of their tensors came from the checkpoint, `_initialize_weights` fills the mechanisms of a model that
was built on the meta device, and `PreTrainedConfig.save_pretrained` adds the file that lets `trust_remote_code=True`
load the folder where this package is installed but not imported. Where it is not installed, transformers refuses the
checkpoint by the name of its attention implementation.
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
    """transformers calls it for every module after `to_empty`, and when it loads a checkpoint, which has it all."""
    done = getattr(module, "_is_hf_initialized", False) or _LOADING.get()
    ours = isinstance(module, (Mechanism, FeatureMap))
    if ours and not done and [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        module.reset_parameters()  # type: ignore[operator]
    original(self, module, *args, **kwargs)


@wraps_method(PreTrainedModel, "post_init")
def _restore(original: Any, model: PreTrainedModel) -> None:
    """Patch a model as its config says, if it says so. Raises ValueError for a document that makes no sense."""
    original(model)
    remember_model(model)
    spec = getattr(model.config, SPEC, None)
    if spec is None:
        return
    wanted = PatchSpec.from_dict(spec)
    try:
        sites = find_attention(model)
    except ValueError:
        return  # a part of the model without attention
    # Parts of a model are made before the whole; each takes the layers it has, and from_pretrained looks at the whole.
    here = {site.index for site in sites if not site.refusal and (wanted.cross_attention or not site.cross)}
    by_layer = {number: config for number, config in wanted.by_layer.items() if number in here}
    if not by_layer:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what stays softmax was said when the model was patched
        apply_patch(model, sites, replace(wanted, by_layer=by_layer), record=False)
    model.config.attn_implementation = NAME  # the key may have been lost on its way


@wraps_method(PreTrainedConfig, "save_pretrained")
def _save_config(original: Any, self: PreTrainedConfig, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    config = _portable(self)
    original(config, save_directory, *args, **kwargs)
    if (getattr(config, "auto_map", None) or {}).get("AutoConfig") == _LOADER:
        shutil.copyfile(Path(__file__).with_name(CODE), Path(save_directory, CODE))


def _portable(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config as it is saved: what must be known where it is loaded, and nothing that is known here alone.

    Its `auto_map` names our file while the model is patched. One entry serves every Auto class, since all of them read
    the config first; models that bring code of their own keep theirs.
    """
    patched = _is_patched(config)
    auto_map = getattr(config, "auto_map", None) or {}
    ours = _LOADER in str(auto_map.get("AutoConfig"))  # loaded from the Hub, it has a repository's name in front
    if not patched and not ours:
        return config
    config = copy.deepcopy(config)
    for part in nested_configs(config):
        spec = getattr(part, SPEC, None)
        if isinstance(spec, dict) and spec.get("softmax") not in SOFTMAX_NAMES:  # a kernel, or of this process alone
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
    # Auto classes put what the caller asked for into the config; a key that was lost leaves None there.
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
                f"again. Leave it out, or call model.set_attn_implementation({NAME!r}).",
                stacklevel=3,
            )
    return (model, info) if wants_info else model


def _is_patched(config: PreTrainedConfig) -> bool:
    return any(getattr(c, SPEC, None) is not None for c in nested_configs(config))


def _check_tensors(path: str, info: dict[str, Any]) -> None:
    """Every tensor of the mechanisms must come from the checkpoint."""
    problems = {
        "lacks": info["missing_keys"],
        "has, but its config does not account for,": info["unexpected_keys"],
        "has the wrong shape of": [k[0] if isinstance(k, tuple) else k for k in info["mismatched_keys"]],
    }
    for what, keys in problems.items():
        names = sorted(key for key in keys if ".rf." in key)
        if names:
            raise ValueError(
                f"{path} {what} {len(names)} mechanism tensors, such as {names[0]}. "
                f"Nothing is drawn anew on loading. {DAMAGED}"
            )


def _finish_loading(model: PreTrainedModel, activate: bool) -> None:
    """Check that the layers of the config are there, and use the mechanisms even if the key `attn_implementation` was
    lost from the config on its way.
    """
    here = {site.index for site in find_attention(model)}
    for config in {id(m.config): m.config for m in model.modules() if isinstance(m, PreTrainedModel)}.values():
        if getattr(config, SPEC, None) is not None:
            beyond = sorted(set(PatchSpec.from_dict(getattr(config, SPEC)).by_layer) - here)
            if beyond:
                raise ValueError(f"config.{SPEC} patches layer {beyond[0]}, which this model does not have. {DAMAGED}")
            if activate:
                config._attn_implementation = {"": NAME}
