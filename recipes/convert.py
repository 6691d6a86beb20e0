"""Teach linear attention to imitate the softmax of a pretrained model, on unlabelled text; then fine-tune from there.

accelerate launch recipes/convert.py --model google-bert/bert-base-uncased --attention fmm --output converted
accelerate launch recipes/finetune_snli.py --model google-bert/bert-base-uncased --init converted/model
"""

import training.interrupt  # noqa: F401  # isort: skip

import shutil
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset
from filelock import FileLock
from training.batches import TrainingOrder, check_share
from training.data import check_texts, find_source, fingerprint, load_split, take
from training.language import split_blocks, tokens_of
from training.models import attention_of, choose_length, collator, load_tokenizer
from training.options import described, flag, parse_options
from training.output import MODEL, RESULT, check_output, how_to_continue, open_output, output_lock
from training.progress import Progress
from training.results import PACKAGES, base_name, command
from training.run import check_hub, quiet, told_at_once, told_if_disk_is_full
from training.state import whole_folder
from training.transfer import TRANSFER, Inputs, transfer_document
from transformers import PreTrainedTokenizerBase

import hf_rfattn
from hf_rfattn.commands import load_config, model_class, parse_attention
from hf_rfattn.hub.cards import write_card
from hf_rfattn.results import RESULTS, checkpoint_fingerprint, new_result, parse_result, without_folders, write_result

USUAL_LENGTH = 512
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(kw_only=True)
class ConvertOptions:
    # the model
    model: str | None = described("A model's folder, or its name on the Hub.")
    model_name: str | None = described("What result files call the model; a folder is called by its own name.")
    model_license: str | None = described("Licence of the base model as the Hub spells it, for result files.")
    tokenizer: str | None = described("Folder or name of the tokenizer, if it is not the model's.")
    attention: str | None = described("A mechanism that learns: `hf-rfattn list` shows them.")
    attention_options: list[str] = field(
        default_factory=list,
        metadata={"help": "Options of the mechanism, NAME=VALUE each: bandwidth=64 normalizer=joint."},
    )
    layers: str | None = described("Which layers get the mechanism, as in 0-5 or 0-2,7; the others stay softmax.")

    # the text
    data: str | None = described(
        "A data set's name on the Hub, or a folder of parquet, json or csv files named by split. Default: WikiText-2."
    )
    data_name: str | None = described("What result files call the data; a folder is called by its own name.")
    data_config: str | None = described("Which of several sets of that name on the Hub.")
    split: str = described("Which split to learn from.", "train")
    columns: list[str] = field(
        default_factory=lambda: ["text"],
        metadata={"help": "The column that holds the text, or two whose texts are read as a pair."},
    )
    join: bool = described("Read all texts as one stream, in blocks of --max-length, as language models do.", False)
    max_samples: int | None = described("Learn from so many rows, the same for every seed.")
    max_length: int | None = described("Longest sequence in tokens; longer text is cut.")

    # learning
    steps: int = described("Steps of attention transfer.", 400)
    batch_size: int = described("Sequences a step sees, over all processes.", 16)
    learning_rate: float | None = described("The highest. Default: that of hf_rfattn.convert.")
    parts: float | None = described(
        "Weight of a second loss, that far fields imitate softmax by themselves. Default: that of hf_rfattn.convert."
    )
    divergence: float = described("Weight of the divergence of attention weights, on short inputs.", 0.0)
    patience: int | None = described("A layer that gains nothing within so many steps is left as it is.")
    seed: int = described("Of random features and the order of the data.", 0)

    # saving
    save_every: int = described("Steps between states that --resume can go on from.", 100)
    resume: bool = described("Go on from the last state in the output folder.", False)
    overwrite: bool = described("Delete what an earlier run has left in the output folder.", False)
    push_to_hub: str | None = described("Publish the model with its card there when done, as in me/name.")
    output: str = described("Folder for model, state and result.json.", "out")

    def __post_init__(self) -> None:
        if self.model is None or self.attention in (None, "softmax"):
            raise ValueError("Give --model, and --attention, the mechanism that is to learn.")
        for name in ("steps", "batch_size", "save_every", "max_samples", "max_length", "patience"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} must be at least 1, not {getattr(self, name)}.")
        if not 1 <= len(self.columns) <= 2 or (self.join and len(self.columns) > 1):
            raise ValueError("--columns names one column, or two for pairs; --join takes one.")
        if self.resume and self.overwrite:
            raise ValueError("--resume goes on with what --overwrite would delete; give one of them.")


def convert(options: ConvertOptions) -> Path:
    """From the options to the result file; returns its path."""
    lock = output_lock(options)
    try:
        with told_if_disk_is_full(Path(options.output)):
            return _convert(options, lock)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how_to_continue(Path(options.output))) from None
    finally:
        lock.release()


def _convert(options: ConvertOptions, lock: FileLock) -> Path:
    output = Path(options.output)
    with told_at_once():
        check_hub(options.push_to_hub)
        if check_output(options):
            return output / RESULT
        accelerator = Accelerator(cpu=not torch.accelerator.is_available())
        check_share(options.batch_size, accelerator.num_processes, 1)
    quiet(accelerator)
    tell = Progress(accelerator.is_main_process)
    result = new_result("transfer", seed=options.seed, device=accelerator.device.type, packages=PACKAGES)
    with told_at_once():
        config = load_config(options.model)
        tokenizer = load_tokenizer(options)
        model = model_class(config).from_pretrained(options.model, config=config).to(accelerator.device)
        source = find_source(
            options.data,
            "Salesforce/wikitext",
            options.data_config or "wikitext-2-raw-v1",
            "wikitext",
            options.data_name,
        )
        length = choose_length(model, options.max_length, USUAL_LENGTH)
        with accelerator.main_process_first():
            texts = load_texts(source, options)
            rows = encode(texts, tokenizer, length, options)
        if len(rows) <= options.batch_size:
            raise ValueError(
                f"{source.name} has {len(rows)} text(s); more than --batch-size {options.batch_size} are needed, since "
                "errors are measured on a batch that is not trained on. Give more texts, or a smaller --batch-size."
            )
        hf_rfattn.patch_model(
            model,
            parse_attention(options.attention, options.attention_options),
            layers=options.layers,
            seed=options.seed,
        )
        share, measure = shares(rows, tokenizer, accelerator, options)
        if accelerator.is_main_process:
            open_output(options, lock)
        accelerator.wait_for_everyone()
        given = {"learning_rate": options.learning_rate, "parts": options.parts}
        done = hf_rfattn.convert(
            model,
            None,
            share,
            steps=options.steps,
            divergence=options.divergence,
            patience=options.patience,
            measure=measure,
            checkpoint=output / TRANSFER,
            save_every=options.save_every,
            **{name: value for name, value in given.items() if value is not None},
        )
    tell.say(str(done))
    if accelerator.is_main_process:
        with whole_folder(output / MODEL) as partial_folder:
            model.save_pretrained(partial_folder)
            tokenizer.save_pretrained(partial_folder)
        result |= {
            "model": base_name(options),
            "base_license": options.model_license,
            "attention": attention_of(model),
            "dataset": {
                "name": source.name,
                "config": source.config,
                "split": options.split,
                "fingerprint": fingerprint({options.split: texts}),
            },
            "transfer": {**transfer_document(done, options.batch_size), "max_length": length},
            "errors": done.to_dict(),
            "checkpoint": checkpoint_fingerprint(output / MODEL),
            "processes": accelerator.num_processes,
            "command": command(accelerator),
        }
        parse_result(result)
        write_result(without_folders(result), output / MODEL / RESULTS / f"{TRANSFER}.json")
        write_card(output / MODEL, repo_id=options.push_to_hub)
        write_result(result, output / RESULT)
        shutil.rmtree(output / TRANSFER, ignore_errors=True)
        tell.say(f"Written: {output / MODEL} and {output / RESULT}")
        if options.push_to_hub:
            with told_at_once():
                tell.say(f"Published: {hf_rfattn.publish(output / MODEL, options.push_to_hub, tell=tell.say)}")
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return output / RESULT


def load_texts(source: Any, options: ConvertOptions) -> Dataset:
    """Rows with something in them: the first ones of a stream, any of separate texts."""
    texts = load_split(source, options.split, options.columns)
    if options.join:
        check_texts(texts, options.columns, f"{source.name}, split {options.split!r}")
        return texts if options.max_samples is None else texts.select(range(min(options.max_samples, len(texts))))
    first = options.columns[0]
    texts = texts.filter(lambda rows: [bool(str(row or "").strip()) for row in rows], input_columns=first, batched=True)
    check_texts(texts, options.columns, f"{source.name}, split {options.split!r}")
    return take(texts, options.max_samples)


def encode(texts: Dataset, tokenizer: PreTrainedTokenizerBase, length: int, options: ConvertOptions) -> Dataset:
    """Token lists, nothing else."""
    if options.join:
        (column,) = options.columns
        stream = texts if column == "text" else texts.rename_column(column, "text")
        return split_blocks(tokens_of(stream, tokenizer), length).select_columns(["input_ids"])
    cut = partial(_cut, tokenizer=tokenizer, columns=options.columns, length=length)
    return texts.map(cut, batched=True, remove_columns=texts.column_names, desc="tokens")


def _cut(rows: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase, columns: list[str], length: int) -> Any:
    encoded = tokenizer(*(rows[column] for column in columns), truncation=True, max_length=length)
    return {name: encoded[name] for name in INPUTS if name in encoded}


def shares(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    options: ConvertOptions,
) -> tuple[Inputs, dict[str, Any]]:
    """What this process learns from, and the first batch, kept apart to measure errors on."""
    collate = collator(tokenizer)
    kept = rows.shuffle(seed=0)
    measure = collate([kept[i] for i in range(options.batch_size)])
    rest = kept.select(range(options.batch_size, len(kept)))
    return Inputs(rest, collate, TrainingOrder(len(rest), options.batch_size, options.seed), accelerator), measure


if __name__ == "__main__":
    with told_at_once():
        parsed = parse_options(ConvertOptions, description=__doc__)
    convert(parsed)
