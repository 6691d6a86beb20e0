"""Settings of the benchmarks. The fields are the options of their commands, with the help text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DIRECTIONS = {"bidirectional": False, "causal": True}
PASSES = {"forward": False, "training": True}
PATHS = ("torch", "compiled", "fused")
ATTENTION = ("favor+", "hedgehog", "fmm", "band", "multipole", "average")
REPETITIONS = "Repetitions of each measurement; the median is reported."
TIME_LIMIT = "Time limit for all repetitions of one measurement; slow ones are repeated less often."


def setting(default: Any, help: str, **rules: Any) -> Any:
    """Define a setting with its help text and `min`, its smallest value, or `choices`, a dict from names to values."""
    return field(default=default, metadata={"help": help, **rules})


@dataclass(kw_only=True)
class Settings:
    """Settings that all benchmarks share."""

    attention: Sequence[str] = setting(
        ATTENTION, "Mechanisms of `hf-rfattn list`, separated by commas. Softmax is always measured."
    )
    paths: Sequence[str] = setting(
        (),
        "torch, compiled (torch.compile) or fused (GPU kernels), separated by commas. Default: torch on a CPU, all on "
        "a GPU.",
        choices={name: name for name in PATHS},
    )
    device: str = setting("cpu", "Torch device: cpu, cuda, cuda:1.")
    dtype: str = setting("", "float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on a GPU.")
    batch: int = setting(1, "Batch size.", min=1)
    repetitions: int = setting(8, REPETITIONS, min=1)
    max_seconds: float = setting(1.0, TIME_LIMIT, min=0)
    threads: int | None = setting(None, "Number of torch threads. Default: torch's own.", min=1)
    seed: int = setting(0, "Random seed.")

    def __post_init__(self) -> None:
        on_cpu = self.device.startswith("cpu")
        self.paths = tuple(self.paths) or (PATHS[:1] if on_cpu else PATHS)
        self.dtype = self.dtype or ("float32" if on_cpu else "bfloat16")


@dataclass(kw_only=True)
class OpsSettings(Settings):
    """Settings for one attention layer."""

    lengths: Sequence[int] = setting((128, 512, 1024, 2048, 4096, 8192, 16384), "Sequence lengths.")
    features: Sequence[int] = setting((64,), "Numbers of features M, for mechanisms with that option.")
    directions: Sequence[bool] = setting((False, True), "bidirectional, causal or both.", choices=DIRECTIONS)
    passes: Sequence[bool] = setting(
        (False, True), "forward (without gradients), training (forward and backward) or both.", choices=PASSES
    )
    heads: int = setting(12, "Number of heads.", min=1)
    head_dim: int = setting(64, "Head size.", min=1)


@dataclass(kw_only=True)
class ModelSettings(Settings):
    """Settings for a whole model."""

    attention: Sequence[str] = setting(
        (), "Mechanisms, separated by commas. Default: those of a patched checkpoint, otherwise favor+."
    )
    model: str = setting("bert", "A folder, a name on the Hub, or bert or gpt2 (random weights).")
    base_model: str | None = setting(None, "Name of the model in results; for cards, its name on the Hub.")
    lengths: Sequence[int] = setting((128, 512, 1024, 2048), "Sequence lengths.")
    passes: Sequence[bool] = setting(
        (False, True), "forward (without gradients), training (with an AdamW step) or both.", choices=PASSES
    )
    repetitions: int = setting(6, REPETITIONS, min=1)
    max_seconds: float = setting(5.0, TIME_LIMIT, min=0)


@dataclass(kw_only=True)
class DecodeSettings(Settings):
    """Settings for generation."""

    model: str = setting("gpt2", "A folder, a name on the Hub, or gpt2 (random weights).")
    contexts: Sequence[int] = setting((1024, 4096, 16384), "Context lengths: numbers of tokens in the cache.")
    tokens: int = setting(4, "Number of tokens to generate per repetition.", min=1)
    max_seconds: float = setting(10.0, TIME_LIMIT, min=0)
