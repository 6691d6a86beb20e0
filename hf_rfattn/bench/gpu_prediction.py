"""What the fused kernels should cost on a GPU, counted from shapes: predicted, not measured.

Operations and bytes are per token and head, of a forward pass in bfloat16 without gradients or masks. A kernel takes
the longer of operations / peak rate and bytes / bandwidth; kernels follow each other. Kernels of torch that are not
fused read their inputs from memory and write their outputs to it. Softmax is flash attention, which reads q, k and v
and writes its output once. Break-even is the length from which a path takes less time, if all kernels reach the same
share of the peak; the time of launching kernels, which decides at short lengths and small batches, is left out.
"""

import math
from typing import NamedTuple

from ..results import Table

BLOCK = 128  # queries and keys of a block of FlexAttention
CHUNK = 64  # tokens of a chunk of gated linear attention
HEADS = 96  # batch times heads


class Device(NamedTuple):
    """Peak figures of the vendor: dense bfloat16 operations a second, bytes a second, multiprocessors."""

    name: str
    rate: float
    bandwidth: float
    processors: int
    source: str


DEVICES = (
    Device("A100", 312e12, 2.039e12, 108, "NVIDIA A100 Tensor Core GPU datasheet (80 GB SXM)"),
    Device("H100", 989e12, 3.35e12, 132, "NVIDIA H100 Tensor Core GPU datasheet (SXM; without sparsity)"),
)


class Kernel(NamedTuple):
    """Work of a kernel per token and head; `programs` is how many multiprocessors it can keep busy."""

    operations: float
    bytes: float
    programs: float = math.inf

    def seconds(self, device: Device) -> float:
        busy = min(1.0, self.programs / device.processors)
        return max(self.operations / device.rate, self.bytes / device.bandwidth) / busy


def attend(keys: float, dim: int, tokens_read: float, tokens_written: float, programs: float = math.inf) -> Kernel:
    """A call of FlexAttention in which each token meets `keys` others; tokens are vectors of bfloat16."""
    return Kernel(4 * keys * dim, 2 * dim * (tokens_read + tokens_written) + 4, programs)


def pointwise(numbers: float) -> Kernel:
    """Kernels of torch that read and write so many numbers in float32."""
    return Kernel(0, 4 * numbers)


def paths(dim: int = 64, features: int = 64, bandwidth: int = 32) -> dict[tuple[str, bool], list[Kernel]]:
    """The kernels of each path, by its name and whether it is causal."""
    M, programs = features, HEADS * math.ceil(features / BLOCK)
    norms = pointwise(dim / 2 + 2)
    favor = [norms, attend(M, dim, 2, 0, programs), attend(M, dim, 1, 1)]
    half = HEADS * math.ceil(dim / BLOCK)  # hedgehog: two halves of as many features as the head size
    normaliser = attend(dim, dim, 1, 1)  # whose output nobody reads
    hedgehog = 2 * [normaliser, attend(dim, dim, 2, 0, half), normaliser, attend(dim, dim, 1, 1)]
    hedgehog.append(pointwise(2 * (dim / 2 + dim) + 2 * dim + dim + dim / 2))  # to float32, merged, and back
    reach = 2 * math.ceil(bandwidth / BLOCK) + 1
    band = [attend(reach * BLOCK, dim, 3, 1)]
    causal_band = [attend((reach + 1) / 2 * BLOCK, dim, 3, 1)]
    blend = [pointwise(2 * dim / 2 + 2 * dim + 3 * dim + dim + dim / 2)]
    # log-features of keys and queries, running maximum with its positions, gates, exponentials, copies for the kernel
    prepared = [Kernel(4 * M * dim, 0), pointwise(5 * dim + 45.5 * M), pointwise(3.5 * dim + 4 * (dim + 1))]
    gated = Kernel(2 * CHUNK * (M + dim) + 4 * M * (dim + 1), 4 * (11 * M + 2 * CHUNK + 3 * (dim + 1)))
    causal = [*prepared, gated, pointwise(3.5 * dim)]
    # the torch path casts to float32, and writes features, their exponentials and sums
    eager = [Kernel(8 * M * dim, 0), pointwise(6 * dim + 10 * M), pointwise(5 * dim + 6 * M)]
    return {
        (f"favor+, M = {M}, fused", False): favor,
        (f"favor+, M = {M}, torch path", False): eager,
        (f"hedgehog, M = {2 * dim}, fused", False): hedgehog,
        (f"band {bandwidth}, fused", False): band,
        (f"fmm, band {bandwidth}, M = {M}, fused", False): [*band, *favor, *blend],
        (f"favor+, M = {M}, fused", True): causal,
        (f"band {bandwidth}, fused", True): causal_band,
        (f"fmm, band {bandwidth}, M = {M}, fused", True): [*causal_band, *causal, *blend],
    }


def break_even(kernels: list[Kernel], causal: bool, device: Device, dim: int = 64) -> int:
    """The length at which flash attention takes as long, rounded to two digits."""
    operations = (2 if causal else 4) * dim  # for each key
    length = sum(kernel.seconds(device) for kernel in kernels) * device.rate / operations
    digits = max(math.floor(math.log10(length)) - 1, 0)
    return round(length / 10**digits) * 10**digits


def table(dim: int = 64) -> Table:
    """Operations, bytes and predicted break-even lengths of each path."""
    rows = [
        ["bidirectional", "softmax (flash)", f"{4 * dim} · length", f"{8 * dim:,}", *("–" for _ in DEVICES)],
        ["causal", "softmax (flash)", f"{2 * dim} · length", f"{8 * dim:,}", *("–" for _ in DEVICES)],
    ]
    for (name, causal), kernels in paths(dim).items():
        operations, moved = (sum(getattr(k, field) for k in kernels) for field in ("operations", "bytes"))
        lengths = [f"{break_even(kernels, causal, device, dim):,}" for device in DEVICES]
        form = "causal" if causal else "bidirectional"
        rows.append([form, name, f"{operations:,.0f}", f"{moved:,.0f}", *lengths])
    headings = ["", "", "operations", "bytes", *(f"break-even, {device.name} (predicted)" for device in DEVICES)]
    return Table("Predicted cost on GPUs, per token and head", headings, rows, aligned=False)
