"""Where examples come from: the Hub, a local folder or file, or `sample`; and checks that they fit the task."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

from . import sample

SAMPLE = "sample"
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
SUBSET_SEED = 0  # a subset is the same for every seed of a run: seeds differ in training, not in data
SCORES = (0.0, 5.0)  # of STS-B


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

    def document(self, split: str, examples: Mapping[str, Dataset]) -> dict[str, Any]:
        """For result files."""
        return {"name": self.name, "config": self.config, "split": split, "fingerprint": fingerprint(examples)}


def find_source(data: str | None, hub_name: str, config: str | None, schema: str, name: str | None) -> Source:
    """What `--data` means. A folder or file is one if it exists or looks like a path."""
    if data == SAMPLE:
        return Source(SAMPLE, hub_name, schema, schema)
    if data is None:
        return Source(name or hub_name, hub_name, config, schema)
    folder = Path(data).expanduser()
    if folder.is_dir() or (folder.is_file() and folder.suffix in FORMATS):
        own = folder.stem if folder.is_file() else folder.resolve().name
        return Source(name or own, hub_name, None, schema, folder)
    if data.startswith((".", "/", "~")) or data.count("/") != 1:
        raise ValueError(
            f"--data {data!r} is neither a folder or file, nor a name on the Hub (as in {hub_name}), nor 'sample'."
        )
    return Source(name or data, data, config, schema)


def load_split(source: Source, split: str, columns: Sequence[str]) -> Dataset:
    """One split with the columns that a task reads."""
    if source.is_sample:
        found = Dataset.from_list(sample.make(source.schema, split))
    else:
        try:
            if source.folder is None:
                found = datasets.load_dataset(source.hub_name, source.config, split=split)
            else:
                files = split_files(source.folder, split)
                kind = FORMATS[files[0].suffix]
                found = datasets.load_dataset(kind, data_files={split: list(map(str, files))}, split=split)
        except Exception as error:  # readers raise errors of many kinds; all mean the same to the user
            reason = " ".join(str(error.__cause__ or error).split())[:300]
            raise ValueError(f"{source.name}, split {split!r}, cannot be read: {reason}") from error
    missing = [column for column in columns if column not in found.column_names]
    if missing or not len(found):
        what = f"no column {missing[0]!r}; it has {', '.join(found.column_names)}" if missing else "no rows"
        raise ValueError(f"{source.name}, split {split!r}, has {what}. Needed: {', '.join(columns)}.")
    return found.select_columns(list(columns))


def split_files(folder: Path, split: str) -> list[Path]:
    """Files named by their split: train.parquet, or train-00000-of-00002.parquet and so on."""
    if folder.is_file():
        if split != "train":
            raise ValueError(f"{folder} is one file, the split 'train'.")
        return [folder]
    files = sorted(path for path in folder.iterdir() if path.suffix in FORMATS)
    named = [path for path in files if path.stem == split or path.stem.startswith((f"{split}-", f"{split}."))]
    if len({path.suffix for path in named}) != 1:
        there = ", ".join(path.name for path in named or files) or "none"
        raise ValueError(f"there must be files of one format for it, such as {split}.parquet; there are {there}.")
    return named


def take(examples: Dataset, most: int | None) -> Dataset:
    """At most so many examples, drawn once and for all."""
    if most is None or most >= len(examples):
        return examples
    return examples.shuffle(seed=SUBSET_SEED).select(range(most)).flatten_indices()


def check_cells(examples: Dataset, column: str, fine: Callable[[Any], bool], where: str, what: str) -> None:
    """Every cell of a column must be fine."""
    wrong = [i for i, cell in enumerate(examples[column][:]) if not fine(cell)]
    if wrong:
        raise ValueError(
            f"{where}: example {wrong[0]} has {examples[wrong[0]][column]!r} in the column {column!r}, not {what} "
            f"({len(wrong)} such rows in all)."
        )


def check_texts(examples: Dataset, columns: Sequence[str], where: str, blank: bool = True) -> None:
    """Every cell of these columns must hold a text; an empty cell of a CSV file holds none. `blank`: may be spaces."""
    for column in columns:
        check_cells(
            examples, column, lambda cell: isinstance(cell, str) and (blank or bool(cell.strip())), where, "a text"
        )


def check_labels(examples: Dataset, num_labels: int, where: str) -> None:
    """Labels must be whole numbers below `num_labels`, or with none, scores within SCORES."""

    def fine(label: Any) -> bool:
        if num_labels:
            return isinstance(label, int) and not isinstance(label, bool) and 0 <= label < num_labels
        return isinstance(label, (int, float)) and SCORES[0] <= label <= SCORES[1]

    what = f"a label from 0 to {num_labels - 1}" if num_labels else f"a score from {SCORES[0]:g} to {SCORES[1]:g}"
    check_cells(examples, "label", fine, where, what)


def fingerprint(splits: Mapping[str, Dataset]) -> str:
    """SHA-256 of the examples themselves, so that equal data has equal fingerprints wherever it lies.

    >>> first = fingerprint({"train": Dataset.from_dict({"a": [1, 2]})})
    >>> first == fingerprint({"train": Dataset.from_dict({"a": [2, 1]})})
    False
    """
    digest = hashlib.sha256()
    for name, examples in sorted(splits.items()):
        digest.update(f"{name}\0{sorted(examples.column_names)}\0{len(examples)}\n".encode())
        for batch in examples.iter(batch_size=1000):
            digest.update(json.dumps(batch, sort_keys=True, default=str).encode())
    return digest.hexdigest()
