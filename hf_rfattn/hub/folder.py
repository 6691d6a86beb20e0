"""A folder that `save_pretrained` of a patched model has written: what it holds and how it is recognised."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..results import checkpoint_fingerprint, read_result, weight_files
from ..results.fingerprint import CONFIG, WEIGHTS

CARD = "README.md"


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
