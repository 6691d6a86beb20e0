"""The folder of a saved patched model: its contents and its fingerprint."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..results import checkpoint_fingerprint, read_result, weight_files
from ..results.fingerprint import CONFIG, WEIGHTS

CARD = "README.md"


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder with a patched checkpoint. Raises ValueError if it has none."""

    path: Path

    def __post_init__(self) -> None:
        if not (self.path / CONFIG).is_file():
            raise ValueError(f"{self.path} is not a checkpoint: it has no {CONFIG}.")
        if not self.specs:
            raise ValueError(
                f"{self.path} is not a patched checkpoint: its config.json has no key 'rfattn'. "
                "Call hf_rfattn.patch_model and model.save_pretrained first."
            )
        if not weight_files(self.path):
            raise ValueError(f"{self.path} has no weights: neither {WEIGHTS} nor shards of it.")

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_result(self.path / CONFIG)

    @cached_property
    def specs(self) -> dict[str, dict[str, Any]]:
        """Records of `patch_model`, by part of the model; "" is the model itself."""
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
        """The attention, in the format of result documents."""
        return {"layers": self.spec["layers"]}

    @property
    def architecture(self) -> str:
        """The transformers class to load it with."""
        return next(iter(self.config.get("architectures") or ()), "AutoModel")

    @cached_property
    def fingerprint(self) -> str:
        return checkpoint_fingerprint(self.path)
