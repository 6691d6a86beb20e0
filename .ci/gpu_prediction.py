"""Predicted (not measured) cost of the fused kernels on a GPU, computed from shapes.

Operations and bytes are per token and head, for a forward pass in bfloat16 without gradients or masks. A kernel takes
the larger of operations / peak rate and bytes / bandwidth; kernels run one after another. Unfused torch kernels read
inputs from memory, write outputs to memory and multiply in float32. Softmax is flash attention, which reads q, k and v
and writes its output once. The break-even length assumes that all kernels reach the same share of the peak, and ignores
launch overhead, which dominates at short lengths and small batches.
"""

import math
from typing import NamedTuple

from hf_rfattn.mechanisms.multipole import CAUSAL_BLOCK, MultipoleConfig, block_and_tile
from hf_rfattn.results.report import Table

BLOCK = 128  # block size of FlexAttention
CHUNK = 64  # chunk size of gated linear attention
HEADS = 96  # batch times heads
LENGTHS = 8192, 16384  # lengths between which growing costs are fitted


class Device(NamedTuple):
    """Peak figures of the vendor: dense operations per second in bfloat16 and, without tensor cores, in float32; bytes
    per second; number of multiprocessors.
    """

    name: str
    rate: float
    float32_rate: float
    bandwidth: float
    processors: int
    source: str


SOURCES = (
    "80 GB SXM, by https://glennklockwood.com/garden/processors/A100, which quotes NVIDIA's data sheet "
    "(nvidia-a100-datasheet-us-nvidia-1758950-r4) and white paper",
    "80 GB SXM5, without sparsity, by https://glennklockwood.com/garden/processors/h100 and "
    "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html, which quote NVIDIA",
)
DEVICES = (
    Device("A100", 312e12, 19.5e12, 2.039e12, 108, SOURCES[0]),
    Device("H100", 989.4e12, 66.9e12, 3.35e12, 132, SOURCES[1]),
)


class Kernel(NamedTuple):
    """Work of a kernel per token and head; `programs` is the number of multiprocessors it can use."""

    operations: float
    bytes: float
    programs: float = math.inf
    float32: bool = False

    def seconds(self, device: Device) -> float:
        busy = min(1.0, self.programs / device.processors)
        rate = device.float32_rate if self.float32 else device.rate
        return max(self.operations / rate, self.bytes / device.bandwidth) / busy


def attend(keys: float, dim: int, tokens_read: float, tokens_written: float, programs: float = math.inf) -> Kernel:
    """A call of FlexAttention in which each token attends to `keys` others, in bfloat16."""
    return Kernel(4 * keys * dim, 2 * dim * (tokens_read + tokens_written) + 4, programs)


def torch_kernels(numbers: float, operations: float = 0) -> Kernel:
    """Unfused torch kernels that read and write `numbers` values in float32."""
    return Kernel(operations, 4 * numbers, float32=True)


def flash(length: float, causal: bool, dim: int) -> Kernel:
    """Flash attention, which reads q, k and v and writes the output once."""
    return Kernel((2 if causal else 4) * dim * length, 8 * dim)


def paths(length: int, dim: int = 64, features: int = 64, bandwidth: int = 32) -> dict[tuple[str, bool], list[Kernel]]:
    """The kernels of each path, by (name, causal), at a sequence length."""
    M, programs = features, HEADS * math.ceil(features / BLOCK)
    favor = [torch_kernels(dim / 2 + 2), attend(M, dim, 2, 0, programs), attend(M, dim, 1, 1)]  # norms come first
    half = HEADS * math.ceil(dim / BLOCK)  # hedgehog: two halves of as many features as the head size
    normaliser = attend(dim, dim, 1, 1)  # only its log-sum-exp is used
    hedgehog = 2 * [normaliser, attend(dim, dim, 2, 0, half), normaliser, attend(dim, dim, 1, 1)]
    hedgehog.append(torch_kernels(2 * (dim / 2 + dim) + 2 * dim + dim + dim / 2))  # to float32, merged, and back
    reach = 2 * math.ceil(bandwidth / BLOCK) + 1
    band = [attend(reach * BLOCK, dim, 3, 1)]
    causal_band = [attend((reach + 1) / 2 * BLOCK, dim, 3, 1)]
    blend = [torch_kernels(2 * dim / 2 + 2 * dim + 3 * dim + dim + dim / 2)]
    # log-features of keys and queries, running maximum with its positions, gates, exponentials, copies for the kernel
    prepared = torch_kernels(5 * dim + 45.5 * M + 3.5 * dim + 4 * (dim + 1), 4 * M * dim)
    gated = Kernel(2 * CHUNK * (M + dim) + 4 * M * (dim + 1), 4 * (11 * M + 2 * CHUNK + 3 * (dim + 1)))
    causal = [prepared, gated, torch_kernels(3.5 * dim)]
    # the torch path casts to float32, and writes features, their exponentials and sums
    eager = [torch_kernels(6 * dim + 10 * M, 4 * M * dim), torch_kernels(5 * dim + 6 * M, 4 * M * dim)]
    exact = MultipoleConfig().exact_keys
    return {
        (f"favor+, M = {M}, fused", False): favor,
        (f"favor+, M = {M}, torch path", False): eager,
        (f"hedgehog, M = {2 * dim}, fused", False): hedgehog,
        (f"band {bandwidth}, fused", False): band,
        (f"fmm separate, band {bandwidth}, M = {M}, fused", False): [*band, *favor, *blend],
        (f"fmm joint, band {bandwidth}, M = {M}, fused", False): [*band, *causal, *causal, *blend],
        (f"multipole, {exact} exact keys, fused", False): _multipole(length, exact, dim),
        (f"favor+, M = {M}, fused", True): causal,
        (f"band {bandwidth}, fused", True): causal_band,
        (f"fmm joint, band {bandwidth}, M = {M}, fused", True): [*causal_band, *causal, *blend],
        (f"multipole, {exact} exact keys, fused", True): _causal_multipole(length, dim),
    }


def _multipole(length: int, exact: int, dim: int) -> list[Kernel]:
    block, tile = block_and_tile(length)
    blocks, choice = length / block, 4 * length / block / tile  # block means; votes of a tile for each of them
    codes = 2 * (dim + 4 * 16 + 24)  # moments, codes of 16 bits, and sorting them, of queries and keys
    tokens = 4.5 * dim + codes + 8 * dim + 8 * dim + 6 * dim  # to float32, in order and back, block means, to bfloat16
    return [
        torch_kernels(tokens + 11 * choice, 2 * dim * choice),
        torch_kernels(4 * exact / tile * dim / 2),  # keys and values of chosen blocks are copied for each tile
        attend(exact * max(BLOCK / tile, 1), dim, 1 + 2 * exact / tile, 1),  # kernels compute 128 queries at least
        Kernel(4 * blocks * dim, 2 * dim * 2 + 4 + 4 * choice),
        torch_kernels(11 * dim + 1.5 * dim),  # both parts to float32, merged, and to bfloat16
    ]


def _causal_multipole(length: int, dim: int) -> list[Kernel]:
    """If no block of keys can be skipped: each query chooses for itself, and 128 of them choose most blocks."""
    blocks = length / CAUSAL_BLOCK
    return [
        torch_kernels(6 * dim + 38 * blocks, 2 * dim * blocks),  # the choice: scores, bounds, their order, and masks
        Kernel(2 * dim * length, 8 * dim + blocks / 2),
        Kernel(4 * dim * blocks, 4 * dim + 4 * blocks),
        torch_kernels(11 * dim + 1.5 * dim),
    ]


def break_even(path: tuple[str, bool], device: Device, dim: int = 64) -> int | None:
    """The break-even length with flash attention to two significant digits; None if it is ten million or more."""
    for length in (digits * 10**power for power in range(1, 6) for digits in range(10, 100)):
        seconds = sum(kernel.seconds(device) for kernel in paths(length, dim)[path])
        if seconds <= flash(length, path[1], dim).seconds(device):
            return length
    return None


def table(dim: int = 64) -> Table:
    """Table of operations, bytes and predicted break-even lengths of each path."""
    rows = []
    for causal, form in ((False, "bidirectional"), (True, "causal")):
        both = {"softmax (flash)": [[flash(length, causal, dim)] for length in LENGTHS]}
        for path in paths(LENGTHS[0], dim):
            if path[1] == causal:
                both[path[0]] = [paths(length, dim)[path] for length in LENGTHS]
        for name, kernels in both.items():
            costs = [_formula([sum(k[field] for k in some) for some in kernels]) for field in range(2)]
            known = [None if name.startswith("softmax") else break_even((name, causal), d, dim) for d in DEVICES]
            lengths = ["–" if name.startswith("softmax") else f"{x:,}" if x else "never" for x in known]
            rows.append([form, name, *costs, *lengths])
    predicted = [f"break-even, {device.name} (predicted)" for device in DEVICES]
    headings = ["direction", "path", "operations", "bytes", *predicted]
    return Table("Predicted cost on GPUs, per token and head", headings, rows, aligned=False)


def _formula(values: list[float]) -> str:
    """Format a cost as a constant or a linear function of length, from its values at two lengths."""
    slope = (values[1] - values[0]) / (LENGTHS[1] - LENGTHS[0])
    if not slope:
        return f"{values[0]:,.0f}"
    start = values[0] - slope * LENGTHS[0]
    growing = f"{slope:,.3g} · length"
    return growing if round(start) == 0 else f"{start:,.0f} + {growing}"
