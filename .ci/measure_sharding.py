"""Measure the cost of sequence parallelism: bytes sent per layer and peak memory per process.

python .ci/measure_sharding.py --lengths 16384 65536 262144 --output sharding.json
"""

import itertools
import sys
import tempfile
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import hf_rfattn
from hf_rfattn.bench.measuring import bytes_around
from hf_rfattn.results.documents import new_result, read_result, write_result
from hf_rfattn.results.report import DASH, Block, Table, in_bytes

LAYERS = 2
SHAPE = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip
LIMIT = 2**31  # bytes of memory per process, to compare what fits
WARM_UP = 1024  # tokens of a first pass, which makes the allocations that remain


class SentBytes(TorchDispatchMode):
    """Counts the bytes that this process sends in collectives inside the context."""

    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        size = dist.get_world_size()
        if function.namespace == "c10d" and function.overloadpacket.__name__ == "allgather_":
            self.total += (size - 1) * sum(x.nbytes for x in args[1])
        elif function.namespace == "c10d" and function.overloadpacket.__name__ == "alltoall_base_":
            sent, own = args[1], list(args[4]) or [1] * size
            self.total += sent.nbytes - (sent.nbytes * own[dist.get_rank()] // max(sum(own), 1))
        elif function.namespace == "c10d":
            raise NotImplementedError(f"The number of bytes that {function} sends is unknown; add it here.")
        return function(*args, **(kwargs or {}))


def measure(rank: int, processes: int, attention: str, length: int, folder: str) -> None:
    """Run a forward and a backward pass in one of the processes and write what it sent and its peak memory."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=LAYERS, max_position_embeddings=length)
    model = hf_rfattn.patch_model(LlamaForCausalLM(config), attention)
    hf_rfattn.shard_sequence(model, dist.group.WORLD)

    def step(tokens: int) -> None:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1))
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    step(WARM_UP)
    counter = SentBytes()
    with counter:
        around = bytes_around(lambda: step(length), torch.device("cpu"))
    found = {"sent": counter.total, "peak": None if around is None else around[1] - around[0]}
    write_result(found, Path(folder) / f"{rank}.json")
    dist.destroy_process_group()


def run(lengths: list[int], processes: list[int], attentions: list[str], output: Path) -> None:
    """Measure every combination, each in new processes."""
    document = new_result("bench sharding", seed=0)
    command = ["python", Path(__file__).name, *sys.argv[1:]]
    document |= {"layers": LAYERS, "shape": SHAPE, "cells": [], "command": " ".join(command)}
    for attention, length, size in itertools.product(attentions, lengths, processes):
        with tempfile.TemporaryDirectory() as folder:
            spawn(measure, (size, attention, length, folder), size)
            found = [read_result(Path(folder) / f"{rank}.json") for rank in range(size)]
        cell = {
            "attention": attention,
            "length": length,
            "processes": size,
            "sent_bytes_per_layer": max(each["sent"] for each in found) // LAYERS,
            "peak_bytes": max((each["peak"] for each in found if each["peak"]), default=None),
        }
        print(cell, flush=True)
        document["cells"].append(cell)
        write_result(document, output)


def report(document: dict[str, Any], name: str) -> Iterator[Block]:
    """One table per attention, with a row per length."""
    shape = document["shape"]
    yield (
        f"A Llama of {document['layers']} layers with {shape['num_attention_heads']} heads of "
        f"{shape['hidden_size'] // shape['num_attention_heads']} and random weights, batch size 1, float32, a forward "
        "and a backward pass. Bytes are those of the process that sends most, without the averaging of gradients of "
        "weights. Memory is the largest peak of a process above what it held before."
    )
    cells = {(cell["attention"], cell["length"], cell["processes"]): cell for cell in document["cells"]}
    attentions, lengths, processes = (list(dict.fromkeys(key[i] for key in cells)) for i in range(3))
    sent = [f"sent per layer, {size} processes" for size in processes if size > 1]
    peaks = [f"memory, {size} process{'es' if size > 1 else ''}" for size in processes]
    for attention in attentions:
        rows = []
        for length in lengths:
            found = [cells[attention, length, size] for size in processes]
            row = [in_bytes(cell["sent_bytes_per_layer"]) for cell in found if cell["processes"] > 1]
            row += [in_bytes(cell["peak_bytes"]) if cell["peak_bytes"] else DASH for cell in found]
            rows.append([f"{length:,}", *row])
        yield Table(attention, ["tokens", *sent, *peaks], rows)
        fit = [key for key, cell in cells.items() if key[0] == attention and (cell["peak_bytes"] or LIMIT) < LIMIT]
        longest = {size: max(length for _, length, processes in fit if processes == size) for _, _, size in fit}
        text = ", ".join(f"{length:,} on {size}" for size, length in longest.items())
        yield f"Longest sequence measured within {in_bytes(LIMIT)} per process: {text} processes."


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536, 262144], help="Sequence lengths.")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="Numbers of processes.")
    parser.add_argument("--attention", nargs="+", default=["favor+", "fmm"], help="Mechanisms.")
    parser.add_argument("--output", type=Path, default=Path("sharding.json"), help="File for the result.")
    given = parser.parse_args()
    run(given.lengths, given.processes, given.attention, given.output)
