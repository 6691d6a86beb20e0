"""Where examples come from: the Hub, a local folder, or `sample`; and the checks that they are what a task needs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from . import sample

SAMPLE = "sample"
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
SUBSET_SEED = 0  # a subset is the same for every seed of a run: seeds differ in training, not in data


@dataclass(frozen=True)
class Source:
    """A data set: where it is, and what result files call it. `schema` is the name under which `sample` makes it.

    `folder` may be a single file, which is then the split "train".
    """

    name: str
    hub_name: str
    config: str | None
    schema: str
    folder: Path | None = None

    @property
    def is_sample(self) -> bool:
        return self.name == SAMPLE

    def document(self, split: str, fingerprint: str) -> dict[str, Any]:
        """For result files."""
        return {"name": self.name, "config": self.config, "split": split, "fingerprint": fingerprint}


def find_source(data: str | None, hub_name: str, config: str | None, schema: str, name: str | None) -> Source:
    """What `--data` means. A folder or file is one if it exists or looks like a path."""
    if data == SAMPLE:
        return Source(SAMPLE, hub_name, schema, schema)
    if data is None:
        return Source(name or hub_name, hub_name, config, schema)
    folder = Path(data).expanduser()
    if folder.is_dir():
        return Source(name or folder.resolve().name, hub_name, None, schema, folder)
    if folder.is_file() and folder.suffix in FORMATS:
        return Source(name or folder.stem, hub_name, None, schema, folder)
    if data.startswith((".", "/", "~")) or data.count("/") != 1:
        raise ValueError(
            f"--data {data!r} is neither a folder or file, nor a name on the Hub (as in {hub_name}), nor 'sample'."
        )
    return Source(name or data, data, config, schema)


def load_split(source: Source, split: str, columns: Sequence[str]) -> Dataset:
    """One split with (at least) the columns that a task reads."""
    if source.is_sample:
        found = Dataset.from_list(sample.make(source.schema, split))
    elif source.folder is not None:
        found = _load_files(source.folder, split)
    else:
        found = _load_from_hub(source, split)
    missing = [column for column in columns if column not in found.column_names]
    if missing:
        raise ValueError(
            f"{source.name}, split {split!r}, has no column {missing[0]!r}; it has {', '.join(found.column_names)}. "
            f"Needed: {', '.join(columns)}."
        )
    if len(found) == 0:
        raise ValueError(f"{source.name}, split {split!r}, is empty.")
    return found.select_columns(list(columns))


def _load_files(folder: Path, split: str) -> Dataset:
    """Files named by their split: train.parquet, or train-00000-of-00002.parquet and so on."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.iterdir() if p.suffix in FORMATS)
    if folder.is_file() and split != "train":
        raise ValueError(f"{folder} is one file, the split 'train'; put it into a folder beside a file for {split!r}.")
    named = (
        files
        if folder.is_file()
        else [p for p in files if p.stem == split or p.stem.startswith((f"{split}-", f"{split}."))]
    )
    if not named:
        there = ", ".join(p.name for p in files) or "no parquet, json or csv file"
        raise ValueError(f"{folder} has no file for the split {split!r} (such as {split}.parquet); it has {there}.")
    kinds = {FORMATS[p.suffix] for p in named}
    if len(kinds) > 1:
        raise ValueError(f"{folder} has the split {split!r} in several formats: {', '.join(p.name for p in named)}.")
    try:
        loaded = datasets.load_dataset(kinds.pop(), data_files={split: [str(p) for p in named]}, split=split)
    except Exception as error:  # readers raise errors of many kinds; all mean the same to the user
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300] or type(cause).__name__
        raise ValueError(f"{', '.join(map(str, named))} cannot be read: {reason}") from error
    return loaded


def _load_from_hub(source: Source, split: str) -> Dataset:
    try:
        return datasets.load_dataset(source.hub_name, source.config, split=split)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{source.hub_name} ({source.config or 'no config'}, split {split!r}) cannot be had from the Hub: {reason} "
            "A local folder or `--data sample` needs no Hub."
        ) from error


def take(examples: Dataset, most: int | None) -> Dataset:
    """At most so many examples, drawn once and for all."""
    if most is None or most >= len(examples):
        return examples
    return examples.shuffle(seed=SUBSET_SEED).select(range(most)).flatten_indices()


def check_texts(examples: Dataset, columns: Sequence[str], where: str, blank: bool = True) -> None:
    """Every cell of these columns must hold a text; an empty cell of a CSV file holds none. `blank`: may be spaces."""
    for column in columns:
        cells = examples.with_format("arrow")[column]
        kind = examples.features[column]
        if getattr(kind, "dtype", None) not in ("string", "large_string") and cells.null_count < len(cells):
            raise ValueError(f"{where}: the column {column!r} holds {getattr(kind, 'dtype', kind)}, not text.")
        if cells.null_count or not blank:
            texts = cells.to_pylist()
            empty = [i for i, text in enumerate(texts) if text is None or not (blank or text.strip())]
            if not empty:
                continue
            raise ValueError(
                f"{where}: example {empty[0]} has an empty cell in the column {column!r} ({len(empty)} in all). "
                "Fill in the text, or remove these rows."
            )


def check_labels(examples: Dataset, num_labels: int, where: str) -> None:
    """Classes must be whole numbers below `num_labels`."""
    for i, label in enumerate(examples["label"][:]):
        if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < num_labels:
            raise ValueError(
                f"{where}: example {i} has the label {label!r}; this task has the labels 0 to {num_labels - 1}. "
                "(-1 marks a hidden or missing label: such a split cannot be trained on.)"
            )


def check_scores(examples: Dataset, least: float, most: float, where: str) -> None:
    """Scores must be numbers within the range of the task."""
    for i, score in enumerate(examples["label"][:]):
        if not isinstance(score, (int, float)) or not least <= score <= most:
            raise ValueError(f"{where}: example {i} has the score {score!r}; scores go from {least:g} to {most:g}.")


def fingerprint(splits: Mapping[str, Dataset]) -> str:
    """SHA-256 of the examples themselves, so that equal data has equal fingerprints wherever it lies.

    >>> first = fingerprint({"train": Dataset.from_dict({"a": [1, 2]})})
    >>> first == fingerprint({"train": Dataset.from_dict({"a": [1, 2]})})
    True
    >>> first == fingerprint({"train": Dataset.from_dict({"a": [2, 1]})})
    False
    """
    digest = hashlib.sha256()
    for name, examples in sorted(splits.items()):
        digest.update(f"{name}\0{sorted(examples.column_names)}\0{len(examples)}\n".encode())
        for batch in examples.iter(batch_size=1000):
            digest.update(json.dumps(batch, sort_keys=True, default=_plain).encode())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
