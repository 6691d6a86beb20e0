"""Steps of `hf-rfattn convert`: read texts, make batches, keep a checkpoint for interruptions, and save the model.

Texts come from files, folders or the Hub. Only parquet files and the Hub need the package datasets.
"""

import copy
import csv
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import extend_positions, longest_input, write_card
from ..bench.measuring import check_device
from ..conversion import Conversion
from ..conversion.processes import check_alike, process_count, process_rank
from ..hub.cards import CheckpointFolder
from ..mechanisms import MechanismConfig, resolve_config
from ..results.documents import RESULTS, check_writable, read_result, without_folders, write_result
from ..results.schema import parse_result

STATE = "unfinished"  # subfolder of the output with the checkpoint, deleted at the end
SETTINGS = "settings.json"  # in that subfolder
SAVE_EVERY = 20  # steps
USUAL_LENGTH = 512
Row = dict[str, Any]
Texts = list[tuple[str, ...]]
KINDS = (".txt", ".csv", ".jsonl", ".json", ".parquet")


def read_texts(
    data: str, columns: Sequence[str], split: str, config: str | None, most: int
) -> tuple[Texts, dict[str, Any]]:
    """Read the first `most` texts, or pairs of texts, of a file, a folder or a dataset on the Hub, without empty ones.
    Also returns a description of the dataset for result files.
    """
    path = Path(data).expanduser()
    if path.exists():
        config = None
        name = path.stem if path.is_file() else path.resolve().name
        found: Iterable[Row] = itertools.chain.from_iterable(map(_read, _files(path, split)))
    elif path.suffix in KINDS or data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise ValueError(f"--data: there is no file or folder {data!r}.")
    else:
        name = data
        found = _load(
            f"{data!r}, which is not a local file or folder, as a dataset on the Hub,", data, config, split=split
        )
    rows = [row for row in itertools.islice(_cells(found, columns, data), most) if all(cell.strip() for cell in row)]
    if not rows:
        raise ValueError(f"--data {data} contains no text.")
    fingerprint = hashlib.sha256("".join(map(json.dumps, rows)).encode()).hexdigest()
    return rows, {"name": name, "config": config, "split": split, "fingerprint": fingerprint}


def _files(path: Path, split: str) -> list[Path]:
    """Return the file, or the files of a folder in known formats; if some start with the split, only these."""
    kinds = ", ".join(KINDS)
    if path.is_file():
        if path.suffix not in KINDS:
            raise ValueError(f"--data {path}: unknown format {path.suffix!r}; supported: {kinds}.")
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in KINDS)
    if not files:
        raise ValueError(f"--data: the folder {path} has no file in a supported format ({kinds}).")
    return [file for file in files if file.name.startswith((f"{split}.", f"{split}-"))] or files


def _read(path: Path) -> Iterator[Row]:
    """Iterate over the rows of a file. JSON files have one object per line, or one list of objects."""
    if path.suffix == ".parquet":
        yield from _load(str(path), "parquet", data_files=str(path), split="train")
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".txt":
                yield from ({"text": line.rstrip("\r\n")} for line in file)
            elif path.suffix == ".csv":
                csv.field_size_limit(2**31 - 1)  # the default refuses long texts
                yield from csv.DictReader(file)
            elif file.read(1) == "[":
                yield from json.loads("[" + file.read())
            else:
                file.seek(0)
                yield from (json.loads(line) for line in file if line.strip())
    except (UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise ValueError(f"--data: {path} cannot be read: {error}.") from error


def _load(shown: str, *names: str | None, **options: Any) -> Iterable[Row]:
    import datasets

    try:
        return datasets.load_dataset(*names, **options)
    except Exception as error:  # the readers of datasets raise errors of many types
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise ValueError(f"--data: {shown} cannot be read: {reason}") from error


def _cells(rows: Iterable[Row], columns: Sequence[str], data: str) -> Iterator[tuple[str, ...]]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"--data {data}: row {number} must be an object with named columns, not {row!r:.80}.")
        for column in columns:
            if column not in row:
                raise ValueError(
                    f"--data {data}: row {number} has no column {column!r}; it has {', '.join(map(str, row))}. "
                    "Choose one with --column."
                )
        cells = tuple("" if row[column] is None else row[column] for column in columns)
        for column, cell in zip(columns, cells, strict=True):
            if not isinstance(cell, str):
                raise ValueError(f"--data {data}: row {number} has {cell!r:.80} in the column {column!r}, not a text.")
        yield cells


def make_trainable(config: MechanismConfig, given: list[str]) -> MechanismConfig:
    """Make random projections trainable, also those of far fields, unless `given`, the options, set `trainable`."""
    if hasattr(config, "trainable") and not any(option.startswith("trainable=") for option in given):
        return config.replace(trainable=True)
    if isinstance(far := getattr(config, "far", None), tuple):
        named = (make_trainable(resolve_config(each), []) if isinstance(each, str) else each for each in far)
        return config.replace(far=tuple(named))
    return config


@contextmanager
def join_processes(device: str | None) -> Iterator[torch.device]:
    """Initialize torch.distributed under torchrun. Yields the device of this process."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    if alone and device is not None:
        check_device(device)
    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chosen = torch.device(device or gpu or "cpu")
    if alone:
        yield chosen
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    torch.distributed.init_process_group()
    try:
        yield chosen
    finally:
        torch.distributed.destroy_process_group()


def choose_length(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, wanted: int | None, extend: str | None
) -> int:
    limit = longest_input(model)
    if wanted is None:
        if extend is not None:
            raise ValueError("--extend-positions needs --max-length, the length to extend the positions to.")
        return min(USUAL_LENGTH, limit or USUAL_LENGTH, tokenizer.model_max_length)
    if limit is not None and wanted > limit:
        if extend is None:
            raise ValueError(
                f"--max-length {wanted} exceeds the {limit} positions of this model. Choose at most {limit}, or extend "
                "the position table with --extend-positions tile."
            )
        extend_positions(model, wanted, extend, tokenizer=tokenizer)  # type: ignore[arg-type]
    return wanted


def make_batches(texts: Texts, tokenizer: Any, length: int, blocks: int | None, batch_size: int, seed: int) -> Any:
    """Create the DataLoader of this process. `blocks`: join the texts and split them into at most this many blocks."""
    rows: Any = texts if blocks is None else _blocks(texts, tokenizer, length, blocks)
    if len(rows) <= batch_size:
        what, smaller = "text" if len(rows) == 1 else "texts", "--batch-size"
        if blocks is not None:
            what, smaller = f"blocks of {length} tokens", "--batch-size or --max-length"
        raise ValueError(
            f"--data has {len(rows)} {what}; more than --batch-size {batch_size} are needed, since one batch "
            f"is held out to measure errors. Give more text, or a smaller {smaller}."
        )
    if tokenizer.pad_token is None:  # any token will do, since padding is masked
        tokenizer = copy.deepcopy(tokenizer)  # saved without this change
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token

    def collate(given: list[Any]) -> Any:
        if blocks is not None:
            return {"input_ids": torch.stack(given)}
        how = {"padding": True, "padding_side": "right", "truncation": True, "max_length": length}
        return tokenizer(*map(list, zip(*given, strict=True)), **how, return_tensors="pt")

    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    share: Any = [rows[i] for i in order[process_rank() :: process_count()]]
    size = batch_size // process_count()
    return DataLoader(share, size, drop_last=len(share) >= 2 * size, collate_fn=collate)


def _blocks(texts: Texts, tokenizer: Any, length: int, most: int) -> tuple[torch.Tensor, ...]:
    """Split the joined texts into at most `most` blocks of tokens. An incomplete block at the end is dropped."""
    lines = [text.rstrip("\n") + "\n" for (text,) in texts]
    tokens: list[int] = []
    for start in range(0, len(lines), 1000):
        for encoded in tokenizer(lines[start : start + 1000], add_special_tokens=False, verbose=False)["input_ids"]:
            tokens += encoded
        if len(tokens) >= most * length:
            break
    count = min(len(tokens) // length, most)
    return torch.tensor(tokens[: count * length], dtype=torch.long).view(count, length).unbind()


def unfinished_settings(output: Path) -> dict[str, Any] | None:
    """Return the settings of the unfinished conversion in a folder; None if it is empty or does not exist."""
    if (output / STATE / SETTINGS).exists():
        return read_result(output / STATE / SETTINGS)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already and is not an empty folder; choose another --output.")
    check_writable(output)
    return None


@contextmanager
def state_folder(output: Path, before: dict[str, Any] | None, settings: dict[str, Any]) -> Iterator[Path]:
    """Yield the folder for the checkpoint, which may contain that of an interrupted run with the same settings.

    The folder is deleted at the end, and after an interruption if it contains no checkpoint.
    """
    state = output / STATE
    record = state / SETTINGS
    settings = json.loads(json.dumps(settings))
    for name, value in settings.items():
        if before is not None and before.get(name) != value:
            raise ValueError(
                f"{output} holds an unfinished conversion with {name} {before.get(name)!r}, not {value!r}. Run the "
                "same command to resume it, or choose another --output."
            )
    check_alike(settings=settings)  # also waits until all processes have checked the folder
    if process_rank() == 0:
        write_result(settings, record)
    finished = False
    try:
        yield state
        finished = True
    except KeyboardInterrupt:
        resumable = any(path != record for path in state.glob("*"))
        raise KeyboardInterrupt("Run the same command again to resume." if resumable else "") from None
    finally:
        if process_rank() == 0 and (finished or [path.name for path in state.iterdir()] == [record.name]):
            shutil.rmtree(state)
            if not any(output.iterdir()):
                output.rmdir()


def save(model: Any, tokenizer: Any, document: dict[str, Any], output: Path) -> dict[str, Any]:
    """Save model, tokenizer, result file and model card. Returns the result document."""
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    folder = CheckpointFolder(output)
    document = without_folders({**document, "attention": folder.attention, "checkpoint": folder.fingerprint})
    parse_result(document)
    write_result(document, output / RESULTS / "transfer.json")
    write_card(output)
    return document


def summary(done: Conversion, output: Path, decoder: bool) -> str:
    """Text with the errors by layer, what to expect, and what to do next."""
    before, after, average = (
        sum(errors) / len(errors) for errors in (done.before.overall, done.after.overall, done.after.average)
    )
    if after < 0.9 * average:
        expect = "Expect scores below those of softmax until you fine-tune: the smaller the error, the smaller the gap."
        if done.exact_heads:
            count, total = (sum(map(len, heads)) for heads in (done.exact_heads.values(), done.after.heads))
            expect += f" {count} of {total} heads keep softmax (--exact-heads 0: none)."
    else:
        expect = (
            "This is hardly better than averaging all tokens: give more --steps or text, more features (num_features), "
            "or choose another attention, such as hedgehog or fmm."
        )
    recipe = "finetune_lm.py --distill MODEL" if decoder else "finetune_text.py"
    return (
        f"{done}\n\nMean error: {before:.3f} before, {after:.3f} after. {expect}\n"
        f"Next: evaluate the model on your task, or fine-tune it, for example with recipes/{recipe} --model {output}\n"
        f"Written: {output}. Load it with from_pretrained({str(output)!r}) after `import hf_rfattn`."
    )
