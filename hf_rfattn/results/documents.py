"""One JSON document per run, with the measurements, the software and the machine; and fingerprints of checkpoints."""

import hashlib
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
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
RESULTS = "results"  # subfolder of a checkpoint for result documents


def new_result(kind: str, *, seed: int, device: str = "cpu", packages: Iterable[str] = ()) -> dict[str, Any]:
    """Create a result document with the shared fields, at the start of a run. `packages`: further versions to record.

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
    """Commit of the clone that this package runs from, and whether it has changes; nulls if there is no clone."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(PACKAGE), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != PACKAGE.parent:  # installed inside another repository
        return {"commit": None, "changed": None}
    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of Python and of packages; null for a package that is not installed."""
    from .. import __version__

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found | {"hf-rfattn": __version__}


def hardware(device: str = "cpu") -> dict[str, Any]:
    """Describe this machine; `threads` is the current number of torch threads."""
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
    """Summarise the hardware of a result.

    >>> machine({"device": "cpu", "cpu": "Some CPU", "threads": 2}), machine({"device": "cuda", "gpu": "Some GPU"})
    ('Some CPU, 2 threads', 'Some GPU')
    """
    device, threads = found.get("device", "cpu"), found.get("threads")
    if device != "cpu":
        return str(found.get("gpu") or device)
    return f"{found.get('cpu') or 'a CPU'}" + (f", {threads} thread{'' if threads == 1 else 's'}" if threads else "")


def load_average() -> list[float] | None:
    """Load average of the last 1, 5 and 15 minutes; None if the system has none."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON, atomically. Creates folders."""
    write_whole(json.dumps(result, indent=2, ensure_ascii=False) + "\n", path)


def write_whole(text: str, path: Path) -> None:
    """Write a text file atomically. A symbolic link is replaced, not followed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Raise ValueError if a folder can neither be written to nor created."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "no permission to write to it" if existing.is_dir() else "it is a file"
        raise ValueError(f"{folder} cannot be used for output because of {existing}: {reason}. Choose another folder.")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `target` at the end, or deleted if an error is raised."""
    check_writable(target.parent)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} already exists and is not an empty folder; choose another one.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield partial
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
    except Exception as error:
        if "No space left on device" in str(error):
            message = f"The disk of {target} is full, so nothing was written. Free some space or choose another folder."
            raise ValueError(message) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read_result(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ValueError for anything else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not a JSON document: {error}.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} must be a JSON object, not {type(document).__name__}.")
    return document


def rounded(value: float, digits: int = 4) -> float:
    """Round to `digits` significant digits.

    >>> rounded(0.00123456)
    0.001235
    """
    return float(f"{value:.{digits}g}")


def name_of(given: str) -> str:
    """Return the name of a model or dataset for results: the last part of a folder's path, else the name itself.

    >>> name_of("google-bert/bert-base-uncased")
    'google-bert/bert-base-uncased'
    """
    return Path(given).expanduser().resolve().name if Path(given).expanduser().exists() else given


def without_folders(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result document without the paths in its command and options: only the last part of each remains.

    The names of its model and dataset keep their slash; any other text with a slash may be a path.

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


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that `from_pretrained` reads: one file, or shards."""
    whole = folder / WEIGHTS
    return [whole] if whole.is_file() else sorted(folder.glob("model-?????-of-?????.safetensors"))


def checkpoint_fingerprint(folder: str | Path) -> str:
    """SHA-256 digest of config.json and the weights."""
    return _digest([Path(folder) / CONFIG, *weight_files(Path(folder))])


def results_fingerprint(folder: Path) -> str:
    """SHA-256 digest of the result documents in a checkpoint's folder."""
    return _digest(sorted((folder / RESULTS).glob("*.json")))


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        one = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                one.update(block)
        total.update(f"{file.name}\0{one.hexdigest()}\n".encode())
    return total.hexdigest()
