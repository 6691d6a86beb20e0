"""What result documents and cards call the attention of a model.

Documents hold "softmax", that of a mechanism (`MechanismConfig.to_dict`), or `{"layers": {"0-5": either, ...}}`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .config import option_value
from .registry import resolve_config

SOFTMAX = "softmax"


def full_config(config: Any) -> Any:
    """A mechanism's document with its defaults; one that is registered nowhere stays as it is."""
    if config == SOFTMAX:
        return config
    try:
        document = resolve_config(config).to_dict()
    except ValueError:
        return config
    return {k: [full_config(v) for v in value] if k == "far" else value for k, value in document.items()}


def mechanisms_in(attention: Any) -> list[Mapping[str, Any]]:
    """The document of every mechanism in an attention document, defaults spelt out, those inside "far" last."""
    configs = list(attention["layers"].values()) if _has_layers(attention) else [attention]
    full = [config for config in map(full_config, configs) if isinstance(config, Mapping)]
    far = [part for config in full for part in config.get("far", ()) if isinstance(part, Mapping)]
    return [config for config in [*full, *far] if "mechanism" in config]


def mechanism_names_in(attention: Any) -> list[str]:
    """The names of the mechanisms in an attention document, each once; none for softmax.

    >>> mechanism_names_in({"mechanism": "fmm", "far": ["elu"]}), mechanism_names_in("softmax")
    (['fmm', 'linear'], [])
    """
    return list(dict.fromkeys(config["mechanism"] for config in mechanisms_in(attention)))


def attention_label(attention: Any) -> str:
    """A short name for an attention document, for tables: mechanisms and the options that are not the default.

    >>> attention_label({"mechanism": "favor+", "num_features": 64, "antithetic": False})
    'favor+, num_features=64'
    """
    if _has_layers(attention):
        return "; ".join(f"layers {k}: {attention_label(v)}" for k, v in attention["layers"].items())
    config = full_config(attention)
    if not isinstance(config, Mapping):
        return str(config)
    default = full_config(config.get("mechanism", "?"))
    known = default if isinstance(default, Mapping) else {}
    return ", ".join([config.get("mechanism", "?"), *_changed_options(config, known)])


def _changed_options(config: Mapping[str, Any], default: Mapping[str, Any]) -> Iterator[str]:
    for option, value in config.items():
        if option == "mechanism" or default.get(option) == value:
            continue
        if option == "far":
            yield f"far=({', '.join(map(attention_label, value))})"
        else:
            yield f"{option}={option_value(value)}"


def _has_layers(attention: Any) -> bool:
    return isinstance(attention, Mapping) and "layers" in attention
