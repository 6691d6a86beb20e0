"""A folder that `save_pretrained` of a patched model has written: what it holds and how it is recognised."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..commands import option_value
from ..integration.patching import SOFTMAX
from ..integration.spec import parse_layers
from ..mechanisms import resolve_config

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
CARD, RESULTS, PLOT = "README.md", "results", "results.png"
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


@dataclass(frozen=True)
class CheckpointFolder:
    """Reads config.json; raises ValueError if the folder holds no patched checkpoint."""

    path: Path

    def __post_init__(self) -> None:
        if not self.path.is_dir():
            raise ValueError(f"There is no folder {str(self.path)!r}.")
        if not self.specs:
            raise ValueError(
                f"{self.path} is not a patched checkpoint: its config.json says nothing of hf_rfattn. "
                "Call hf_rfattn.patch_model and model.save_pretrained first."
            )
        if not self.weights:
            raise ValueError(f"{self.path} has no weights: neither {WEIGHTS} nor {INDEX} with its shards.")

    @cached_property
    def config(self) -> dict[str, Any]:
        path = self.path / CONFIG
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{self.path} has no config.json: it is not a checkpoint.") from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a JSON document: {error}.") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path} is not a config.")
        return config

    @cached_property
    def specs(self) -> dict[str, dict[str, Any]]:
        """What `patch_model` has noted, by the part of the model it belongs to; "" is the model itself."""
        found = {}
        for name, part in [("", self.config), *self.config.items()]:
            if isinstance(part, dict) and isinstance(part.get("rfattn"), dict):
                spec = part["rfattn"]
                if not isinstance(spec.get("layers"), dict) or not spec["layers"]:
                    raise ValueError(f"{self.path / 'config.json'}: rfattn has no layers.")
                found[name] = spec
        return found

    @cached_property
    def spec(self) -> dict[str, Any]:
        return next(iter(self.specs.values()))

    @property
    def num_layers(self) -> int:
        """As many as the config says, or as were patched."""
        parts = [self.config, *(part for part in self.config.values() if isinstance(part, dict))]
        counts = [part[name] for part in parts for name in LAYER_COUNTS if isinstance(part.get(name), int)]
        return max([*counts, 1 + max(max(parse_layers(layers)) for layers in self.spec["layers"])])

    @property
    def weights(self) -> list[Path]:
        return weight_files(self.path)

    @property
    def architecture(self) -> str | None:
        return next(iter(self.config.get("architectures") or ()), None)

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.path)

    @property
    def results_fingerprint(self) -> str:
        return results_fingerprint(self.path)

    def holds(self, attention: Any) -> bool:
        """Whether a result's `attention` is the one in this checkpoint, options and layers included."""
        own = canonical({"layers": self.spec["layers"]}, self.num_layers)
        return own == canonical(attention, self.num_layers)


def weight_files(folder: Path) -> list[Path]:
    """The weights that `from_pretrained` reads, and no other tensors: one file, or the shards that an index names."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is not an index of weights: {type(error).__name__}: {error}.") from error
    for name in names:
        if not isinstance(name, str) or not SHARD.fullmatch(name) or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file of weights in this folder.")
    return [folder / name for name in names]


def checkpoint_fingerprint(folder: str | Path) -> str:
    """SHA-256 over config.json and the weights: what a result and a card name the checkpoint by."""
    folder = Path(folder)
    return _digest([folder / CONFIG, *weight_files(folder)])


def results_fingerprint(folder: Path) -> str:
    """The same over the result documents that lie beside the weights."""
    return _digest(sorted((folder / RESULTS).glob("*.json")))


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        one = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                one.update(block)
        total.update(f"{file.name}\0{one.hexdigest()}\n".encode())
    return total.hexdigest()


def check_attention(attention: Any) -> Any:
    """A result's `attention`, if it has one of the forms it can have."""
    if _has_layers(attention):
        layers = attention["layers"]
        if len(attention) > 1 or not isinstance(layers, Mapping) or not layers:
            raise ValueError("'layers' stands alone and says what each layer has, as in {'layers': {'0-5': ...}}.")
        for key, config in layers.items():
            parse_layers(key)
            if not isinstance(config, str):
                _check_mechanism(config)
    elif attention != SOFTMAX:
        _check_mechanism(attention)
    return attention


def _check_mechanism(config: Any) -> None:
    if not isinstance(config, Mapping) or not isinstance(config.get("mechanism"), str):
        raise ValueError(f"{config!r} is neither 'softmax' nor the document of a mechanism, {{'mechanism': ...}}.")
    if not isinstance(config.get("far", []), (list, tuple)):
        raise ValueError(f"far must be a list, not {config['far']!r}.")


def canonical(attention: Any, num_layers: int) -> dict[int, Any]:
    """The attention of every layer with all options spelt out.

    >>> canonical({"layers": {"1": "elu"}}, 2)
    {0: 'softmax', 1: {'mechanism': 'linear', 'feature_map': 'elu'}}
    """
    if isinstance(attention, Mapping) and "layers" in attention:
        by_layer: dict[int, Any] = dict.fromkeys(range(num_layers), SOFTMAX)
        for layers, config in attention["layers"].items():
            by_layer.update(dict.fromkeys(parse_layers(layers), full_config(config)))
        return by_layer
    return dict.fromkeys(range(num_layers), full_config(attention))


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
    """The document of every mechanism of a result's `attention`, defaults spelt out, those inside "far" last."""
    configs = list(attention["layers"].values()) if _has_layers(attention) else [attention]
    full = [config for config in map(full_config, configs) if isinstance(config, Mapping)]
    far = [part for config in full for part in config.get("far", ()) if isinstance(part, Mapping)]
    return [config for config in [*full, *far] if "mechanism" in config]


def mechanism_names_in(attention: Any) -> list[str]:
    """Their names, each once.

    >>> mechanism_names_in({"mechanism": "fmm", "far": ["elu"]})
    ['fmm', 'linear']
    """
    return list(dict.fromkeys(config["mechanism"] for config in mechanisms_in(attention)))


def needs_calibration(attention: Any) -> bool:
    """Whether it has features whose variance is optimal only for data that was measured (FAVOR++).

    >>> needs_calibration({"mechanism": "fmm", "far": [{"mechanism": "favor+", "variance": "optimal"}]})
    True
    """
    return any(config.get("variance") == "optimal" for config in mechanisms_in(attention))


def attention_label(attention: Any) -> str:
    """Short, for a table: names and the options that are not the default's.

    >>> attention_label({"mechanism": "favor+", "num_features": 64, "antithetic": False})
    'favor+, num_features=64'
    """
    if attention == SOFTMAX:
        return SOFTMAX
    if _has_layers(attention):
        return "; ".join(f"layers {k}: {attention_label(v)}" for k, v in attention["layers"].items())
    config = full_config(attention)
    if not isinstance(config, Mapping):
        return str(config)
    name = config.get("mechanism", "?")
    default = full_config(name)
    known = default if isinstance(default, Mapping) else {}
    return ", ".join([name, *_changed_options(config, known)])


def _changed_options(config: Mapping[str, Any], default: Mapping[str, Any]) -> Iterator[str]:
    for option, value in config.items():
        if option != "mechanism" and default.get(option) != value:
            if option == "far":
                yield f"far=({', '.join(map(attention_label, value))})"
            else:
                yield f"{option}={option_value(value)}"


def _has_layers(attention: Any) -> bool:
    return isinstance(attention, Mapping) and "layers" in attention
