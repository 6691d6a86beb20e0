"""How fast a process trains: seconds, samples and tokens of its steps, without evaluation and saving."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


class Meter:
    """Counts while it runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Begin to count from nothing, when it is started."""
        self._seconds = 0.0
        self.samples = self.tokens = self.padded_tokens = 0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Waits for what the device still has to do, which belongs to the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._seconds, self._since = self.seconds, None

    def count(self, batch: Mapping[str, Tensor]) -> None:
        """One batch on the CPU. Tokens that only fill up rows are counted apart."""
        if self.running:
            ids, mask = batch["input_ids"], batch.get("attention_mask")
            self.samples += len(ids)
            self.padded_tokens += ids.numel()
            self.tokens += ids.numel() if mask is None else int(mask.sum())


def peak_memory(device: torch.device) -> int:
    """Highest memory of this process so far: on a GPU what tensors took there, else what the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():  # getrusage also counts what the launching process held before
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
