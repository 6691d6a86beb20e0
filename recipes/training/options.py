"""The fields of a run: on the command line, or in a YAML or JSON file, or both (the command line wins)."""

import dataclasses
import sys
from argparse import ArgumentDefaultsHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser

from hf_rfattn.mechanisms.config import did_you_mean, option_value

Options = TypeVar("Options", bound="RunOptions")


def described(help: str, default: Any = None) -> Any:
    """A field with the sentence that `--help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class RunOptions:
    """What every recipe knows. Recipes derive from it and add their own fields."""

    # the model
    model: str | None = described("A model's folder, or its name on the Hub.")
    model_name: str | None = described("What result files call the model; a folder is called by its own name.")
    model_license: str | None = described("Licence of the base model as the Hub spells it, for result files.")
    tokenizer: str | None = described("Folder or name of the tokenizer, if it is not the model's.")
    attention: str | None = described(
        "'softmax', or a mechanism to patch in: `hf-rfattn list` shows them. By default the model stays as it is."
    )
    attention_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of the mechanism, NAME=VALUE each: num_features=128 projection=hadamard."},
    )
    layers: str | None = described("Which layers get the mechanism, as in 0-5 or 0-2,7; the others stay softmax.")
    redraw_every: int | None = described("Give random features a new draw every so many steps.")
    init: str | None = described(
        "A converted checkpoint of --model to begin with, as recipes/convert.py writes it, with its attention."
    )
    transfer_steps: int = described(
        "Before training, teach the mechanisms to imitate softmax on the training inputs, for so many steps.", 0
    )
    transfer_learning_rate: float | None = described("Highest learning rate of that. Default: that of convert.")
    transfer_parts: float | None = described(
        "Weight of a second loss there, that far fields imitate softmax by themselves. Default: that of convert."
    )

    # the data
    data: str | None = described(
        "A data set's name on the Hub, a folder of parquet, json or csv files named by split, or 'sample'. Default: "
        "the task's own on the Hub."
    )
    data_name: str | None = described("What result files call the data; a folder is called by its own name.")
    eval_split: str | None = described("The split to evaluate on, if it is not the task's own.")
    max_train_samples: int | None = described("Train on so many examples, the same for every seed.")
    max_eval_samples: int | None = described("Evaluate on so many examples, the same for every seed.")
    max_length: int | None = described("Longest sequence in tokens; longer text is cut or windowed.")

    # training
    epochs: float = described("Passes over the training data.", 3.0)
    max_steps: int | None = described("Optimizer steps, instead of epochs.")
    batch_size: int = described("Examples an optimizer step sees, over all processes.", 32)
    accumulate: int = described("In how many passes a process works through its share of a batch.", 1)
    eval_batch_size: int = described("Examples a process evaluates at once.", 64)
    learning_rate: float = described("Highest learning rate of the model's own weights.", 5e-5)
    mechanism_learning_rate: float | None = described("The same for parameters of mechanisms. Default: the model's.")
    weight_decay: float = described("Of matrices; biases, norms and parameters of mechanisms have none.", 0.01)
    warmup: float = described("Steps of warm-up, or a share of all steps if below 1.", 0.06)
    scheduler: Literal["linear", "cosine", "constant"] = described("How the rate goes on after warm-up.", "linear")
    max_gradient_norm: float = described("Longer gradients are shortened to this; 0 leaves them alone.", 1.0)
    distill: str | None = described(
        "Also learn from the logits of a softmax model: its folder or name, or 'self', --model before training."
    )
    distill_weight: float = described("Share of that in the loss; the rest is the task's.", 0.5)
    distill_temperature: float = described("By which logits are divided before they are compared.", 2.0)
    distill_hidden: float = described("Weight of a further loss, the relative error of hidden states.", 0.0)
    lora_rank: int | None = described(
        "Train matrices of this rank beside those of the model (LoRA), and mechanisms and head as they are; the model "
        "that is saved is a plain one."
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = described("Default: what accelerate's config says.")
    gradient_checkpointing: bool = described("Compute activations twice to keep fewer of them.", False)
    group_by_length: bool = described("Put examples of like length into one batch: less padding.", False)
    seed: int = described("Of new weights, random features, data order and dropout.", 0)
    workers: int = described("Processes that load data beside each training process.", 0)

    # evaluation, saving, reporting
    evaluate_first: bool = described("Evaluate before training too: patched, and after --transfer-steps.", False)
    evaluate_every: int | None = described("Steps between evaluations. Default: once an epoch. The end always is one.")
    keep: Literal["best", "last"] = described("Which model is kept: the best of all evaluations, or the last.", "last")
    early_stop: int | None = described("Stop after so many evaluations without improvement; keeps the best.")
    save_every: int | None = described("Steps between states that --resume can go on from.")
    resume: bool = described(
        "Go on from the last state in the output folder, or from the start if there is none.", False
    )
    overwrite: bool = described("Delete what an earlier run has left in the output folder.", False)
    log_every: int = described("Steps between readings of the loss.", 10)
    report_to: Literal["tensorboard", "trackio", "wandb"] | None = described("Also send readings to this tracker.")
    push_to_hub: str | None = described("Publish the model with its card there when done, as in me/name.")
    output: str = described("Folder for model, states and result.json.", "out")

    def __post_init__(self) -> None:
        at_least = {"batch_size": 1, "accumulate": 1, "eval_batch_size": 1, "log_every": 1, "workers": 0, "seed": 0}
        at_least |= {"transfer_steps": 0, "lora_rank": 1}
        for name in ("max_train_samples", "max_eval_samples", "max_length", "max_steps", "redraw_every"):
            at_least[name] = 1
        for name in ("evaluate_every", "early_stop", "save_every"):
            at_least[name] = 1
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{flag(name)} must be at least {least}, not {value}.")
        rates = ("learning_rate", "mechanism_learning_rate", "transfer_learning_rate")
        for name in ("epochs", *rates, "distill_temperature"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{flag(name)} must be above 0, not {value}.")
        for name in ("weight_decay", "warmup", "max_gradient_norm", "transfer_parts", "distill_hidden"):
            if not 0 <= (getattr(self, name) or 0) < float("inf"):
                raise ValueError(f"{flag(name)} must not be negative, not {getattr(self, name)}.")
        if self.eval_split == "train":
            raise ValueError("--eval-split train: the model is trained on it.")
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on with what --overwrite would delete; give one of them.")
        if self.attention in (None, "softmax"):
            for name in ("attention_options", "layers", "redraw_every"):
                if getattr(self, name) and self.attention == "softmax":
                    raise ValueError(f"{flag(name)} belongs to a mechanism, but --attention is softmax.")
                if getattr(self, name) and name != "redraw_every":
                    raise ValueError(f"{flag(name)} needs --attention, the mechanism that it belongs to.")
            if self.attention == "softmax" and self.push_to_hub:
                raise ValueError("--push-to-hub publishes patched models, but --attention is softmax.")
        if self.init is not None and self.attention is not None:
            raise ValueError("--init brings its attention with it; leave --attention out.")
        if self.init is not None and self.model is None:
            raise ValueError("--init needs --model too, the model that was converted.")
        if self.transfer_steps and self.attention == "softmax":
            raise ValueError("--transfer-steps teaches a mechanism, but --attention is softmax.")
        if not 0 < self.distill_weight <= 1:
            raise ValueError(f"--distill-weight is a share, above 0 and at most 1, not {self.distill_weight}.")
        if self.distill_hidden and self.distill is None:
            raise ValueError("--distill-hidden needs --distill, the model to learn from.")
        if self.early_stop is not None:
            self.keep = "best"


def flag(name: str) -> str:
    """A field as the command line spells it."""
    return "--" + name.replace("_", "-")


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help explains every option)")


def parse_options(options: type[Options], arguments: Sequence[str] | None = None, description: str = "") -> Options:
    """Options from the command line; a first word that is no option is a YAML or JSON file of the same fields."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-"):
        words = [*file_as_arguments(options, Path(words[0])), *words[1:]]
    parser = _Parser(
        options,
        description=description,
        usage="%(prog)s [FILE.yaml] [--OPTION VALUE ...]",
        formatter_class=ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parsed, unknown = parser.parse_args_into_dataclasses(words, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        names = [f.name for f in dataclasses.fields(options)]
        raise ValueError(f"Unknown option {unknown[0]!r}{_nearest(unknown[0], names)}. --help explains every option.")
    return parsed


def file_as_arguments(options: type[RunOptions], path: Path) -> list[str]:
    """A file's fields as the command line would give them, so that both are checked alike."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON is YAML
    except FileNotFoundError:
        raise ValueError(f"There is no file {str(path)!r}; options begin with --, as in --model.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must hold fields, as in `task: sst2`, not {type(document).__name__}.")
    return fields_as_arguments(options, document, str(path))


def fields_as_arguments(options: type[RunOptions], fields: Mapping[str, Any], where: str) -> list[str]:
    """
    >>> fields_as_arguments(RunOptions, {"batch-size": 8, "attention_options": {"bandwidth": 4}}, "here")
    ['--batch_size=8', '--attention_options', 'bandwidth=4']
    """
    kinds = {f.name: f.type for f in dataclasses.fields(options)}
    words: list[str] = []
    for key, value in fields.items():
        name = str(key).replace("-", "_")
        if name not in kinds:
            raise ValueError(f"{where}: unknown field {key!r}{_nearest(name, list(kinds))}; known: {', '.join(kinds)}.")
        if value is None:
            continue
        if isinstance(value, dict):
            value = [f"{k}={option_value(v)}" for k, v in value.items()]
        if not isinstance(value, list):
            words.append(f"--{name}={value}")
        elif value:
            words += [f"--{name}", *map(str, value)]
    return words


def _nearest(word: str, names: list[str]) -> str:
    """A hint at the option that was meant: the one with these initials, or the most similar.

    >>> _nearest("--lr", ["layers", "learning_rate"]), _nearest("--batchsize=3", ["batch_size"])
    (" (did you mean '--learning-rate'?)", " (did you mean '--batch-size'?)")
    """
    given = word.lstrip("-").partition("=")[0]
    meant = [name for name in names if "".join(part[0] for part in name.split("_")) == given.lower()]
    return did_you_mean(flag(meant[0] if meant else given), [flag(name) for name in names])
