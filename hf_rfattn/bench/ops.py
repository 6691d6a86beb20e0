"""One attention layer by length: mechanisms against softmax.

A round has one direction, one pass, one dtype and one length; everything in it is interleaved. "forward" is a forward
pass without gradients; "training" is a forward and a backward pass to q, k, v (and to what the mechanism learns).
"""

import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..mechanisms import Mechanism, MechanismConfig, build_mechanism
from ..results import (
    SOFTMAX,
    Block,
    Image,
    Table,
    crossover_text,
    load_average,
    machine,
    new_result,
    rounded,
    times,
)
from .devices import DTYPES, check_device, check_dtype
from .loading import named_configs
from .settings import OpsSettings
from .timing import Competitor, Spread, crossovers, interleave, median_ratio, synchroniser, threads

WARMUP = 1  # repetitions
SHADES = (1.0, 0.6, 0.35)  # of lines with more and more features

Document = dict[str, Any]
Key = tuple[str, str, int | None]  # kind ("softmax" or "mechanism"), name, number of features


def configs(settings: OpsSettings) -> list[tuple[str, MechanismConfig]]:
    """Every mechanism with every number of features."""
    found = []
    for name, config in named_configs(settings.attention or ["favor+"]).items():
        if any(field.name == "num_features" for field in fields(config)):
            found += [(name, config.replace(num_features=count)) for count in settings.features]
        else:
            found.append((name, config))
    return found


def measure(settings: OpsSettings, progress: Callable[[float, str], Any] = lambda share, doing: None) -> Document:
    """The result document. `progress` is called with the share of the work that is done and what is being done."""
    check_device(settings.device)
    for dtype in settings.dtypes:
        check_dtype(dtype, settings.device)
    named, started = configs(settings), time.perf_counter()
    shape = {"num_heads": settings.heads, "head_dim": settings.head_dim}
    cells: list[dict[str, Any]] = []
    with threads(settings.threads), torch.random.fork_rng():
        result = new_result("bench ops", seed=settings.seed, device=settings.device)
        mechanisms: dict[Key, Mechanism] = {}
        for name, config in named:
            module = build_mechanism(config, **shape, seed=settings.seed).to(settings.device).eval()
            mechanisms["mechanism", name, module.num_features] = module
        rounds = list(itertools.product(settings.directions, settings.passes, settings.dtypes, settings.lengths))
        work = [length * (length + 4096) * (3 if training else 1) for _, training, _, length in rounds]
        for number, (causal, training, dtype, length) in enumerate(rounds):
            progress(sum(work[:number]) / sum(work), f"{name_of_round(causal, training, dtype)}, {length:,} tokens")
            cells += _measure_round(mechanisms, settings, causal, training, dtype, length)
    return {
        **result,
        "environment": {name: os.environ[name] for name in ("ONEDNN_MAX_CPU_ISA",) if name in os.environ},
        "shape": {"batch": settings.batch, "heads": settings.heads, "head_dim": settings.head_dim},
        "attention": [{"name": name, "config": config.to_dict()} for name, config in named],
        "lengths": list(settings.lengths),
        "dtypes": list(settings.dtypes),
        "causal": list(settings.directions),
        "training": list(settings.passes),
        "repetitions": settings.repetitions,
        "warmup": WARMUP,
        "max_seconds": settings.max_seconds,
        "cells": cells,
        "crossovers": crossovers([c for c in cells if c["kind"] == "mechanism"], settings.head_dim),
        "load_average_end": load_average(),
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }


def name_of_round(causal: bool, training: bool, dtype: str | None = None) -> str:
    text = f"{'causal' if causal else 'bidirectional'}, {'forward and backward' if training else 'forward'}"
    return text if dtype is None else f"{text}, {dtype}"


def _measure_round(
    mechanisms: dict[Key, Mechanism], settings: OpsSettings, causal: bool, training: bool, dtype: str, length: int
) -> list[dict[str, Any]]:
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    shape = settings.batch, settings.heads, length, settings.head_dim
    tensors = [
        torch.randn(shape, generator=generator, device=settings.device).to(DTYPES[dtype]) for _ in range(4)
    ]  # q, k, v, and the gradient of the output
    softmax = SOFTMAX, SOFTMAX, None
    attend = partial(scaled_dot_product_attention, is_causal=causal)
    competitors: dict[Key, Competitor] = {softmax: competitor(attend, tensors, [], training)}
    for key, module in mechanisms.items():
        attend = partial(module, causal=causal)
        competitors[key] = competitor(attend, tensors, list(module.parameters()), training)
    seconds = interleave(
        competitors,
        settings.repetitions,
        warmup=WARMUP,
        seed=settings.seed,
        max_seconds=settings.max_seconds,
        synchronise=synchroniser(torch.device(settings.device)),
    )
    cells = []
    for key, own in seconds.items():
        cell: dict[str, Any] = dict(zip(("kind", "name", "features"), key, strict=True))
        cell |= {"causal": causal, "training": training, "dtype": dtype, "length": length}
        cell |= {"milliseconds": Spread.of([1000 * s for s in own]).to_dict()}
        ratio = {} if key == softmax else {"speed_over_softmax": rounded(median_ratio(seconds[softmax], own))}
        cells.append(cell | ratio)
    return cells


def competitor(
    attend: Callable[..., Tensor], tensors: list[Tensor], parameters: list[Tensor], training: bool
) -> Competitor:
    """A forward pass, or both passes, on copies of q, k, v and with the gradient of the output."""
    q, k, v = (x.detach().requires_grad_(training) for x in tensors[:3])

    @torch.no_grad()
    def infer() -> None:
        attend(q, k, v)

    def train() -> None:
        attend(q, k, v).backward(tensors[3])

    def forget() -> None:
        for tensor in (q, k, v, *parameters):
            tensor.grad = None

    return Competitor(train, forget) if training else Competitor(infer)


def cells_of(result: Document, **labels: Any) -> list[dict[str, Any]]:
    """Cells with these labels, by length."""
    found = [cell for cell in result["cells"] if all(cell[name] == value for name, value in labels.items())]
    return sorted(found, key=lambda cell: cell["length"])


def report(result: Document, name: str) -> list[Block]:
    """Speed over softmax with break-even lengths, and a plot, for each dtype."""
    what = "Time of one attention layer by length, log-log, with the lengths where mechanisms cross softmax"
    blocks: list[Block] = []
    for number, dtype in enumerate(result["dtypes"]):
        file = f"{name}_{dtype}.png" if number else f"{name}.png"
        blocks += [speed_table(result, dtype, milliseconds=True), Image(file, what, partial(plot, result, dtype))]
    return blocks


def speed_table(
    result: Document,
    dtype: str,
    lengths: list[int] | None = None,
    features: int | None = None,
    milliseconds: bool = False,
) -> Table:
    """Speed over softmax by length and the break-even length; of mechanisms with so many `features`, if given."""
    lengths = lengths or result["lengths"]
    rows = []
    for each in result["crossovers"]:
        if each["dtype"] != dtype or (features and each["features"] and each["features"] != features):
            continue
        labels = {key: each[key] for key in ("features", "causal", "training", "dtype")}
        cells = {c["length"]: c for c in cells_of(result, kind="mechanism", name=each["attention"], **labels)}
        what = f"{each['attention']}, M = {each['features']}" if each["features"] else each["attention"]
        row = []
        for length in lengths:
            text = times(cells[length]["speed_over_softmax"] if length in cells else None)
            median = f", {cells[length]['milliseconds']['median']:,.3g} ms" if milliseconds and length in cells else ""
            row.append(text + median)
        rows.append([name_of_round(each["causal"], each["training"]), what, *row, crossover_text(each)])
    headings = ["", "", *(f"{length:,} tokens" for length in lengths), "faster from (break-even)"]
    return Table(f"Speed over softmax, {dtype}", headings, rows, aligned=False)


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

    cells = [cell for cell in cells_of(result, **labels) if cell["kind"] in (SOFTMAX, "mechanism")]
    counts = sorted({cell["features"] for cell in cells if cell["features"]})

    def shade(features: int | None) -> float:
        return SHADES[min(counts.index(features), len(SHADES) - 1)] if features else 1.0

    for name, features in dict.fromkeys((cell["name"], cell["features"]) for cell in cells):
        row = [cell for cell in cells if (cell["name"], cell["features"]) == (name, features)]
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
