"""The record of a patch in the config of a model: a JSON document that is written, read and validated here."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..install import install_command
from ..mechanisms import MechanismConfig, resolve_config
from ..mechanisms.config import check_nesting
from .names import SPEC

FORMAT = 1
SOFTMAX = "softmax"  # leaves a layer unpatched
_KEYS = ("format", "layers", "cross_attention", "seed", "softmax")
MOST_LAYERS = 10_000
SOFTMAX_NAMES = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
DAMAGED = "The checkpoint is damaged or was edited; save it again from the patched model."


@dataclass(frozen=True)
class PatchSpec:
    """A patch: the mechanism of each layer, whether cross-attention is patched, and the random seed."""

    by_layer: dict[int, MechanismConfig]
    cross_attention: bool = False
    seed: int = 0

    def to_dict(self) -> dict[str, Any]:
        groups: dict[str, tuple[MechanismConfig, list[int]]] = {}
        for number, config in self.by_layer.items():
            groups.setdefault(repr(config), (config, []))[1].append(number)
        layers = {format_layers(numbers): config.to_dict() for config, numbers in groups.values()}
        return {"format": FORMAT, "seed": self.seed, "cross_attention": self.cross_attention, "layers": layers}

    @classmethod
    def from_dict(cls, document: Any) -> "PatchSpec":
        """Validate and read a document. Raises ValueError if it is invalid, since it may come from anyone."""
        if not isinstance(document, Mapping):
            raise ValueError(f"config.{SPEC} must be a JSON object, not {type(document).__name__}. {DAMAGED}")
        check_nesting(document)
        version, layers, cross, seed, softmax = map(document.get, _KEYS)
        if type(version) is int and version > FORMAT:
            raise ValueError(
                f"This checkpoint has format {version} of hf_rfattn; this version reads up to {FORMAT}. Install a "
                f"newer version: {install_command()}."
            )
        possible = ", ".join(SOFTMAX_NAMES)  # no kernels from the Hub, which transformers would download
        for right, problem in (
            (type(version) is int and version > 0, "has no format version"),
            (isinstance(layers, Mapping) and layers, "does not say which layers are patched"),
            (type(cross) is bool and type(seed) is int, "needs a boolean cross_attention and an integer seed"),
            (softmax in SOFTMAX_NAMES, f"has an unknown softmax implementation {softmax!r}; known: {possible}"),
        ):
            if not right:
                raise ValueError(f"config.{SPEC} {problem}. {DAMAGED}")
        return cls(by_layer(layers), cross, seed)  # type: ignore[arg-type]


def by_layer(mapping: Mapping[Any, Any]) -> dict[int, Any]:
    """Expand a mapping from layers to names, configs or dicts to one config per layer; "softmax" stays a string."""
    chosen: dict[int, Any] = {}
    for key, value in mapping.items():
        config = value if value == SOFTMAX else resolve_config(value)
        for number in parse_layers(key):
            if number in chosen:
                raise ValueError(f"Layer {number} is given twice.")
            chosen[number] = config
    return chosen


def parse_layers(key: Any) -> list[int]:
    """Parse layer numbers.

    >>> parse_layers(3), parse_layers("0-2, 7"), parse_layers(range(2))
    ([3], [0, 1, 2, 7], [0, 1])
    """
    if type(key) is int:
        return [key]
    if isinstance(key, Iterable) and not isinstance(key, str):
        return [number for item in key for number in parse_layers(item)]
    numbers: list[int] = []
    for part in key.split(",") if isinstance(key, str) else [""]:
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"Cannot parse the layers {key!r}; write 3, '0-5', '0-2,7' or range(0, 6).")
        if int(last or first) >= MOST_LAYERS:
            raise ValueError(f"{key!r} has a layer number of {MOST_LAYERS} or more, which is not supported.")
        numbers.extend(range(int(first), int(last or first) + 1))
        if len(numbers) > MOST_LAYERS:
            raise ValueError(f"{key[:20]!r}… has more than {MOST_LAYERS} layers.")
    return numbers


def format_layers(numbers: Iterable[int]) -> str:
    """Format layer numbers in the syntax of `parse_layers`.

    >>> format_layers([0, 1, 2, 5])
    '0-2,5'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
