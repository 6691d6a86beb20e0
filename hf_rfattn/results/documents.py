"""One JSON document a run: what was measured, with what, on which machine."""

import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .environment import git_state, hardware, load_average, versions

SCHEMA_VERSION = 1


def new_result(kind: str, *, seed: int, device: str = "cpu", packages: Iterable[str] = ()) -> dict[str, Any]:
    """The part that all results share; call it when the run starts. `packages`: others whose version matters.

    >>> result = new_result("example", seed=0)
    >>> list(result)
    ['schema_version', 'kind', 'created', 'git', 'versions', 'hardware', 'load_average', 'seed']
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": git_state(),
        "versions": versions("hf-rfattn", "torch", "transformers", "numpy", *packages),
        "hardware": hardware(device),
        "load_average": load_average(),
        "seed": seed,
    }


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """As JSON; folders are made."""
    write_whole(json.dumps(result, indent=2, ensure_ascii=False) + "\n", path)


def write_whole(text: str, path: Path) -> None:
    """All of it or nothing; a link is replaced, and what it points to left alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_result(path: Path) -> dict[str, Any]:
    """The JSON object in a file; ValueError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a JSON document: {error}.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(document).__name__}.")
    return document


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits, as result files hold numbers.

    >>> rounded(0.00123456)
    0.001235
    """
    return float(f"{value:.{digits}g}")


def name_of(given: str) -> str:
    """What results call a model or data: a folder by its own name, never by its path.

    >>> name_of("google-bert/bert-base-uncased")
    'google-bert/bert-base-uncased'
    """
    return Path(given).expanduser().resolve().name if Path(given).expanduser().exists() else given


def without_folders(document: Mapping[str, Any]) -> dict[str, Any]:
    """A result document for others, which names files and folders but does not say where they lie.

    In its command and options only what it calls its model and its data keeps a slash, since any other name may be a
    path on this machine; elsewhere what is clearly a path shrinks to its last part.

    >>> words = ["python", "../code/train.py", "--data=sets/snli", "--model=me/bert"]
    >>> without_folders({"model": "me/bert", "command": words})["command"]
    ['python', 'train.py', '--data=snli', '--model=me/bert']
    """
    named = [document.get("model"), document.get("dataset")]
    public = {each.get("name") if isinstance(each, Mapping) else each for each in named}

    def clean(value: Any, keep: set[Any] | None) -> Any:
        if isinstance(value, str):
            return _without_folder(value, keep)
        if isinstance(value, Mapping):
            return {key: clean(each, keep) for key, each in value.items()}
        return [clean(each, keep) for each in value] if isinstance(value, (list, tuple)) else value

    found = {key: clean(each, public if key in ("command", "options") else None) for key, each in document.items()}
    if isinstance(command := document.get("command"), str):
        try:
            words = shlex.split(command)
        except ValueError:  # a quote that does not end
            words = command.split()
        found["command"] = shlex.join(clean(words, public))
    return found


def _without_folder(word: str, keep: set[Any] | None) -> str:
    """A word, or NAME=VALUE, whose value is a path. `keep`: values that are none; None: only clear cases are paths."""
    start, value = re.fullmatch(r"(-{0,2}[\w.-]+=)?(.*)", word, re.DOTALL).groups(default="")  # type: ignore[union-attr]
    if not re.search(r"[/\\]", value) or (keep is not None and value in keep):
        return word
    if keep is None and not re.match(r"[/\\~]|\.\.?[/\\]|[A-Za-z]:[/\\]", value):
        return word
    return start + (re.split(r"[/\\]", value.rstrip("/\\"))[-1] or ".")
