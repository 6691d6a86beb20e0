"""Configs of mechanisms: frozen dataclasses that are validated on construction and serialize to JSON."""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Union

# Upper limits, since a config may come from an untrusted checkpoint and these sizes are allocated. LARGEST: all others.
MOST = {"num_features": 16_384, "bandwidth": 16_384, "global_tokens": 1_024, "hadamard_blocks": 8}
LARGEST = 1_000_000
MOST_ITEMS = 32  # in a tuple


@dataclasses.dataclass(frozen=True)
class MechanismConfig:
    """Base class of all configs. Checks the fields against their type annotations on construction.

    Each field is an `option(default, help)`.
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check_value(field.name, getattr(self, field.name), hints[field.name])

    def __str__(self) -> str:
        """The name and all options that differ from their defaults, in command-line syntax."""
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return " ".join([self.name, *(f"{f.name}={option_value(getattr(self, f.name))}" for f in changed)])

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-serializable dict, which `resolve_config` turns back into this config."""
        return {"mechanism": self.name} | {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def replace(self, **options: Any) -> "MechanismConfig":
        """Return a copy with some options changed. Raises ValueError for unknown options."""
        check_options(self.name, type(self), options)
        return dataclasses.replace(self, **options)


def option(default: Any, help: str) -> Any:
    """Define a config field with its default and its description, which the command line and the docs show."""
    return dataclasses.field(default=default, metadata={"help": help})


def option_value(value: Any) -> str:
    """Format a value for the syntax NAME=VALUE.

    >>> option_value("joint"), option_value(None), option_value(("elu", "tanh"))
    ('joint', 'null', '["elu", "tanh"]')
    """
    return value if isinstance(value, str) else json.dumps(_plain(value))


@dataclasses.dataclass(frozen=True)
class Option:
    """Description of one option of a mechanism."""

    name: str
    default: str  # in the syntax NAME=VALUE
    choices: tuple[str, ...]
    help: str


def describe_options(config: type[MechanismConfig]) -> list[Option]:
    """Describe the options of a mechanism, in order. The command line and the docstrings show this description.

    >>> from hf_rfattn import BandConfig
    >>> [option.name for option in describe_options(BandConfig)]
    ['bandwidth', 'global_tokens']
    """
    hints = typing.get_type_hints(config)
    found = []
    for field in dataclasses.fields(config):
        literals = [hints[field.name], *typing.get_args(hints[field.name])]
        choices = [c for hint in literals if typing.get_origin(hint) is Literal for c in typing.get_args(hint)]
        text = field.metadata.get("help", "")
        found.append(Option(field.name, option_value(field.default), tuple(map(str, choices)), text))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, MechanismConfig):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _check_value(name: str, value: Any, hint: Any) -> None:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in (int, float):
        accepted = (int,) if hint is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise ValueError(f"{name} must be {'an integer' if hint is int else 'a number'}, not {value!r}.")
        if not math.isfinite(value):
            raise ValueError(f"{name} must be finite, not {value!r}.")
    elif origin is Literal:
        if value not in args or type(value) not in {type(a) for a in args}:
            raise ValueError(f"Invalid {name}={value!r}; choose one of {', '.join(map(repr, args))}.")
    elif origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return
        kinds = [kind for kind in args if kind is not type(None)]
        classes = [kind for kind in kinds[1:] if isinstance(kind, type)]
        if not isinstance(value, tuple(classes)):
            _check_value(name, value, kinds[0])
    elif origin is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a tuple, not {value!r}.")
        if len(value) > MOST_ITEMS:
            raise ValueError(f"{name} has {len(value)} items; at most {MOST_ITEMS} are allowed.")
        for item in value:
            _check_value(f"each of {name}", item, args[0])
    elif isinstance(hint, type) and not isinstance(value, hint):
        raise ValueError(f"{name} must be {hint.__name__}, not {value!r}.")


def check_at_least(config: MechanismConfig, least: int, *names: str) -> None:
    """Raise ValueError unless each named field is None, or at least `least` and within its limit in `MOST`."""
    for name in names:
        value, most = getattr(config, name), MOST.get(name, LARGEST)
        if value is not None and not least <= value <= most:
            raise ValueError(f"{name} must be between {least} and {most}, not {value!r}.")


def check_nesting(document: Any, most: int = 8) -> None:
    """Raise ValueError for a document nested deeper than any valid one, before anything recurses into it."""
    level = [document]
    for _ in range(most + 1):
        inner = [value.values() if isinstance(value, Mapping) else value for value in level]
        level = [item for values in inner for item in values if isinstance(item, (Mapping, list, tuple))]
        if not level:
            return
    raise ValueError(f"The document is nested more than {most} levels deep.")


def default_features(num_features: int | None, head_dim: int, even: bool, why: str = "") -> int:
    """Return `num_features`, or the head size if it is None. `even`: features come in pairs, so raise if it is odd."""
    count = head_dim if num_features is None else num_features
    if even and count % 2:
        given = f"num_features={count}" + (" (the head size)" if num_features is None else "")
        raise ValueError(f"{given} is odd, but {why}; choose an even num_features.")
    return count


def check_options(name: str, config: type[MechanismConfig], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that the config does not have."""
    known = [field.name for field in dataclasses.fields(config)]
    for option in options:
        if option not in known:
            raise ValueError(
                f"{name!r} has no option {option!r}{did_you_mean(option, known)}; its options: "
                f"{', '.join(known) or 'none'}."
            )


def did_you_mean(word: str, known: list[str]) -> str:
    """Return " (did you mean ...?)" for the closest known word, or an empty string."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
