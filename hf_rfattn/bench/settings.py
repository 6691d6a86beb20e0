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
        ATTENTION, "A mechanism of `hf-rfattn list`, or several between commas. Softmax is always measured."
    )
    paths: Sequence[str] = setting(
        (),
        "Of torch, compiled (by torch.compile) and fused (GPU kernels). Default: torch on a CPU, all on a GPU.",
        choices={name: name for name in PATHS},
    )
    device: str = setting("cpu", "As torch names it: cpu, cuda, cuda:1.")
    dtype: str = setting("", "float32, bfloat16 or float16. Default: float32 on a CPU, bfloat16 on a GPU.")
    batch: int = setting(1, "Sequences at once.", min=1)
    repetitions: int = setting(8, "Of each measurement; the median counts.", min=1)
    max_seconds: float = setting(1.0, "For all repetitions of one measurement; slower ones get fewer.", min=0)
    threads: int | None = setting(None, "Number of torch threads; torch's default if not given.", min=1)
    seed: int = setting(0, "Random seed of weights, inputs and random features.")

    def __post_init__(self) -> None:
        on_cpu = self.device.startswith("cpu")
        self.paths = tuple(self.paths) or (PATHS[:1] if on_cpu else PATHS)
        self.dtype = self.dtype or ("float32" if on_cpu else "bfloat16")


@dataclass(kw_only=True)
class OpsSettings(Settings):
    """Of one attention layer."""

    lengths: Sequence[int] = setting((128, 512, 1024, 2048, 4096, 8192, 16384), "Tokens.")
    features: Sequence[int] = setting((64,), "Random features M, for mechanisms that let one choose.")
    directions: Sequence[bool] = setting((False, True), "Of bidirectional and causal.", choices=DIRECTIONS)
    passes: Sequence[bool] = setting(
        (False, True), "Of forward (no gradients) and training (forward and backward).", choices=PASSES
    )
    heads: int = setting(12, "Heads of the layer.", min=1)
    head_dim: int = setting(64, "Size of a head.", min=1)


@dataclass(kw_only=True)
class ModelSettings(Settings):
    """Of a whole model."""

    attention: Sequence[str] = setting(
        (), "Mechanisms, between commas. Default: a patched checkpoint as it was saved, otherwise favor+."
    )
    model: str = setting("bert", "A folder, a model on the Hub, or bert or gpt2 for random weights in that shape.")
    base_model: str | None = setting(None, "What to call the model in results; cards want its name on the Hub.")
    lengths: Sequence[int] = setting((128, 512, 1024, 2048), "Tokens of each input.")
    passes: Sequence[bool] = setting(
        (False, True), "Of forward (no gradients) and training (a step of AdamW).", choices=PASSES
    )
    repetitions: int = setting(6, "Of each measurement; the median counts.", min=1)
    max_seconds: float = setting(5.0, "For all repetitions of one measurement; slower ones get fewer.", min=0)


@dataclass(kw_only=True)
class DecodeSettings(Settings):
    """Of generation."""

    model: str = setting("gpt2", "A folder, a model on the Hub, or gpt2 for random weights in that shape.")
    contexts: Sequence[int] = setting((1024, 4096, 16384), "Tokens in the cache before those that are timed.")
    tokens: int = setting(4, "Timed in each repetition.", min=1)
    max_seconds: float = setting(10.0, "For all repetitions of one measurement; slower ones get fewer.", min=0)
