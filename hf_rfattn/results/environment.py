"""Where a result was measured: commit, versions, hardware and load."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


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
    """What it runs on: `threads` are those torch has now."""
    import torch

    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    names = getattr(os, "sysconf_names", {})
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in names else None
    return {
        "device": device,
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory,
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
    """Of the last 1, 5 and 15 minutes: what else the machine was doing."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None
