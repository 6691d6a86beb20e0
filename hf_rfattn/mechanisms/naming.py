"""Names of attention in result documents and model cards.

An attention document is "softmax", the dict of a mechanism (`MechanismConfig.to_dict`), or `{"layers": {"0-5": ...}}`
with one of them per range of layers.
"""

from collections.abc import Mapping
from typing import Any

from .config import option_value
from .registry import resolve_config


def full_config(config: Any) -> Any:
    """Add the defaults to a mechanism's dict. The dict of an unregistered mechanism is returned unchanged."""
    try:
        document = resolve_config(config).to_dict()
    except ValueError:
        return config
    if "far" in document:
        document["far"] = [full_config(each) for each in document["far"]]
    if "rest" in document:
        document["rest"] = full_config(document["rest"])
    return document


def mechanisms_in(attention: Any) -> list[Mapping[str, Any]]:
    """Return the dicts of all mechanisms in an attention document, with defaults; those inside others come last."""
    layered = isinstance(attention, Mapping) and "layers" in attention
    full = [full_config(config) for config in (attention["layers"].values() if layered else [attention])]
    known = [config for config in full if isinstance(config, Mapping)]
    inner = [
        part for config in known for part in (*config.get("far", ()), *([config["rest"]] if "rest" in config else ()))
    ]
    return [config for config in [*full, *inner] if isinstance(config, Mapping) and "mechanism" in config]


def mechanism_names_in(attention: Any) -> list[str]:
    """Return the names of the mechanisms in the attention of a result document, each once; none for softmax.

    >>> mechanism_names_in({"mechanism": "fmm", "far": ["elu"]}), mechanism_names_in("softmax")
    (['fmm', 'linear'], [])
    """
    return list(dict.fromkeys(config["mechanism"] for config in mechanisms_in(attention)))


def attention_label(attention: Any) -> str:
    """Return a short name for the attention of a result document: its mechanisms and their non-default options.

    >>> attention_label({"mechanism": "favor+", "num_features": 64, "antithetic": False})
    'favor+, num_features=64'
    >>> exact = {"mechanism": "exact_heads", "heads": [1, 2], "rest": "hedgehog"}
    >>> attention_label({"layers": {"0-1,5": exact, "2-4": "hedgehog"}})
    'hedgehog, 6 exact heads'
    """
    if isinstance(attention, Mapping) and "layers" in attention:
        layers = attention["layers"]
        exact = {k: config for k, config in layers.items() if isinstance(config, Mapping) and "rest" in config}
        rests = {attention_label(config["rest"] if k in exact else config) for k, config in layers.items()}
        if exact and len(rests) == 1:
            heads = sum(_number_of_layers(k) * len(config["heads"]) for k, config in exact.items())
            return f"{rests.pop()}, {heads} exact heads"
        return "; ".join(f"layers {k}: {attention_label(v)}" for k, v in layers.items())
    config = full_config(attention)
    if not isinstance(config, Mapping):
        return str(config)
    name = config.get("mechanism", "?")
    default = full_config(name)
    label = [name]
    for option, value in config.items():
        if option != "mechanism" and not (isinstance(default, Mapping) and default.get(option) == value):
            inner = {"far": value, "rest": [value]}.get(option)
            label.append(
                f"{option}=({', '.join(map(attention_label, inner))})" if inner else f"{option}={option_value(value)}"
            )
    return ", ".join(label)


def _number_of_layers(layers: str) -> int:
    """Count the layers of a key such as "0-2,5"."""
    ranges = (part.partition("-") for part in layers.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in ranges)
