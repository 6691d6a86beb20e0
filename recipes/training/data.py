"""Loading of datasets from the Hub, a local folder or a file, and checks of their columns."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}
SUBSET_SEED = 0  # subsets are the same for every --seed, which changes training only


@dataclass(frozen=True)
class Source:
    """A dataset: its name in result files, its name on the Hub, and its local folder or file, if it is local."""

    name: str
    hub_name: str
    config: str | None
    folder: Path | None = None

    def load(self, split: str, columns: Sequence[str]) -> Dataset:
        """Load columns of a split. Local files start with its name: train.parquet, or train-00000-of-00002.csv."""
        try:
            if self.folder is None:
                found = datasets.load_dataset(self.hub_name, self.config, split=split)
            else:
                single = self.folder.is_file() and split == "train"
                files = [self.folder] if single else self.folder.glob(f"{split}[.-]*")
                paths = sorted(str(path) for path in files if path.suffix in FORMATS)
                if not paths:
                    raise ValueError(f"there is no file for this split, such as {split}.parquet.")
                found = datasets.load_dataset(FORMATS[Path(paths[0]).suffix], data_files={split: paths}, split=split)
        except Exception as error:  # the readers of datasets raise errors of many types
            reason = " ".join(str(error.__cause__ or error).split())[:300]
            raise ValueError(f"--data: {self.name}, split {split!r}, cannot be read: {reason}") from error
        missing = [column for column in columns if column not in found.column_names]
        if missing or not len(found):
            what = f"no column {missing[0]!r}; it has {', '.join(found.column_names)}" if missing else "no rows"
            raise ValueError(f"--data: {self.name}, split {split!r}, has {what}. Needed: {', '.join(columns)}.")
        return found.select_columns(list(columns))

    def document(self, split: str, examples: Mapping[str, Dataset]) -> dict[str, Any]:
        """Describe the dataset for result files."""
        return {"name": self.name, "config": self.config, "split": split, "fingerprint": fingerprint(examples)}


def find_source(data: str | None, hub_name: str, config: str | None, name: str | None) -> Source:
    """Return the dataset that `--data` names: an existing folder or file, or a dataset on the Hub."""
    if data is None:
        return Source(name or hub_name, hub_name, config)
    folder = Path(data).expanduser()
    if folder.is_file() and folder.suffix not in FORMATS:
        raise ValueError(f"--data {data}: unknown format {folder.suffix!r}; supported: {', '.join(FORMATS)}.")
    if folder.exists():
        own = folder.stem if folder.is_file() else folder.resolve().name
        return Source(name or own, hub_name, None, folder)
    if data.startswith((".", "/", "~")) or data.count("/") != 1:
        raise ValueError(f"--data {data!r} is not a folder or file, nor a name on the Hub such as {hub_name}.")
    return Source(name or data, data, config)


def take(examples: Dataset, most: int | None) -> Dataset:
    """Return a random subset of at most `most` examples, the same one for every seed."""
    if most is None or most >= len(examples):
        return examples
    return examples.shuffle(seed=SUBSET_SEED).select(range(most)).flatten_indices()


def check_cells(examples: Dataset, column: str, valid: Callable[[Any], bool], what: str) -> None:
    """Raise ValueError unless all cells of a column are valid. `what`: describes a valid cell in the message."""
    wrong = [i for i, cell in enumerate(examples[column][:]) if not valid(cell)]
    if wrong:
        raise ValueError(
            f"Split {examples.split}: example {wrong[0]} has {examples[wrong[0]][column]!r} in the column {column!r}, "
            f"not {what} ({len(wrong)} rows in total). Correct or remove them."
        )


def check_texts(examples: Dataset, columns: Sequence[str]) -> None:
    """Raise ValueError unless all cells of these columns are strings; empty cells of CSV files are None."""
    for column in columns:
        check_cells(examples, column, lambda cell: isinstance(cell, str), "a text")


def fingerprint(splits: Mapping[str, Dataset]) -> str:
    """SHA-256 digest of the examples, which does not depend on where they are stored.

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
