"""Reading texts: from files, folders or the Hub. Only parquet files and the Hub need the package datasets."""

import csv
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Texts = list[tuple[str, ...]]
KINDS = (".txt", ".csv", ".jsonl", ".json", ".parquet")


def read_texts(
    data: str, columns: Sequence[str], split: str, config: str | None, most: int
) -> tuple[Texts, dict[str, Any]]:
    """The first `most` texts of a file, a folder or a data set on the Hub, without empty ones, and a description for
    result files. A row is one text, or two that belong together; equal texts have equal fingerprints.
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
        found = _load(f"{data!r} is no file or folder here, and on the Hub it", data, config, split=split)
    rows = [row for row in itertools.islice(_cells(found, columns, data), most) if all(cell.strip() for cell in row)]
    fingerprint = hashlib.sha256("".join(map(json.dumps, rows)).encode()).hexdigest()
    return rows, {"name": name, "config": config, "split": split, "fingerprint": fingerprint}


def _files(path: Path, split: str) -> list[Path]:
    """The file, or those of a folder that can be read; if some are named by the split, only those."""
    kinds = ", ".join(KINDS)
    if path.is_file():
        if path.suffix not in KINDS:
            raise ValueError(f"--data {path}: files of kind {path.suffix!r} cannot be read, only {kinds}.")
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in KINDS)
    if not files:
        raise ValueError(f"--data: the folder {path} has no file that can be read ({kinds}).")
    return [file for file in files if file.name.startswith((f"{split}.", f"{split}-"))] or files


def _read(path: Path) -> Iterator[Row]:
    """The rows of a file. JSON files have one object per line, or one list of objects."""
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
    except Exception as error:  # readers raise errors of many kinds; all mean the same to the user
        reason = " ".join(str(error.__cause__ or error).split())[:300]
        raise ValueError(f"--data: {shown} cannot be read: {reason}") from error


def _cells(rows: Iterable[Row], columns: Sequence[str], data: str) -> Iterator[tuple[str, ...]]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"--data {data}: row {number} is not an object with named columns, but {row!r:.80}.")
        for column in columns:
            if column not in row:
                raise ValueError(
                    f"--data {data}: row {number} has no column {column!r}; it has {', '.join(map(str, row))}. "
                    "Choose with --column."
                )
        cells = tuple("" if row[column] is None else row[column] for column in columns)
        for column, cell in zip(columns, cells, strict=True):
            if not isinstance(cell, str):
                raise ValueError(f"--data {data}: row {number} has {cell!r:.80} in the column {column!r}, not a text.")
        yield cells
