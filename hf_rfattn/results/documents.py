"""One JSON document per run: what was measured, with what, on which machine."""

import importlib.metadata
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
PACKAGE = Path(__file__).resolve().parents[1]


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


def git_state() -> dict[str, Any]:
    """Commit of the working copy that this package runs from, and whether it has changes; nulls if it is installed."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(PACKAGE), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != PACKAGE.parent:  # installed inside somebody else's repository
        return {"commit": None, "changed": None}
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}


def versions(*packages: str) -> dict[str, str | None]:
    """Of Python and of packages; null for one that is not installed."""
    from .. import __version__

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found | {"hf-rfattn": __version__}


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Of this machine; `threads`: the current number of torch threads."""
    import torch

    cpuinfo = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpuinfo.read_text()) if cpuinfo.exists() else None
    has_pages = "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {})
    return {
        "device": device,
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if has_pages else None,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def machine(found: Mapping[str, Any]) -> str:
    """The hardware of a result in a few words.

    >>> machine({"device": "cpu", "cpu": "Some CPU", "threads": 2}), machine({"device": "cuda", "gpu": "Some GPU"})
    ('Some CPU, 2 threads', 'Some GPU')
    """
    device, threads = found.get("device", "cpu"), found.get("threads")
    if device != "cpu":
        return str(found.get("gpu") or device)
    return f"{found.get('cpu') or 'a CPU'}" + (f", {threads} thread{'' if threads == 1 else 's'}" if threads else "")


def load_average() -> list[float] | None:
    """Of the last 1, 5 and 15 minutes."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """As JSON, all or nothing; folders are created."""
    write_whole(json.dumps(result, indent=2, ensure_ascii=False) + "\n", path)


def write_whole(text: str, path: Path) -> None:
    """All of the text or nothing; a symbolic link is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes the target when all is written; if that fails, nothing stays behind."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already and is not an empty folder; choose another one.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield partial
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
    except Exception as error:
        if "No space left on device" in str(error):
            message = f"The disk of {target} is full, so nothing was written. Make room, or choose another folder."
            raise ValueError(message) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    """To so many significant digits.

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
    """A result document whose command and options name files and folders, but do not say where they are.

    Only the names of its model and data keep a slash, since any other name may be a path.

    >>> words = ["python", "../code/train.py", "--data=sets/snli", "--model=me/bert"]
    >>> without_folders({"model": "me/bert", "command": words})["command"]
    ['python', 'train.py', '--data=snli', '--model=me/bert']
    """
    named = [
        each.get("name") if isinstance(each, Mapping) else each for each in map(document.get, ("model", "dataset"))
    ]

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: clean(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [clean(each) for each in value]
        if not isinstance(value, str):
            return value
        start, path = re.fullmatch(r"(-{0,2}[\w.-]+=)?(.*)", value, re.DOTALL).groups("")  # type: ignore[union-attr]
        return value if path in named else start + re.split(r"[/\\]", path.rstrip("/\\"))[-1]

    cleaned = {key: clean(document[key]) for key in ("command", "options") if key in document}
    if isinstance(command := document.get("command"), str):
        cleaned["command"] = shlex.join(clean(shlex.split(command)))
    return {**document, **cleaned}
