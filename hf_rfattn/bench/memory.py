"""Memory that a run takes: the largest resident set of the process during the run, over the one before it."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def bytes_around(run: Callable[[], object], device: torch.device) -> tuple[int, int] | None:
    """Bytes held before a run and at its peak; None where that cannot be known (a CPU without Linux).

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
    # What was freed earlier but is kept for the next allocation would hide what the run takes.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    before = psutil.Process().memory_info().rss
    REFERENCES.write_text("5")  # from here on the peak is counted anew
    run()
    # not `ru_maxrss`, which is never set back and which a process inherits from the one that started it
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return before, int(line.split()[1]) * 1024
