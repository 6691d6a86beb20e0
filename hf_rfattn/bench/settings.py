"""What each benchmark can be asked. The fields are the options of its command, described here and nowhere else."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

DIRECTIONS = {"bidirectional": False, "causal": True}
PASSES = {"forward": False, "training": True}


def setting(default: Any, help: str, **rules: Any) -> Any:
    """A field with what its option needs: `min`, the least value, or `choices`, names and what they stand for."""
    return field(default=default, metadata={"help": help, **rules})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all benchmarks share."""

    attention: Sequence[str] = setting(
        (), "A mechanism of `hf-rfattn list`, or several between commas; favor+ by default. Softmax is always measured."
    )
    threads: int | None = setting(None, "Number of torch threads; torch's default if not given.", min=1)
    seed: int = setting(0, "Random seed of weights, inputs and random features.")

    def each(self) -> list["Settings"]:
        """One for each result document."""
        return [self]


@dataclass(frozen=True, kw_only=True)
class TimingSettings(Settings):
    """What all benchmarks share that time the same thing several times."""

    device: str = setting("cpu", "As torch names it: cpu, cuda, cuda:1.")
    repetitions: int = setting(7, "Of each measurement; the median counts.", min=1)
    max_seconds: float = setting(10.0, "For all repetitions of one measurement; slower ones get fewer.", min=0)


@dataclass(frozen=True, kw_only=True)
class OpsSettings(TimingSettings):
    """Of one attention layer."""

    lengths: Sequence[int] = setting((128, 256, 384, 512, 768, 1024, 2048, 4096, 8192, 16384), "Tokens.")
    features: Sequence[int] = setting((64, 128, 256), "Random features M, for mechanisms that let one choose.")
    dtypes: Sequence[str] = setting(("float32", "bfloat16"), "Of float32, bfloat16 and float16.")
    directions: Sequence[bool] = setting((False, True), "Of bidirectional and causal.", choices=DIRECTIONS)
    passes: Sequence[bool] = setting(
        (False, True), "Of forward (no gradients) and training (forward and backward).", choices=PASSES
    )
    batch: int = setting(1, "Sequences at once.", min=1)
    heads: int = setting(12, "Heads of the layer.", min=1)
    head_dim: int = setting(64, "Size of a head.", min=1)
    repetitions: int = setting(24, "Of each measurement; the median counts.", min=1)
    max_seconds: float = setting(1.5, "For all repetitions of one measurement; slower ones get fewer.", min=0)


@dataclass(frozen=True, kw_only=True)
class ModelSettings(TimingSettings):
    """Of a whole model. Without `attention`, a patched checkpoint is measured as it was saved."""

    lengths: Sequence[int] = setting((128, 512, 1024, 2048, 4096), "Tokens of each input.")
    model: Sequence[str] = setting(
        ("bert", "gpt2"), "A folder, a model on the Hub, or bert or gpt2 for random weights in that shape."
    )
    base_model: str | None = setting(None, "What to call the model in results; cards want its name on the Hub.")
    passes: Sequence[bool] = setting(
        (False, True), "Of forward (no gradients) and training (a step of AdamW).", choices=PASSES
    )
    batch: int = setting(1, "Inputs at once; 0 for as many as --tokens allow.", min=0)
    tokens: int = setting(4096, "Of all inputs of a step, with --batch 0.", min=1)
    dtype: str = setting("float32", "float32, bfloat16 or float16.")
    repetitions: int = setting(6, "Of each measurement; the median counts.", min=1)

    def each(self) -> list[Settings]:
        return [replace(self, model=(name,)) for name in self.model]

    def batch_at(self, length: int) -> int:
        return self.batch or max(1, self.tokens // length)


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(TimingSettings):
    """Of generation. Without `attention`, all mechanisms."""

    contexts: Sequence[int] = setting((1024, 4096, 16384, 32768), "Tokens in the cache before those that are timed.")
    batches: Sequence[int] = setting((1, 4), "Sequences generated at once.")
    model: str = setting("gpt2", "A folder, a model on the Hub, or gpt2 for random weights in that shape.")
    dtype: str = setting("float32", "float32, bfloat16 or float16.")
    tokens: int = setting(8, "Timed in each repetition.", min=1)


@dataclass(frozen=True, kw_only=True)
class CompileSettings(Settings):
    """Of torch.compile."""

    lengths: Sequence[int] = setting((128, 256, 384, 512), "Input lengths, from the shortest on.")
    backend: str = setting("inductor", "Of torch.compile: inductor, aot_eager, eager.")
