"""The options of the recipes, and how they are read from the command line."""

import dataclasses
import difflib
import json
import sys
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from transformers import HfArgumentParser

MAY_BE_0 = {
    "seed", "transfer_steps", "weight_decay", "warmup", "max_gradient_norm", "distill_hidden", "parts",
    "stride", "max_tokens", "repetitions",
}  # fmt: skip
SEQUENCE_PARALLEL = "Number of processes that share each sequence: each holds a part of it. The model must be patched."


def described(help: str, default: Any = None) -> Any:
    """A field with the sentence that `--help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class CommonOptions:
    """What every recipe knows, whether it trains or not."""

    model: str | None = described("Folder of the model, or its name on the Hub.")
    model_name: str | None = described("Name of the model in result files; by default that of the folder.")
    model_license: str | None = described("Licence of the base model as the Hub spells it, for result files.")
    tokenizer: str | None = described("Folder or name of the tokenizer, if it is not the model's.")
    attention: str | None = described(
        "'softmax', or a mechanism to patch in: `hf-rfattn list` shows them. By default the model stays as it is."
    )
    attention_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of the mechanism, NAME=VALUE each: num_features=128 projection=hadamard."},
    )
    layers: str | None = described("Layers that get the mechanism, as in 0-5 or 0-2,7; the others stay softmax.")
    data: str | None = described(
        "A data set's name on the Hub, or a folder of parquet, json or csv files named by split."
    )
    data_name: str | None = described("Name of the data in result files; by default that of the folder.")
    max_length: int | None = described("Longest sequence in tokens; longer text is truncated.")
    extend_positions: Literal["tile", "interpolate"] | None = described(
        "Lengthen a learned position table to --max-length: 'tile' repeats it, so that short inputs give what they "
        "gave; 'interpolate' stretches it."
    )
    batch_size: int = described("Examples per step, over all processes.", 32)
    mixed_precision: Literal["no", "bf16", "fp16"] | None = described(
        "Precision of training, attention transfer and evaluation. Default: what accelerate's config says."
    )
    seed: int = described("Random seed.", 0)
    save_every: int | None = described("Steps between states that --resume can continue from.")
    resume: bool = described("Continue from the last state in the output folder, if there is one.", False)
    overwrite: bool = described("Delete what an earlier run has left in the output folder.", False)
    output: str = described("Folder for model, states and result.json.", "out")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and (value < 0 or (value == 0 and name not in MAY_BE_0)):
                least = "at least" if name in MAY_BE_0 else "above"
                raise ValueError(f"{flag(name)} must be {least} 0, not {value}.")
        if self.resume and self.overwrite:
            raise ValueError("--resume continues what --overwrite would delete; give one of them.")
        of_mechanisms = ["attention_options", "layers"] if self.attention in (None, "softmax") else []
        if self.attention == "softmax":  # without --attention, the model may be patched already
            of_mechanisms += ["redraw_every", "transfer_steps"]
        for name in of_mechanisms:
            if getattr(self, name, None):
                raise ValueError(f"{flag(name)} belongs to a mechanism; name it with --attention (not softmax).")


@dataclass(kw_only=True)
class RunOptions(CommonOptions):
    """What every training recipe knows. Recipes derive from it and add their own fields."""

    # the model
    redraw_every: int | None = described("Draw new random features every so many steps.")
    transfer_steps: int = described("Steps of attention transfer on the training inputs before training.", 0)
    transfer_learning_rate: float | None = described("Peak learning rate of attention transfer.")
    distill: str | None = described(
        "Also learn from the logits of a softmax model: its folder or name, or 'self', --model before training."
    )
    distill_weight: float = described("Share of distillation in the loss; the rest is the task's.", 0.5)
    distill_temperature: float = described("Temperature of the logits that are compared.", 2.0)
    distill_hidden: float = described("Weight of a further loss, the relative error of hidden states.", 0.0)
    lora_rank: int | None = described(
        "Train LoRA adapters of this rank, mechanisms and head; adapters are merged into the saved model."
    )

    # the data
    eval_split: str | None = described("The split to evaluate on, if it is not the task's own.")
    max_train_samples: int | None = described("Number of training examples, the same for every seed.")
    max_eval_samples: int | None = described("Number of evaluation examples, the same for every seed.")
    group_by_length: bool = described("Batch examples of similar length: less padding.", False)

    # training
    epochs: float = described("Passes over the training data.", 3.0)
    max_steps: int | None = described("Optimizer steps, instead of epochs.")
    accumulate: int = described("Gradient accumulation steps.", 1)
    learning_rate: float = described("Peak learning rate of the model's own weights.", 5e-5)
    mechanism_learning_rate: float | None = described("The same for parameters of mechanisms.")
    weight_decay: float = described("Of matrices; biases, norms and mechanisms have none.", 0.01)
    warmup: float = described("Steps of warm-up, or a share of all steps if below 1.", 0.06)
    scheduler: Literal["linear", "cosine", "constant"] = described("Learning rate schedule after warm-up.", "linear")
    max_gradient_norm: float = described("Clip gradients to this norm; 0 does not clip.", 1.0)
    gradient_checkpointing: bool = described("Recompute activations in the backward pass to save memory.", False)
    sequence_parallel: int = described(SEQUENCE_PARALLEL, 1)

    # evaluation, saving, reporting
    eval_batch_size: int = described("Examples a process evaluates at once.", 64)
    evaluate_first: bool = described("Also evaluate before training: patched, and after --transfer-steps.", False)
    evaluate_every: int | None = described("Steps between evaluations. Default: once an epoch.")
    keep: Literal["best", "last"] = described("Which model is kept: the best of all evaluations, or the last.", "last")
    early_stop: int | None = described("Stop after so many evaluations without improvement; keep the best.")
    log_every: int = described("Steps between readings of the loss.", 10)
    report_to: Literal["tensorboard", "trackio", "wandb"] | None = described("Also send readings to this tracker.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_split == "train":
            raise ValueError("--eval-split train: the model is trained on it.")
        if self.sequence_parallel > 1 and (self.transfer_steps or self.distill):
            raise ValueError("--transfer-steps and --distill do not work with --sequence-parallel; use another run.")
        if self.early_stop is not None:
            self.keep = "best"


def flag(name: str) -> str:
    """A field as the command line spells it."""
    return "--" + name.replace("_", "-")


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help explains every option)")


def parse_options(options: type[Any], arguments: Sequence[str] | None = None, description: str = "") -> Any:
    """Options from the command line."""
    parser = _Parser(
        options, description=description, formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    parsed, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        hint = did_you_mean(unknown[0].partition("=")[0], [flag(f.name) for f in dataclasses.fields(options)])
        raise ValueError(f"Unknown option {unknown[0]!r}{hint}. --help explains every option.")
    return parsed


def fields_as_arguments(fields: Mapping[str, Any]) -> list[str]:
    """
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
    """Options of a mechanism as the command line takes them.

    >>> assignments({"normalizer": "joint", "far": ["elu"]})
    ['normalizer=joint', 'far=["elu"]']
    """
    return [f"{k}={v if isinstance(v, str) else json.dumps(v, default=str)}" for k, v in options.items()]


def did_you_mean(word: str, names: Sequence[str]) -> str:
    """A hint at the most similar name, if one is near.

    >>> did_you_mean("--learning-rat", ["--layers", "--learning-rate"])
    " (did you mean '--learning-rate'?)"
    """
    close = difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
