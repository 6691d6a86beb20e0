"""One attention layer, by length: mechanisms against softmax, against their matrix products alone, and against peers.

A round has one direction, one pass, one type and one length; everything in it is interleaved. Inference is a forward
pass without gradients; training is a forward and a backward pass to q, k, v (and to what the mechanism learns). Before
the first round every contender is compared with its definition, and those that differ are reported and not timed.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..mechanisms import MechanismConfig, build_mechanism
from ..results import SOFTMAX, load_average, measured_crossover, new_result, rounded
from .bars import bars
from .contenders import Contender, Key, check, mechanism, named_configs, softmax
from .devices import DTYPES, check_bfloat16_products, check_device, check_dtype
from .limits import Product, matrix_products, other_parts, run_products
from .memory import training_memory
from .peers import PACKAGES, check_peers, peers
from .timing import Competitor, Spread, Watch, interleave, median_ratio, synchroniser, threads

WARMUP = 1  # repetitions
LIMIT = "limit"  # the kind of a cell that holds matrix products alone
PARTS = ("exponentials", "fresh memory", "calls")  # run too, for the share they have of a mechanism's time

Report = Callable[[float, str], Any]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    `features`: for mechanisms with an option num_features; others come as they are. `max_seconds`: for all repetitions
    of one contender in one round. `memory_length`: of the training step whose memory is measured; 0 for none.
    """

    lengths: list[int]
    features: list[int]
    attention: list[str]
    dtypes: list[str]
    causal: tuple[bool, ...] = (False, True)
    training: tuple[bool, ...] = (False, True)
    batch: int = 1
    heads: int = 12
    head_dim: int = 64
    peers: bool = False
    device: str = "cpu"
    threads: int | None = None
    repetitions: int = 24
    max_seconds: float = 1.5
    memory_length: int = 65536
    patience: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            check_dtype(dtype)
        check_device(self.device)
        _ = list(self.configs)  # unknown names and options fail now
        if self.peers:
            check_peers()
            if torch.device(self.device).type != "cpu":
                raise ValueError("--peers are measured on the CPU: without CUDA sources they have no other kernels.")
        if "bfloat16" in self.dtypes and torch.device(self.device).type == "cpu":
            check_bfloat16_products()

    @property
    def configs(self) -> Iterator[tuple[str, MechanismConfig]]:
        """Every mechanism with every number of features."""
        for name, config in named_configs(self.attention).items():
            if any(field.name == "num_features" for field in fields(config)):
                yield from ((name, config.replace(num_features=count)) for count in self.features)
            else:
                yield name, config

    @property
    def rounds(self) -> list[tuple[bool, bool, str, int]]:
        return list(itertools.product(self.causal, self.training, self.dtypes, self.lengths))


def measure_ops(settings: Settings, progress: Report = lambda share, doing: None) -> dict[str, Any]:
    """The result document. `progress` is told the share of the work that is done and what is being done."""
    started = time.perf_counter()
    with threads(settings.threads):
        result = new_result("bench ops", seed=settings.seed, device=settings.device, packages=_packages(settings))
        contenders = {causal: _contenders(settings, causal) for causal in settings.causal}
        checks = list(_checks(settings, contenders, progress))
        watch = Watch(settings.patience)
        cells = []
        total = sum(_work(settings, causal, training, length) for causal, training, _, length in settings.rounds)
        done = 0.0
        for causal, training, dtype, length in settings.rounds:
            failed = {_key(c) for c in checks if not c["passed"] and _of(c, causal, training, dtype)}
            good = [c for c in contenders[causal] if c.key not in failed and _measurable(c, dtype)]
            doing = f"{'causal' if causal else 'bidirectional'}, {_pass(training)}, {dtype}, {length:,} tokens"
            work = _work(settings, causal, training, length)
            progress(done / total, doing)
            cells += _measure_round(good, settings, causal, training, dtype, length, watch)
            done += work
            progress(done / total, doing)
        memory = _memory(settings, progress)
    document = {
        **result,
        "environment": {name: os.environ[name] for name in ("ONEDNN_MAX_CPU_ISA",) if name in os.environ},
        "shape": {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim},
        "attention": [{"name": name, "config": config.to_dict()} for name, config in settings.configs],
        "lengths": settings.lengths,
        "dtypes": settings.dtypes,
        "causal": list(settings.causal),
        "training": list(settings.training),
        "peers": settings.peers,
        "repetitions": settings.repetitions,
        "warmup": WARMUP,
        "max_seconds": settings.max_seconds,
        "checks": checks,
        "cells": cells,
        "crossovers": list(_crossovers(cells, settings)),
        "memory": memory,
        "neighbours": watch.to_dict(),
        "load_average_end": load_average(),
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }
    return document | {"bars": bars(document)}


def _packages(settings: Settings) -> list[str]:
    return list(PACKAGES) if settings.peers else []


def _pass(training: bool) -> str:
    return "forward and backward" if training else "forward"


def _contenders(settings: Settings, causal: bool) -> list[Contender]:
    """All of one direction: softmax, mechanisms, peers."""
    found = [softmax(causal)]
    for name, config in settings.configs:
        module = build_mechanism(config, num_heads=settings.heads, head_dim=settings.head_dim, seed=settings.seed)
        found.append(mechanism(name, module.to(settings.device).eval(), causal))
    if settings.peers:
        for count in settings.features:
            found += peers(settings.heads, settings.head_dim, count, causal, settings.seed)
    return found


def _measurable(contender: Contender, dtype: str) -> bool:
    return contender.kind != "peer" or dtype == "float32"  # compiled kernels of peers know nothing else


def _checks(settings: Settings, contenders: dict[bool, list[Contender]], progress: Report) -> Iterator[dict[str, Any]]:
    """One for each contender and kind of round. Peers are compared at the magnitude of real queries and keys too, for
    the record.
    """
    shape = settings.batch, settings.heads, settings.head_dim
    for causal, training, dtype in itertools.product(settings.causal, settings.training, settings.dtypes):
        for contender in contenders[causal]:
            if not _measurable(contender, dtype):
                continue
            progress(0, f"comparing {contender.name} with its definition")
            options: dict[str, Any] = {"training": training, "dtype": DTYPES[dtype], "device": settings.device}
            found = check(contender, shape, seed=settings.seed, **options)
            if contender.kind == "peer":
                large = check(contender, shape, seed=settings.seed, magnitude=1.0, **options)
                found |= {"deviation_at_magnitude_1": large["deviation"]}
            yield _labels(contender.key, causal, training, dtype) | found


def _labels(key: Key, causal: bool, training: bool, dtype: str, length: int | None = None) -> dict[str, Any]:
    kind, name, features = key
    labels = {"kind": kind, "name": name, "features": features, "causal": causal, "training": training, "dtype": dtype}
    return labels if length is None else labels | {"length": length}


def _key(labels: dict[str, Any]) -> Key:
    return labels["kind"], labels["name"], labels["features"]


def _of(labels: dict[str, Any], causal: bool, training: bool, dtype: str) -> bool:
    return (labels["causal"], labels["training"], labels["dtype"]) == (causal, training, dtype)


def _work(settings: Settings, causal: bool, training: bool, length: int) -> float:
    """A guess at the time of a round: softmax, in fewer repetitions where it is slow, and the rest."""
    quadratic = settings.batch * settings.heads * settings.head_dim * length * length * (1 if causal else 2)
    quadratic *= 4 if training else 1
    linear = 200 * length * settings.head_dim**2 * settings.heads * settings.batch * (4 if training else 1)
    return min(settings.repetitions, max(4, settings.max_seconds * 5e10 / quadratic)) * quadratic + linear


def _measure_round(
    contenders: list[Contender],
    settings: Settings,
    causal: bool,
    training: bool,
    dtype: str,
    length: int,
    watch: Watch,
) -> list[dict[str, Any]]:
    competitors: dict[Key, Competitor] = {}
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    shape = settings.batch, settings.heads, length, settings.head_dim
    tensors = [
        torch.randn(shape, generator=generator, device=settings.device).to(DTYPES[dtype]) for _ in range(4)
    ]  # q, k, v, and the gradient of the output
    layouts: dict[bool, list[torch.Tensor]] = {}
    for contender in contenders:
        if contender.length_first not in layouts:
            layouts[contender.length_first] = contender.inputs(*tensors)
        competitors[contender.key] = _competitor(contender, layouts[contender.length_first], training)
        products = _products(contender, settings, causal, training, length)
        if products:
            run = run_products(products, DTYPES[dtype], settings.device)
            competitors[LIMIT, contender.name, contender.features] = Competitor(run)
            if contender.mechanism is not None and contender.name == "favor+":  # which the bars are about
                parts = other_parts(contender.mechanism, tensors[:3], causal=causal, training=training)
                competitors |= {(part, *contender.key[1:]): Competitor(run) for part, run in parts.items()}
    seconds = interleave(
        competitors,
        settings.repetitions,
        warmup=WARMUP,
        seed=settings.seed,
        max_seconds=settings.max_seconds,
        watch=watch,
        synchronise=synchroniser(torch.device(settings.device)),
    )
    return [
        _labels(key, causal, training, dtype, length)
        | {"milliseconds": Spread.of([1000 * s for s in own]).to_dict()}
        | _ratios(key, seconds)
        for key, own in seconds.items()
        if key[0] not in PARTS
    ]


def _products(
    contender: Contender, settings: Settings, causal: bool, training: bool, length: int
) -> list[Product] | None:
    if contender.mechanism is None:
        return None
    return matrix_products(contender.mechanism, settings.batch, length, causal=causal, training=training)


def _competitor(contender: Contender, tensors: list[torch.Tensor], training: bool) -> Competitor:
    """Its forward pass, or both passes, on tensors of its own."""
    q, k, v = (x.detach().requires_grad_(training) for x in tensors[:3])

    @torch.no_grad()
    def infer() -> None:
        contender.attend(q, k, v)

    def train() -> None:
        contender.attend(q, k, v).backward(tensors[3])

    def forget() -> None:
        for tensor in (q, k, v, *contender.parameters):
            tensor.grad = None

    return Competitor(train, forget) if training else Competitor(infer)


def _ratios(key: Key, seconds: dict[Key, list[float]]) -> dict[str, Any]:
    """How many times faster than softmax; for a mechanism also how many times slower than its products alone, and how
    many times faster than each peer.
    """

    def speed_over(other: Key) -> float | None:
        return rounded(median_ratio(seconds[other], seconds[key])) if other in seconds else None

    kind, name, features = key
    if kind == SOFTMAX:
        return {}
    found: dict[str, Any] = {"speed_over_softmax": speed_over((SOFTMAX, SOFTMAX, None))}
    if kind == "mechanism":
        limit = (LIMIT, name, features)
        if limit in seconds:
            found["time_over_limit"] = rounded(median_ratio(seconds[key], seconds[limit]))
        parts = {part: (part, name, features) for part in PARTS}
        if all(other in seconds for other in parts.values()):
            found["shares"] = {"products": 1 / found["time_over_limit"]} | {
                part: median_ratio(seconds[other], seconds[key]) for part, other in parts.items()
            }
            found["shares"] = {part: rounded(share, 3) for part, share in found["shares"].items()}
        peers = [other for other in seconds if other[0] == "peer" and other[2] == features]
        if peers and name == "favor+":
            found["speed_over_peers"] = {other[1]: speed_over(other) for other in peers}
    return found


def _crossovers(cells: list[dict[str, Any]], settings: Settings) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for cell in cells:
        if cell["kind"] == "mechanism" and cell["speed_over_softmax"] is not None:
            group = cell["name"], cell["features"], cell["causal"], cell["training"], cell["dtype"]
            groups.setdefault(group, []).append(cell)
    for (name, features, causal, training, dtype), row in groups.items():
        lengths = [cell["length"] for cell in row]
        length, interpolated = measured_crossover(lengths, [cell["speed_over_softmax"] for cell in row])
        yield {
            "attention": name,
            "features": features,
            "head_dim": settings.head_dim,
            "causal": causal,
            "training": training,
            "dtype": dtype,
            "length": length,
            "interpolated": interpolated,
            "lengths": lengths,
        }


def _memory(settings: Settings, progress: Report) -> list[dict[str, Any]]:
    """Of a training step of each mechanism, with the fewest features asked for."""
    if not settings.memory_length or torch.device(settings.device).type != "cpu":
        return []
    smallest: dict[str, MechanismConfig] = {}
    for name, config in settings.configs:
        smallest.setdefault(name, config)
    found = []
    for (name, config), causal in itertools.product(smallest.items(), settings.causal):
        progress(1, f"memory of a training step, {name}, {settings.memory_length:,} tokens")
        shape = {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim}
        found.append(
            {"name": name, "features": getattr(config, "num_features", None), "causal": causal}
            | training_memory(config, length=settings.memory_length, causal=causal, threads=settings.threads, **shape)
        )
    return found
