"""Memory usage of a run: the peak resident set of the process during the run, minus that before it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def bytes_around(run: Callable[[], object], device: torch.device) -> tuple[int, int] | None:
    """Return the bytes in use before a run and at its peak; None where unknown (on a CPU, other systems than Linux).

    >>> around = bytes_around(lambda: torch.ones(2**22), torch.device("cpu"))
    >>> around is None or around[1] - around[0] > 2**23
    True
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return before, torch.cuda.max_memory_allocated(device)
    if not REFERENCES.exists():
        return None
    # Freed memory that the allocator keeps would hide what the run uses.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    before = psutil.Process().memory_info().rss
    REFERENCES.write_text("5")  # resets the peak
    run()
    # Not `ru_maxrss`, which cannot be reset and is inherited from the parent process.
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return before, int(line.split()[1]) * 1024
