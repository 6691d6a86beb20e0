"""One attention layer, by length: mechanisms against softmax and against other libraries.

A round has one direction, one pass, one type and one length; everything in it is interleaved. Inference is a forward
pass without gradients; training is a forward and a backward pass to q, k, v (and to what the mechanism learns). Before
the first round every contender is compared with its definition, and those that differ are reported and not timed.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from ..mechanisms import MechanismConfig, build_mechanism
from ..results import (
    SOFTMAX,
    Block,
    Image,
    Paragraph,
    Table,
    load_average,
    machine,
    new_result,
    rounded,
    times,
)
from .break_even import crossovers
from .contenders import Contender, Key, check_all, is_among, labels_of, mechanism, named_configs, softmax
from .devices import DTYPES, check_bfloat16_products, check_device, check_dtype
from .peers import NAMES, PACKAGES, check_peers, peers
from .settings import OpsSettings
from .timing import Competitor, Spread, Watch, interleave, median_ratio, synchroniser, threads

WARMUP = 1  # repetitions
SHADES = (1.0, 0.6, 0.35)  # of lines with more and more features

Document = dict[str, Any]
Progress = Callable[[float, str], Any]


def configs(settings: OpsSettings) -> list[tuple[str, MechanismConfig]]:
    """Every mechanism with every number of features."""
    found = []
    for name, config in named_configs(settings.attention or ["favor+"]).items():
        if any(field.name == "num_features" for field in fields(config)):
            found += [(name, config.replace(num_features=count)) for count in settings.features]
        else:
            found.append((name, config))
    return found


def _check(settings: OpsSettings) -> None:
    """What cannot be measured fails before anything is."""
    for dtype in settings.dtypes:
        check_dtype(dtype)
    check_device(settings.device)
    configs(settings)
    on_cpu = torch.device(settings.device).type == "cpu"
    if settings.peers:
        check_peers()
        if not on_cpu:
            raise ValueError("--peers are measured on the CPU: without CUDA sources they have no other kernels.")
    if "bfloat16" in settings.dtypes and on_cpu:
        check_bfloat16_products()


def measure(settings: OpsSettings, progress: Progress = lambda share, doing: None) -> Document:
    """The result document. `progress` is told the share of the work that is done and what is being done."""
    _check(settings)
    started = time.perf_counter()
    with threads(settings.threads):
        packages = PACKAGES if settings.peers else ()
        result = new_result("bench ops", seed=settings.seed, device=settings.device, packages=packages)
        contenders = {causal: _contenders(settings, causal) for causal in settings.directions}
        checks: list[dict[str, Any]] = []
        for causal, training, dtype in itertools.product(settings.directions, settings.passes, settings.dtypes):
            progress(0, f"comparing with definitions, {name_of_round(causal, training, dtype)}")
            checks += check_all(contenders[causal], settings, causal, training, dtype)
        watch = Watch(settings.patience)
        cells = []
        rounds = list(itertools.product(settings.directions, settings.passes, settings.dtypes, settings.lengths))
        work = [length * (length + 4096) * (3 if training else 1) for _, training, _, length in rounds]
        for number, (causal, training, dtype, length) in enumerate(rounds):
            progress(sum(work[:number]) / sum(work), f"{name_of_round(causal, training, dtype)}, {length:,} tokens")
            passed = [check for check in checks if check["passed"]]
            good = [c for c in contenders[causal] if is_among(c, passed, causal, training, dtype)]
            cells += _measure_round(good, settings, causal, training, dtype, length, watch)
    return {
        **result,
        "environment": {name: os.environ[name] for name in ("ONEDNN_MAX_CPU_ISA",) if name in os.environ},
        "shape": {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim},
        "attention": [{"name": name, "config": config.to_dict()} for name, config in configs(settings)],
        "lengths": list(settings.lengths),
        "dtypes": list(settings.dtypes),
        "causal": list(settings.directions),
        "training": list(settings.passes),
        "peers": settings.peers,
        "repetitions": settings.repetitions,
        "warmup": WARMUP,
        "max_seconds": settings.max_seconds,
        "checks": checks,
        "cells": cells,
        "crossovers": crossovers([c for c in cells if c["kind"] == "mechanism"], settings.head_dim),
        "neighbours": watch.to_dict(),
        "load_average_end": load_average(),
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }


def name_of_round(causal: bool, training: bool, dtype: str | None = None) -> str:
    text = f"{'causal' if causal else 'bidirectional'}, {'forward and backward' if training else 'forward'}"
    return text if dtype is None else f"{text}, {dtype}"


def _contenders(settings: OpsSettings, causal: bool) -> list[Contender]:
    """All of one direction: softmax, mechanisms, peers."""
    found = [softmax(causal)]
    for name, config in configs(settings):
        module = build_mechanism(config, num_heads=settings.heads, head_dim=settings.head_dim, seed=settings.seed)
        found.append(mechanism(name, module.to(settings.device).eval(), causal))
    if settings.peers:
        for count in settings.features:
            found += peers(settings.heads, settings.head_dim, count, causal, settings.seed)
    return found


def _measure_round(
    contenders: list[Contender],
    settings: OpsSettings,
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
        labels_of(key, causal, training, dtype)
        | {"length": length, "milliseconds": Spread.of([1000 * s for s in own]).to_dict()}
        | _ratios(key, seconds)
        for key, own in seconds.items()
    ]


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
    """How many times faster than softmax; for "favor+" also than each peer with as many features."""
    kind, name, features = key

    def speed_over(other: Key) -> float | None:
        return rounded(median_ratio(seconds[other], seconds[key])) if other in seconds else None

    if kind == SOFTMAX:
        return {}
    found: dict[str, Any] = {"speed_over_softmax": speed_over((SOFTMAX, SOFTMAX, None))}
    others = [other for other in seconds if other[0] == "peer" and other[2] == features]
    if others and kind == "mechanism" and name == "favor+":
        found["speed_over_peers"] = {other[1]: speed_over(other) for other in others}
    return found


def cells_of(result: Document, **labels: Any) -> list[dict[str, Any]]:
    """Cells with these labels, by length."""
    found = [cell for cell in result["cells"] if all(cell[name] == value for name, value in labels.items())]
    return sorted(found, key=lambda cell: cell["length"])


def report(result: Document, name: str) -> list[Block]:
    """Speed over softmax, break-even lengths, peers, and a plot of each type."""
    what = "Time of one attention layer by length, log-log, with the lengths where mechanisms cross softmax"
    blocks: list[Block] = [speed_table(result, dtype, milliseconds=True) for dtype in result["dtypes"]]
    for number, dtype in enumerate(result["dtypes"]):
        file = f"{name}_{dtype}.png" if number else f"{name}.png"
        blocks += [Image(file, what, partial(plot, result, dtype)), *break_even(result, dtype)]
    if result["peers"]:
        blocks.append(peers_table(result, result["lengths"]))
    failed = [check for check in result["checks"] if not check["passed"]]
    if failed:
        rows = [
            [c["name"], name_of_round(c["causal"], c["training"], c["dtype"]), str(c["deviation"]), str(c["tolerance"])]
            for c in failed
        ]
        blocks.append(Table("Not timed: differs from its definition", ["", "round", "deviation", "tolerance"], rows))
    return blocks


def speed_table(
    result: Document,
    dtype: str,
    lengths: list[int] | None = None,
    features: int | None = None,
    milliseconds: bool = False,
) -> Table:
    """Speed over softmax by length; of mechanisms with so many `features`, if that is given."""
    lengths = lengths or result["lengths"]
    rows = []
    for causal, training in itertools.product(result["causal"], result["training"]):
        cells = cells_of(result, kind="mechanism", dtype=dtype, causal=causal, training=training)
        for name, count in dict.fromkeys((cell["name"], cell["features"]) for cell in cells):
            if features and count != features:
                continue
            found = {cell["length"]: cell for cell in cells if (cell["name"], cell["features"]) == (name, count)}
            what = f"{name}, M = {count}" if count else name
            row = [_speed(found.get(length), milliseconds) for length in lengths]
            rows.append([name_of_round(causal, training, dtype), what, *row])
    return Table("", ["", "", *(f"{length:,} tokens" for length in lengths)], rows, aligned=False)


def _speed(cell: dict[str, Any] | None, milliseconds: bool) -> str:
    text = times(cell["speed_over_softmax"] if cell else None)
    return f"{text}, {cell['milliseconds']['median']:,.3g} ms" if cell and milliseconds else text


def break_even(result: Document, dtype: str) -> Iterator[Paragraph]:
    """Up to which length softmax is faster, a sentence for each direction and pass."""
    for causal, training in itertools.product(result["causal"], result["training"]):
        below = []
        for each in result["crossovers"]:
            if (each["causal"], each["training"], each["dtype"]) != (causal, training, dtype):
                continue
            what = f"`{each['attention']}`" + (f" with M = {each['features']}" if each["features"] else "")
            if each["length"] is None:
                below.append(f"{what} at every length measured (up to {max(each['lengths']):,})")
            elif each["interpolated"] is None:
                below.append(f"{what} at no length measured (from {min(each['lengths']):,} on)")
            else:
                below.append(f"{what} below about {each['interpolated']:,} tokens")
        if below:
            where = name_of_round(causal, training, dtype)
            yield Paragraph(f"**Softmax is the better choice** ({where}) over {', over '.join(below)}.")


def speeds_over_peers(result: Document) -> Iterator[tuple[bool, bool, int, str, dict[int, float]]]:
    """Direction, pass, features, peer, and the speed of favor+ over it by length."""
    for causal, training in itertools.product(result["causal"], result["training"]):
        cells = cells_of(result, kind="mechanism", name="favor+", causal=causal, training=training)
        for features, peer in itertools.product(dict.fromkeys(cell["features"] for cell in cells), NAMES):
            speeds = {
                cell["length"]: cell["speed_over_peers"][peer]
                for cell in cells
                if cell["features"] == features and peer in cell.get("speed_over_peers", {})
            }
            if speeds:
                yield causal, training, features, peer, speeds


def peers_table(result: Document, lengths: list[int]) -> Table:
    rows = [
        [f"{name_of_round(causal, training)}, M = {features}", peer, *(times(speeds.get(each)) for each in lengths)]
        for causal, training, features, peer, speeds in speeds_over_peers(result)
    ]
    return Table("", ["", "over", *(f"{length:,} tokens" for length in lengths)], rows, aligned=False)


def plot(result: Document, dtype: str) -> Any:
    """Time by length, log-log, a panel for each direction and pass; where a mechanism crosses softmax is marked."""
    from matplotlib.figure import Figure

    from ..results.plots import title_and_legend

    directions, passes, shape = result["causal"], result["training"], result["shape"]
    figure = Figure(figsize=(5.6 * len(passes), 4.4 * len(directions) + 1), layout="constrained")
    panels = figure.subplots(len(directions), len(passes), squeeze=False)
    for axes, (causal, training) in zip(panels.flat, itertools.product(directions, passes), strict=True):
        _panel(axes, result, {"dtype": dtype, "causal": causal, "training": training})
    heads = f"{shape['batch'] * shape['heads']} heads of {shape['head_dim']}"
    title_and_legend(figure, f"Time of one attention layer, {heads}, {dtype}, {machine(result['hardware'])}")
    return figure


def _panel(axes: Any, result: Document, labels: dict[str, Any]) -> None:
    from ..results.plots import draw_line, line_style, log_log, mark_crossover

    cells = [cell for cell in cells_of(result, **labels) if cell["kind"] != "limit"]  # which older results hold
    counts = sorted({cell["features"] for cell in cells if cell["features"]})

    def shade(features: int | None) -> float:
        return SHADES[min(counts.index(features), len(SHADES) - 1)] if features else 1.0

    lines: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for cell in cells:
        lines.setdefault((cell["name"], cell["features"]), []).append(cell)
    for (name, features), row in lines.items():
        spreads = [cell["milliseconds"] for cell in row]
        lower, median, upper = ([spread[key] for spread in spreads] for key in ("lower", "median", "upper"))
        label = f"{name}, M = {features}" if features else name
        style = line_style(name) | {"alpha": shade(features), "markersize": 4, "label": label}
        draw_line(axes, [cell["length"] for cell in row], median, (lower, upper), **style)
    axes.set(title=name_of_round(labels["causal"], labels["training"]), xlabel="length (tokens)", ylabel="milliseconds")
    log_log(axes, [length for length in result["lengths"] if math.log2(length).is_integer()] or result["lengths"])
    softmax = {cell["length"]: cell["milliseconds"]["median"] for cell in cells if cell["kind"] == SOFTMAX}
    crossings = [c for c in result["crossovers"] if all(c[key] == value for key, value in labels.items())]
    for number, each in enumerate(c for c in crossings if c["interpolated"]):
        color = line_style(each["attention"])["color"]
        mark_crossover(axes, each["interpolated"], softmax, number, color, shade(each["features"]))
