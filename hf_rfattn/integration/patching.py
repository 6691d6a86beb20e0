"""`patch_model` and `unpatch_model`: add mechanisms to the attention modules of a model, and remove them."""

import copy
import itertools
import warnings
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..mechanisms import Mechanism, MechanismConfig, build_mechanism, resolve_config
from ..mechanisms.base import random_maps
from ..mechanisms.registry import mechanism_class
from .attention import CallCheck
from .cache import Stateful, hand_on_cache
from .discovery import AttentionSite, find_attention, outermost_models, uses_interface
from .names import NAME, SPEC
from .redraw import RedrawSchedule
from .spec import SOFTMAX, PatchSpec, by_layer, format_layers, parse_layers

UNTRAINED = "Without training"  # start of the warning, by which code that trains afterwards filters it
_PATCHES = itertools.count()

M = TypeVar("M", bound=nn.Module)
Attention = str | MechanismConfig | Mapping[Any, "str | MechanismConfig | Mapping[str, Any]"]


def patch_model(
    model: M,
    attention: Attention,
    *,
    layers: Iterable[int] | str | None = None,
    cross_attention: bool = False,
    seed: int = 0,
    **options: Any,
) -> M:
    """Replace the softmax attention of a pretrained model, in place, and return the model.

    `model`: a transformers model, or any module that contains some, such as a `SentenceTransformer`.
    `attention`: a name (see `mechanism_names()`), a config such as `FmmConfig(bandwidth=64)`, or a mapping from layers
    (`3`, `"0-5"`, `range(6, 12)`) to names or configs, where "softmax" leaves a layer unchanged. `choose_attention`
    computes such a mapping from errors on your data. `layers`: layers to patch, all by default; the others keep exact
    softmax. `cross_attention`: also patch the attention from a decoder to an encoder. `seed`: random seed.
    `options`: options of the mechanism.

    Patching a patched model replaces the old patch. If an error is raised, the model is unchanged. Warns if a mechanism
    that needs training is used in a pretrained model, unless the model is in training mode.

    >>> from transformers import BertConfig, BertModel
    >>> tiny = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    >>> model = patch_model(BertModel(tiny), "favor+", num_features=16)
    >>> model.encoder.layer[0].attention.self.rf.config.num_features
    16
    """
    sites = find_attention(model)
    if any(getattr(site.module.config, "output_attentions", False) for site in sites):
        raise ValueError(
            "config.output_attentions is True, but patched layers have no attention weights to return; set it to False."
        )
    explicit = layers is not None or isinstance(attention, Mapping)
    spec = PatchSpec(_by_layer(sites, attention, layers, options), cross_attention, seed)
    apply_patch(model, sites, spec, explicit=explicit)
    if not model.training and any(m.config.name_or_path for m in outermost_models(model)):  # set by from_pretrained
        untrained = {config.name for config in spec.by_layer.values() if mechanism_class(config).needs_training}
        if untrained:
            warnings.warn(
                f"{UNTRAINED}, {' and '.join(sorted(untrained))} attention in a pretrained model is no better than "
                "averaging all values: train it with hf_rfattn.convert, fine-tune the model, or use 'multipole'.",
                stacklevel=2,
            )
    return model


def apply_patch(
    model: nn.Module, sites: list[AttentionSite], spec: PatchSpec, *, explicit: bool = False, record: bool = True
) -> None:
    """Patch the layers of a spec. `record`: write the spec into the configs of the model.

    `explicit`: the user named the layers, so each of them must have a module that can be patched.
    """
    plan = _plan(sites, spec, explicit)
    _check_not_sharded(model)
    # Nothing after this line can fail, so the model is unchanged if an error is raised.
    mechanisms = [build_at(site, config, spec.seed) for site, config in plan]
    patched = [site for site, _ in plan]
    configs = _configs(patched)

    _remove_mechanisms(model)
    for site, mechanism in zip(patched, mechanisms, strict=True):
        mechanism.patch_number = next(_PATCHES)  # type: ignore[assignment]  # lets caches recognise it
        site.module.rf = mechanism
    for site in sites:
        if any(site.module.config is config for config in configs):
            if "rf" not in site.module._modules:
                site.module.rf = None  # type: ignore[assignment]  # softmax on purpose
            if not site.cross:
                site.module.register_forward_pre_hook(hand_on_cache, with_kwargs=True)
    modules = {id(site.module) for site in patched}
    for holder in [m for m in model.modules() if isinstance(m, PreTrainedModel)]:
        innermost = any(site.owner is holder for site in patched)
        if not modules.isdisjoint(map(id, holder.modules())):
            holder.register_forward_pre_hook(CallCheck(positions=innermost), with_kwargs=True)
            if holder.can_generate() and not holder._is_stateful:
                holder._is_stateful = Stateful([site.module for site in patched])  # type: ignore[assignment]
        if innermost and any(m.redraw_interval is not None for m in random_maps(holder)):
            holder.register_forward_pre_hook(RedrawSchedule())
    if record:
        own_configs(model)
        _forget(model)
        for config in _configs(patched):
            setattr(config, SPEC, {**spec.to_dict(), "softmax": config._attn_implementation or "sdpa"})
            config._attn_implementation = {"": NAME}  # for this config only, not for nested ones
            config.attn_implementation = NAME


def unpatch_model(model: M) -> M:
    """Restore softmax attention, in place, and return the model.

    Outputs and `state_dict` are then bit for bit those of the original model. An unpatched model is left unchanged.
    """
    _remove_mechanisms(model)
    if any(getattr(config, SPEC, None) is not None for config in _all_configs(model)):
        own_configs(model)
        _forget(model)
    return model


def _remove_mechanisms(model: nn.Module) -> None:
    for module in model.modules():
        if uses_interface(type(module)) and hasattr(module, "rf"):
            del module.rf
        if isinstance(module, PreTrainedModel):
            vars(module).pop("_is_stateful", None)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is hand_on_cache or isinstance(hook, RedrawSchedule | CallCheck):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def _forget(model: nn.Module) -> None:
    """Remove the record of a patch from the configs of a model."""
    for config in _all_configs(model):
        spec = getattr(config, SPEC, None)
        if spec is not None:
            if config._attn_implementation == NAME:
                config._attn_implementation = {"": spec["softmax"]}
            delattr(config, SPEC)
            vars(config).pop("attn_implementation", None)


def _all_configs(model: nn.Module) -> list[Any]:
    return [module.config for module in model.modules() if hasattr(module, "config")]


def _check_not_sharded(model: nn.Module) -> None:
    """Raise for tensor parallelism: each rank has some of the heads, but mechanisms and checkpoints have all."""
    for config in _all_configs(model):
        settings = getattr(config, "distributed_config", None)
        size = getattr(settings, "tp_size", 1)
        if size != 1 and getattr(settings, "tp_plan", None) != {}:
            raise NotImplementedError(
                f"The model is loaded with tensor parallelism (tp_size={size}), but patched layers need all heads of a "
                "layer. Use DistributedConfig(fsdp_size=...), accelerate or torch's DistributedDataParallel."
            )


def _by_layer(
    sites: list[AttentionSite], attention: Attention, layers: Any, options: dict[str, Any]
) -> dict[int, MechanismConfig]:
    """Map layer numbers to mechanisms. Layers that are not in the result stay softmax."""
    present = sorted({site.index for site in sites if not site.cross} or {site.index for site in sites})
    if isinstance(attention, Mapping):
        if layers is not None or options:
            raise ValueError("layers and options cannot be combined with a mapping; put them into the mapping.")
        chosen: dict[int, Any] = by_layer(attention)
    else:
        config = resolve_config(attention, **options)
        chosen = dict.fromkeys(present if layers is None else parse_layers(layers), config)
    missing = sorted(set(chosen) - set(present))
    if missing:
        raise ValueError(f"This model has no layer {missing[0]}; its layers are {format_layers(present)}.")
    chosen = {number: config for number, config in sorted(chosen.items()) if config != SOFTMAX}
    if not chosen:
        raise ValueError("No layer was chosen to be patched. To restore softmax, use unpatch_model(model).")
    return chosen


def _plan(sites: list[AttentionSite], spec: PatchSpec, explicit: bool) -> list[tuple[AttentionSite, MechanismConfig]]:
    """Return the modules to patch.

    Modules that cannot be patched stay softmax, with a warning. Raises ValueError for a layer that the user named and
    that has no other modules.
    """
    wanted = [s for s in sites if s.index in spec.by_layer and (spec.cross_attention or not s.cross)]
    plan = [(s, spec.by_layer[s.index]) for s in wanted if not s.refusal]
    refused = [s for s in wanted if s.refusal]
    if not wanted:
        raise ValueError("The chosen layers have only cross-attention; pass cross_attention=True to patch it.")
    possible = {site.index for site, _ in plan}
    impossible = [s for s in refused if s.index not in possible]
    if not plan or (explicit and impossible):
        site = impossible[0]
        raise ValueError(
            f"{site.name} ({type(site.module).__name__}) cannot be patched: {site.refusal}. Nothing was changed."
        )
    for site, config in plan:
        if site.cross and not mechanism_class(config).handles_cross_attention:
            raise ValueError(
                f"{config.name!r} attends to a band around the diagonal, which is undefined in cross-attention "
                f"({site.name}); set cross_attention=False or choose a mechanism without a band."
            )
    if refused:
        warnings.warn(
            f"{len(refused)} of {len(wanted)} attention modules stay softmax, because {refused[0].refusal} "
            f"({', '.join(s.name for s in refused[:3])}{', …' if len(refused) > 3 else ''}).",
            stacklevel=4,
        )
    return plan


def build_at(site: AttentionSite, config: MechanismConfig, seed: int) -> Mechanism:
    """Build the mechanism of one attention module, on its device and in its dtype."""
    mechanism = build_mechanism(
        config,
        num_heads=site.num_heads,
        num_kv_heads=site.num_kv_heads,
        head_dim=site.head_dim,
        layer_idx=site.ordinal,
        seed=seed,
    )
    # If weights are quantised, the other parameters have the compute dtype, and a module may have no parameters.
    near = [*site.module.parameters(), *site.owner.parameters()]
    device = next((p.device for p in near), None)
    dtype = next((p.dtype for p in near if p.is_floating_point() and p.dtype.itemsize > 1), torch.get_default_dtype())
    mechanism = mechanism.to(device=device, dtype=dtype).train(site.module.training)
    for part in mechanism.modules():  # so that init_weights does not initialize it again
        part._is_hf_initialized = device != torch.device("meta")  # type: ignore[assignment]
    return mechanism


def _configs(sites: Iterable[AttentionSite]) -> list[Any]:
    """The distinct config objects of these modules and of the models that own them."""
    configs = [c for site in sites for c in (site.module.config, site.owner.config)]
    return list({id(c): c for c in configs}.values())


_MODELS: weakref.WeakValueDictionary[int, PreTrainedModel] = weakref.WeakValueDictionary()


def remember_model(model: PreTrainedModel) -> None:
    """Register a model, so that `own_configs` finds the models that contain a given one."""
    _MODELS[id(model)] = model


def own_configs(model: nn.Module) -> None:
    """Replace the configs of a model, and of the models that contain it, with copies.

    Models created from one config object share it, so a patch recorded there would apply to all of them. The parts of a
    model also share a config, and share the copy afterwards.
    """
    known = [reference() for reference in _MODELS.valuerefs()]
    wholes = [m for m in known if m is not None and any(part is model for part in m.modules())]
    copies: dict[int, Any] = {}
    for module in {id(m): m for whole in (*wholes, model) for m in whole.modules()}.values():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(module, name, copy.deepcopy(value, copies))
