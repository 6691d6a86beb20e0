"""Options of the recipes, and parsing of command lines."""

import copy
import dataclasses
import difflib
import json
import sys
from argparse import Action, ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser

MAY_BE_0 = {
    "seed", "transfer_steps", "exact_heads", "weight_decay", "warmup", "max_gradient_norm", "distill_hidden", "stride",
    "max_tokens", "repetitions",
}  # fmt: skip
SEQUENCE_PARALLEL = "Number of processes that split each sequence (sequence parallelism). Needs a patched model."


def described(help: str, default: Any = None) -> Any:
    """Define an option with its help text."""
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class CommonOptions:
    """Options of all recipes."""

    model: str | None = described("Folder of the model, or its name on the Hub.")
    model_name: str | None = described("Name of the model in result files. Default: the folder name.")
    model_license: str | None = described("License of the base model for result files, such as apache-2.0.")
    tokenizer: str | None = described("Folder or name of the tokenizer. Default: --model.")
    attention: str | None = described(
        "softmax, or a mechanism to patch the model with; `hf-rfattn list` shows all. Default: do not patch."
    )
    attention_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of the mechanism, for example: num_features=128 projection=hadamard"},
    )
    layers: str | None = described("Layers to patch, such as 0-5 or 0-2,7; the others keep softmax. Default: all.")
    data: str | None = described(
        "Name of a dataset on the Hub, or a folder with one parquet, json or csv file per split."
    )
    data_name: str | None = described("Name of the dataset in result files. Default: the folder name.")
    max_length: int | None = described("Maximum sequence length in tokens; longer text is truncated.")
    extend_positions: Literal["tile", "interpolate"] | None = described(
        "Extend a learned position table to --max-length: tile repeats it, which does not change outputs for short "
        "inputs; interpolate stretches it."
    )
    batch_size: int = described("Batch size per optimizer step, over all processes.", 32)
    mixed_precision: Literal["no", "bf16", "fp16"] | None = described(
        "Precision of training, attention transfer and evaluation. Default: from the accelerate config."
    )
    seed: int = described("Random seed.", 0)
    save_every: int | None = described("Save a checkpoint for --resume every N steps.")
    resume: bool = described("Resume from the last checkpoint in the output folder, if there is one.", False)
    overwrite: bool = described("Delete the files of an earlier run in the output folder.", False)
    output: str = described("Output folder for the model, checkpoints and result.json.", "out")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and (value < 0 or (value == 0 and name not in MAY_BE_0)):
                least = "at least" if name in MAY_BE_0 else "above"
                raise ValueError(f"{flag(name)} must be {least} 0, not {value}.")
        if self.resume and self.overwrite:
            raise ValueError(
                "--resume and --overwrite cannot be combined: --overwrite deletes the checkpoint that --resume needs."
            )
        of_mechanisms = ["attention_options", "layers"] if self.attention in (None, "softmax") else []
        if self.attention == "softmax":  # without --attention, the model may be patched already
            of_mechanisms += ["redraw_every", "transfer_steps"]
        for name in of_mechanisms:
            if getattr(self, name, None):
                raise ValueError(f"{flag(name)} needs a mechanism; choose one with --attention, other than softmax.")


@dataclass(kw_only=True)
class TransferOptions(CommonOptions):
    """Options of recipes that can run attention transfer first."""

    transfer_steps: int = described(
        "Number of attention transfer steps on the texts, before training or evaluation; no labels are used.", 0
    )
    transfer_learning_rate: float | None = described("Peak learning rate of attention transfer.")
    exact_heads: float = described(
        "Fraction of all heads, those that matter most to the output, that keep exact softmax.", 0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exact_heads >= 1:
            raise ValueError(f"--exact-heads is a fraction of all heads and must be below 1, not {self.exact_heads}.")
        if self.exact_heads and not self.transfer_steps:
            raise ValueError("--exact-heads chooses heads during attention transfer; also give --transfer-steps.")


@dataclass(kw_only=True)
class RunOptions(TransferOptions):
    """Options of all training recipes, which add their own in derived classes."""

    # the model
    redraw_every: int | None = described("Redraw random features every N steps.")
    distill: str | None = described(
        "Distil from the logits of a softmax model: its folder or name, self for --model before training, or none. "
        "Default: self after --transfer-steps, with --distill-hidden 1, if --model was trained on this task."
    )
    distill_weight: float = described("Weight of the distillation loss, from 0 to 1; the task loss gets the rest.", 0.5)
    distill_temperature: float = described("Distillation temperature.", 2.0)
    distill_hidden: float = described("Weight of an additional loss on the hidden states of the teacher.", 0.0)
    lora_rank: int | None = described(
        "Train LoRA adapters of this rank, besides mechanisms and head; the saved model has them merged."
    )

    # the data
    eval_split: str | None = described("Split to evaluate on. Default: that of the task.")
    max_train_samples: int | None = described("Maximum number of training examples; the same ones for every seed.")
    max_eval_samples: int | None = described("Maximum number of evaluation examples; the same ones for every seed.")
    group_by_length: bool = described("Batch examples of similar length, to reduce padding.", False)

    # training
    epochs: float = described("Number of training epochs.", 3.0)
    max_steps: int | None = described("Number of optimizer steps; overrides --epochs.")
    accumulate: int = described("Gradient accumulation steps.", 1)
    learning_rate: float = described("Peak learning rate.", 5e-5)
    mechanism_learning_rate: float | None = described(
        "Peak learning rate of the parameters of mechanisms. Default: --learning-rate."
    )
    weight_decay: float = described("Weight decay of matrices; biases, norms and mechanisms have none.", 0.01)
    warmup: float = described("Warm-up steps, or a fraction of all steps if below 1.", 0.06)
    scheduler: Literal["linear", "cosine", "constant"] = described("Learning rate schedule after warm-up.", "linear")
    max_gradient_norm: float = described("Clip gradients to this norm; 0 disables clipping.", 1.0)
    no_dropout: bool = described("Train without dropout. Distillation never uses dropout.", False)
    gradient_checkpointing: bool = described("Recompute activations in the backward pass to save memory.", False)
    sequence_parallel: int = described(SEQUENCE_PARALLEL, 1)

    # evaluation, saving, reporting
    eval_batch_size: int = described("Batch size per process for evaluation.", 64)
    evaluate_first: bool = described(
        "Also evaluate before training: after patching, and after attention transfer.", False
    )
    evaluate_every: int | None = described("Evaluate every N steps. Default: once per epoch.")
    keep: Literal["best", "last"] = described("Save the best model of all evaluations, or the last one.", "last")
    early_stop: int | None = described("Stop after N evaluations without improvement, and keep the best model.")
    log_every: int = described("Log the loss every N steps.", 10)
    report_to: Literal["tensorboard", "trackio", "wandb"] | None = described("Also log to this tracker.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_split == "train":
            raise ValueError("--eval-split train: the model is trained on this split. Choose another one.")
        if self.sequence_parallel > 1 and (self.transfer_steps or self.distill not in (None, "none")):
            raise ValueError(
                "--transfer-steps and --distill do not work with --sequence-parallel. Use `hf-rfattn convert` first."
            )
        if self.early_stop is not None:
            self.keep = "best"


def flag(name: str) -> str:
    """Return the command-line option of a field: max_length → --max-length."""
    return "--" + name.replace("_", "-")


class _Help(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Help that keeps the line breaks of the description and omits alternative spellings of options (--max_length),
    optional values of flags, and defaults such as None.
    """

    def _get_help_string(self, action: Action) -> str | None:
        plain = action.default is None or action.default is False or action.default == []
        return action.help if plain else super()._get_help_string(action)

    def _format_action_invocation(self, action: Action) -> str:
        action = copy.copy(action)
        action.option_strings = [option for option in action.option_strings if "_" not in option]
        action.nargs = 0 if action.nargs == "?" else action.nargs
        return super()._format_action_invocation(action)


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help describes all options)")


def parse_options(options: type[Any], arguments: Sequence[str] | None = None, description: str = "") -> Any:
    """Parse options, by default from the command line. Raises ValueError for unknown or invalid options."""
    usage = "%(prog)s --model MODEL [options]"
    parser = _Parser(options, description=description, usage=usage, formatter_class=_Help, allow_abbrev=False)
    words = list(sys.argv[1:] if arguments is None else arguments)
    _, unknown = parser.parse_known_args(words)  # checked first, so that a misspelt option is reported as such
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0], [flag(f.name) for f in dataclasses.fields(options)])
        raise ValueError(f"Unknown option {unknown[0]!r}{hint}. --help describes all options.")
    (parsed,) = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    return parsed


def fields_as_arguments(fields: Mapping[str, Any]) -> list[str]:
    """Convert values of options to command-line arguments.

    >>> fields_as_arguments({"batch_size": 8, "attention_options": {"bandwidth": 4}, "layers": None})
    ['--batch-size=8', '--attention-options', 'bandwidth=4']
    """
    words: list[str] = []
    for name, value in fields.items():
        if isinstance(value, dict):
            value = assignments(value)
        if isinstance(value, list):
            words += [flag(name), *map(str, value)] if value else []
        elif value is not None:
            words.append(f"{flag(name)}={value}")
    return words


def assignments(options: Mapping[str, Any]) -> list[str]:
    """Convert options of a mechanism to command-line arguments.

    >>> assignments({"normalizer": "joint", "far": ["elu"]})
    ['normalizer=joint', 'far=["elu"]']
    """
    return [f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in options.items()]


def did_you_mean(word: str, names: Sequence[str]) -> str:
    """Return a hint with the most similar name, if there is one.

    >>> did_you_mean("--learning-rat", ["--layers", "--learning-rate"])
    " (did you mean '--learning-rate'?)"
    """
    close = difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
