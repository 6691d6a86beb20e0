"""A folder that `save_pretrained` of a patched model has written: what it holds and how it is recognised."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..integration.spec import parse_layers
from ..mechanisms.naming import full_config
from ..results import SOFTMAX, checkpoint_fingerprint, read_result, weight_files
from ..results.fingerprint import CONFIG, INDEX, WEIGHTS

CARD = "README.md"
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
        if not (self.path / CONFIG).is_file():
            raise ValueError(f"{self.path} has no config.json: it is not a checkpoint.")
        return read_result(self.path / CONFIG)

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
    def architecture(self) -> str:
        """The class in transformers that it is loaded with."""
        return next(iter(self.config.get("architectures") or ()), "AutoModel")

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.path)

    def holds(self, attention: Any) -> bool:
        """Whether a result's `attention` is the one in this checkpoint, options and layers included."""
        own = canonical({"layers": self.spec["layers"]}, self.num_layers)
        return own == canonical(attention, self.num_layers)


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
