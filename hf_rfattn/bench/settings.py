"""What each benchmark can be asked. The fields are the options of its command, described here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DIRECTIONS = {"bidirectional": False, "causal": True}
PASSES = {"forward": False, "training": True}
PATHS = ("torch", "compiled", "fused")
ATTENTION = ("favor+", "hedgehog", "fmm", "band", "multipole", "average")


def setting(default: Any, help: str, **rules: Any) -> Any:
    """A field with what its option needs: `min`, the least value, or `choices`, names and what they stand for."""
    return field(default=default, metadata={"help": help, **rules})


@dataclass(kw_only=True)
class Settings:
    """What all benchmarks share."""

    attention: Sequence[str] = setting(
        ATTENTION, "Mechanisms, separated by commas; `hf-rfattn list` shows all. Softmax is always measured."
    )
    paths: Sequence[str] = setting(
        (),
        "Implementations: torch, compiled (torch.compile), fused (GPU kernels). [default: torch; on a GPU all]",
        choices={name: name for name in PATHS},
    )
    device: str = setting("cpu", "Device, such as cpu or cuda:1.")
    dtype: str = setting("", "float32, bfloat16 or float16. [default: float32; on a GPU bfloat16]")
    batch: int = setting(1, "Batch size.", min=1)
    repetitions: int = setting(8, "Number of repetitions; results are medians.", min=1)
    max_seconds: float = setting(1.0, "Time limit per measurement; slow ones are repeated less often.", min=0)
    threads: int | None = setting(None, "Number of torch threads. [default: that of torch]", min=1)
    seed: int = setting(0, "Random seed.")

    def __post_init__(self) -> None:
        on_cpu = self.device.startswith("cpu")
        self.paths = tuple(self.paths) or (PATHS[:1] if on_cpu else PATHS)
        self.dtype = self.dtype or ("float32" if on_cpu else "bfloat16")


@dataclass(kw_only=True)
class OpsSettings(Settings):
    """Of one attention layer."""

    lengths: Sequence[int] = setting((128, 512, 1024, 2048, 4096, 8192, 16384), "Sequence lengths.")
    features: Sequence[int] = setting((64,), "Numbers of random features, for mechanisms with that option.")
    directions: Sequence[bool] = setting((False, True), "bidirectional, causal or both.", choices=DIRECTIONS)
    passes: Sequence[bool] = setting(
        (False, True), "forward (inference), training (forward and backward) or both.", choices=PASSES
    )
    heads: int = setting(12, "Number of heads.", min=1)
    head_dim: int = setting(64, "Head size.", min=1)


@dataclass(kw_only=True)
class ModelSettings(Settings):
    """Of a whole model."""

    attention: Sequence[str] = setting(
        (), "Mechanisms, separated by commas. [default: that of a patched model, or favor+]"
    )
    model: str = setting("bert", "A folder, a name on the Hub, or bert or gpt2 (random weights).")
    base_model: str | None = setting(None, "Name of the model in results and model cards.")
    lengths: Sequence[int] = setting((128, 512, 1024, 2048), "Sequence lengths.")
    passes: Sequence[bool] = setting(
        (False, True), "forward (inference), training (a step of AdamW) or both.", choices=PASSES
    )
    repetitions: int = setting(6, "Number of repetitions; results are medians.", min=1)
    max_seconds: float = setting(5.0, "Time limit per measurement; slow ones are repeated less often.", min=0)


@dataclass(kw_only=True)
class DecodeSettings(Settings):
    """Of generation."""

    model: str = setting("gpt2", "A folder, a name on the Hub, or gpt2 (random weights).")
    contexts: Sequence[int] = setting((1024, 4096, 16384), "Context lengths: tokens in the cache at the start.")
    tokens: int = setting(4, "Tokens to generate and time in each repetition.", min=1)
    max_seconds: float = setting(10.0, "Time limit per measurement; slow ones are repeated less often.", min=0)
