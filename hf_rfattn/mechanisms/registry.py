"""Registry of mechanisms, and construction of a mechanism from a name, a config or a JSON document."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from .base import Mechanism
from .config import MechanismConfig, check_nesting, check_options, describe_options, did_you_mean

_REGISTRY: dict[str, tuple[type[MechanismConfig], type[Mechanism]]] = {}
_ALIASES: dict[str, tuple[str, dict[str, Any]]] = {}  # alias: (name, options)


def register_mechanism(
    name: str,
    config: type[MechanismConfig],
    module: type[Mechanism],
    aliases: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Register a mechanism under `name`. `aliases` maps other names to options preset for them.

    Call this in the file that defines the mechanism, also in packages of your own. `patch_model`, `build_mechanism`,
    the command line and the test suite then find it.
    """
    for given in [name, *(aliases or {})]:
        known = _REGISTRY.get(_ALIASES.get(given, (given, {}))[0])
        if known and known[1].__qualname__ != module.__qualname__:
            raise ValueError(f"A mechanism named {given!r} is already registered; choose another name.")
    if not (dataclasses.is_dataclass(config) and issubclass(config, MechanismConfig)):
        raise ValueError(f"The config of {name!r} must be a frozen dataclass derived from MechanismConfig.")
    config.name = name
    listed = "".join(f"\n    {o.name} = {o.default}: {o.help}" for o in describe_options(config))
    config.__doc__ = f"{config.__doc__ or name}\n{listed}" if listed else config.__doc__  # for help()
    _REGISTRY[name] = config, module
    _ALIASES.update({alias: (name, dict(options)) for alias, options in (aliases or {}).items()})


def mechanism_names() -> list[str]:
    """Return the names of all registered mechanisms, without aliases."""
    return sorted(_REGISTRY)


def mechanism_aliases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return a dict from each alias to the name of its mechanism and the options it sets.

    >>> mechanism_aliases()["elu-"]
    ('linear', {'feature_map': 'elu-'})
    """
    return dict(sorted(_ALIASES.items()))


def mechanism_title(config: type[MechanismConfig]) -> str:
    """Return the first line of the docstring of the file that defines a mechanism."""
    return (sys.modules[config.__module__].__doc__ or "").strip().partition("\n")[0]


def mechanism_class(config: MechanismConfig) -> type[Mechanism]:
    """Return the module class registered for a config."""
    registered, module = _REGISTRY.get(getattr(config, "name", ""), (None, Mechanism))
    if registered is not type(config):
        raise ValueError(f"{type(config).__name__} is not registered; call register_mechanism first.")
    return module


def resolve_config(attention: "str | MechanismConfig | Mapping[str, Any]", **options: Any) -> MechanismConfig:
    """Return the config for a name, a config, or a dict from `MechanismConfig.to_dict`. `options` override its fields.

    >>> resolve_config("performer", num_features=32).num_features
    32
    """
    if isinstance(attention, MechanismConfig):
        mechanism_class(attention)
        return attention.replace(**options)
    if isinstance(attention, Mapping):
        check_nesting(attention)
        document = dict(attention)
        name = document.pop("mechanism", None)
        if not isinstance(name, str):
            raise ValueError(f"The config has no key 'mechanism' with a name; its keys are {sorted(attention)}.")
        return resolve_config(name, **{k: _restored(v) for k, v in document.items()}, **options)
    if not isinstance(attention, str):
        raise ValueError(f"attention must be a name, a config or a dict, not {attention!r}.")
    key = attention.lower()
    name, preset = _ALIASES.get(key, (key, {}))
    if name not in _REGISTRY:
        known = sorted(_REGISTRY) + sorted(_ALIASES)
        raise ValueError(
            f"Unknown attention {attention!r}{did_you_mean(key, known)}; known: {', '.join(known)}. "
            "If another package defines it, import that package first."
        )
    config = _REGISTRY[name][0]
    options = {**preset, **options}
    check_options(name, config, options)
    return config(**options)


def parse_attention(attention: str, assignments: Iterable[str]) -> MechanismConfig:
    """Return the config of a mechanism with options NAME=VALUE, where VALUE is JSON or plain text.

    >>> parse_attention("fmm", ["bandwidth=8", "normalizer=joint"]).bandwidth
    8
    """
    document: dict[str, Any] = {"mechanism": attention}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"Cannot parse the option {assignment!r}; write NAME=VALUE, for example num_features=128.")
        if name in document:
            raise ValueError(f"The option {name!r} is given twice.")
        try:
            document[name] = json.loads(value)
        except json.JSONDecodeError:
            document[name] = value
    return resolve_config(document)


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(v) for v in value)
    return resolve_config(value) if isinstance(value, Mapping) else value


def build_mechanism(
    attention: "str | MechanismConfig | Mapping[str, Any]",
    *,
    num_heads: int,
    head_dim: int,
    num_kv_heads: int | None = None,
    layer_idx: int = 0,
    seed: int = 0,
    **options: Any,
) -> Mechanism:
    """Build one mechanism, for use without transformers.

    `attention`: a name, a config, or a dict from `MechanismConfig.to_dict`. `num_kv_heads`: number of key and value
    heads, `num_heads` by default; fewer for grouped-query attention. `layer_idx` and `seed`: seeds of the random
    projections. `options`: options of the mechanism.

    >>> import torch
    >>> mechanism = build_mechanism("favor+", num_heads=2, head_dim=8, num_features=16)
    >>> q = k = v = torch.randn(1, 2, 5, 8)
    >>> mechanism(q, k, v, causal=True).shape
    torch.Size([1, 2, 5, 8])
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, value in (("num_heads", num_heads), ("head_dim", head_dim), ("num_kv_heads", num_kv_heads)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}.")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}.")
    config = resolve_config(attention, **options)
    module = mechanism_class(config)
    return module(config, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, seed=(seed, layer_idx))
