"""Memory that a run takes; for a training step of one attention layer, in a process of its own.

What counts is the process's largest resident set during the run over the one before it. In a training step q, k, v and
their gradients are part of it, and a short step beforehand loads what the first one loads.
"""

import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from ..mechanisms import MechanismConfig, build_mechanism
from ..results import rounded

WARMUP_LENGTH = 256
STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def training_memory(
    config: MechanismConfig, *, batch: int, heads: int, head_dim: int, length: int, causal: bool, threads: int | None
) -> dict[str, Any]:
    """Bytes before the step, at its peak, and the difference; in float32 on the CPU."""
    task = {"attention": config.to_dict(), "batch": batch, "heads": heads, "head_dim": head_dim}
    task |= {"length": length, "causal": causal, "threads": threads or torch.get_num_threads()}
    command = [sys.executable, "-m", __name__, json.dumps(task)]
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        reason = finished.stderr.strip().splitlines()[-1:] or [f"exit code {finished.returncode}"]
        return {"length": length, "skipped": f"the process that measures it failed: {reason[0]}"}
    return json.loads(finished.stdout.splitlines()[-1])


def measure(task: dict[str, Any]) -> dict[str, Any]:
    """What `training_memory` has another process do."""
    torch.set_num_threads(task["threads"])
    heads, head_dim = task["heads"], task["head_dim"]
    mechanism = build_mechanism(task["attention"], num_heads=heads, head_dim=head_dim)

    def step(length: int) -> float:
        shape = task["batch"], heads, length, head_dim
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(3))
        gradient = torch.randn(shape, generator=generator)
        start = time.perf_counter()
        mechanism(q, k, v, causal=task["causal"]).backward(gradient)
        return time.perf_counter() - start

    step(WARMUP_LENGTH)
    seconds: list[float] = []
    around = bytes_around(lambda: seconds.append(step(task["length"])), torch.device("cpu"))
    if around is None:
        raise NotImplementedError("Peaks of memory are known on Linux alone.")
    before, peak = around
    return {
        "length": task["length"],
        "before_bytes": before,
        "peak_bytes": peak,
        "step_bytes": peak - before,
        "seconds": rounded(seconds[0], 3),
    }


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


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
