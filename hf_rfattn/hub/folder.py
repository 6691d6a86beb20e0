"""A folder that `save_pretrained` of a patched model has written: what it holds and how it is recognised."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..integration.spec import parse_layers
from ..mechanisms.naming import full_config
from ..results import SOFTMAX, checkpoint_fingerprint, read_result, weight_files
from ..results.fingerprint import CONFIG, WEIGHTS

CARD = "README.md"
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")


@dataclass(frozen=True)
class CheckpointFolder:
    """Reads config.json; raises ValueError if the folder holds no patched checkpoint."""

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / CONFIG).is_file():
            raise ValueError(f"{self.path} is not a checkpoint: it has no {CONFIG}.")
        if not self.specs:
            raise ValueError(
                f"{self.path} is not a patched checkpoint: its config.json says nothing of hf_rfattn. "
                "Call hf_rfattn.patch_model and model.save_pretrained first."
            )
        if not weight_files(self.path):
            raise ValueError(f"{self.path} has no weights: neither {WEIGHTS} nor shards.")

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_result(self.path / CONFIG)

    @cached_property
    def specs(self) -> dict[str, dict[str, Any]]:
        """What `patch_model` has noted, by the part of the model it belongs to; "" is the model itself."""
        parts = [("", self.config), *self.config.items()]
        found = {name: part["rfattn"] for name, part in parts if isinstance(part, dict) and part.get("rfattn")}
        if not all(isinstance(spec, dict) and spec.get("layers") for spec in found.values()):
            raise ValueError(f"{self.path / CONFIG}: rfattn has no layers.")
        return found

    @property
    def spec(self) -> dict[str, Any]:
        return next(iter(self.specs.values()))

    @property
    def attention(self) -> dict[str, Any]:
        """As result documents spell it."""
        return {"layers": self.spec["layers"]}

    @property
    def architecture(self) -> str:
        """The class in transformers that it is loaded with."""
        return next(iter(self.config.get("architectures") or ()), "AutoModel")

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.path)

    def holds(self, attention: Any) -> bool:
        """Whether a result's `attention` is the one in this checkpoint, options and layers included."""
        parts = [self.config, *(part for part in self.config.values() if isinstance(part, dict))]
        counts = [part[name] for part in parts for name in LAYER_COUNTS if isinstance(part.get(name), int)]
        patched = [layer for layers in self.spec["layers"] for layer in parse_layers(layers)]
        num_layers = max([*counts, 1 + max(patched)])
        return canonical(self.attention, num_layers) == canonical(attention, num_layers)


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
