"""`bench ops` at toy size: what it times and writes. Nothing here asserts a time."""

import json
from itertools import pairwise

import matplotlib.text
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from support.commands import QUICK_OPS, failure, run

from hf_rfattn import build_mechanism
from hf_rfattn.bench import ops
from hf_rfattn.bench.measuring import Competitor, interleave, median_ratio
from hf_rfattn.bench.report import cells_of, report, rows_of, speed_table, speeds_of
from hf_rfattn.results import documents
from hf_rfattn.results import plots as plotting
from hf_rfattn.results.report import measured_crossover


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """One run with two mechanisms, of which one has features to choose, through the command line."""
    output = tmp_path_factory.mktemp("bench") / "new"
    asked = ("--lengths", "64,32,48", "--features", "16,8", "--attention", "performer,band")
    text = run("bench", "ops", *asked, *QUICK_OPS, "--output", output)
    return json.loads((output / "ops.json").read_text()) | {"text": text, "output": output}


@pytest.mark.parametrize(
    "speeds, length, interpolated",
    [
        ([0.25, 0.5, 2, 4], 512, 362),  # halfway between 256 and 512 on the logarithmic axis
        ([0.25, 0.5, 1, 4], 1024, 512),  # as fast is not faster
        ([2, 3, 4, 5], 128, None),
        ([2, 0.5, 2, 4], 512, 362),  # faster once is not enough
        ([2, 2, 2, 0.9], None, None),
    ],
)
def test_crossover_is_where_it_stays_faster(speeds, length, interpolated):
    assert measured_crossover([128, 256, 512, 1024], speeds) == (length, interpolated)
    assert measured_crossover([1024, 512, 256, 128], speeds[::-1]) == (length, interpolated)


def test_what_is_slow_runs_less_often():
    now = [0.0]
    ran = []

    def spend(name, seconds):
        ran.append(name)
        now[0] += seconds

    costs = {"fast": 0.1, "slow": 1.0, "slowest": 60.0}
    competitors = {name: Competitor(lambda n=name, s=cost: spend(n, s)) for name, cost in costs.items()}
    seconds = interleave(competitors, 12, max_seconds=8, clock=lambda: now[0])
    assert {name: len(own) for name, own in seconds.items()} == {"fast": 12, "slow": 8, "slowest": 2}
    assert len(ran) == 3 + 12 + 8 + 2  # one warm-up each
    assert sorted(ran[3:6]) == ["fast", "slow", "slowest"]  # all of them in the first repetition that counts


def test_ratios_are_of_repetitions_that_both_ran_in():
    fast, slow = [1, 2, 4, 8, 9, 9, 9], [10, 20, 40, 80]
    assert median_ratio(slow, fast) == 10 and median_ratio(fast, slow) == 0.1
    assert median_ratio([3, 3, 3], [1, 1, 1]) == 3


@pytest.mark.parametrize("training", [False, True])
def test_both_passes_are_timed_when_asked(training):
    mechanism = build_mechanism("hedgehog", num_heads=2, head_dim=8)
    tensors = [torch.randn(1, 2, 16, 8) for _ in range(4)]
    parameters, queries = list(mechanism.parameters()), []

    def attend(q, k, v):
        queries.append(q)
        assert q.requires_grad == torch.is_grad_enabled() == training
        return mechanism(q, k, v)

    timed = ops.competitor(attend, tensors, parameters, training)
    for _ in range(2):
        timed.prepare()
        assert all(tensor.grad is None for tensor in (*parameters, *queries))
        timed.run()
        assert all((tensor.grad is not None) == training for tensor in (*parameters, queries[-1]))
    assert tensors[0].grad is None


def test_a_result_is_complete(result):
    assert result["kind"] == "bench ops" and result["hardware"]["threads"] == 1
    assert result["shape"] == {"batch": 1, "heads": 2, "head_dim": 8} and result["settings"]["lengths"] == [32, 48, 64]
    assert [(a["name"], a["config"].get("num_features")) for a in result["attention"]] == [
        ("favor+", 8),
        ("favor+", 16),
        ("band", None),
    ]
    cells = [tuple(c[k] for k in ("attention", "features", "path", "dtype", "length")) for c in result["cells"]]
    kinds = [("softmax", None), ("band", 0), ("favor+", 8), ("favor+", 16)]
    every = {(*kind, "torch", "float32", length) for kind in kinds for length in (32, 48, 64)}
    assert set(cells) == every and len(cells) == 4 * len(every)  # two directions, two passes
    for cell in result["cells"]:
        spread = cell["milliseconds"]
        assert 0 < spread["lower"] <= spread["median"] <= spread["upper"] and spread["count"] == 2
        assert cell["speed_over_softmax"] == 1 or cell["attention"] != "softmax"


def test_tables_and_plots_need_the_document_alone(result):
    document = json.loads((result["output"] / "ops.json").read_text())
    table, image = report(document, "ops")
    assert len(table.rows) == 4 * 4 and image.name == "ops.png"  # softmax and three mechanisms in four kinds of round
    figure = image.draw()
    panel = figure.axes[3]
    assert len(figure.axes) == 4 and panel.get_xscale() == panel.get_yscale() == "log"
    lines = {line.get_label(): line for line in panel.lines}
    softmax = [c for c in cells_of(document) if c["attention"] == "softmax" and c["causal"] and c["training"]]
    assert list(lines["softmax"].get_ydata()) == [cell["milliseconds"]["median"] for cell in softmax]
    assert "favor+, M = 16" in lines
    assert (result["output"] / "ops.png").read_bytes().startswith(b"\x89PNG") and "ops.png" in result["text"]
    for text in ("causal,", "favor+, M = 16", "Speed over softmax", "break-even"):
        assert text in result["text"]
    brief = speed_table(document, [32, 64, 100])
    assert [row[1] for row in brief.rows] == ["favor+, M = 8", "band"] * 2 and len(brief.headings) == 5
    assert "ms" not in str(brief.rows) and brief.rows[0][-1] == table.rows[1][-1]


def made_up():
    """A document in which favor+ crosses softmax between 128 and 512."""
    shared = {"causal": False, "training": False, "dtype": "float32", "path": "torch"}
    cells = []
    for length, softmax, own in ((128, 1, 4), (512, 16, 8), (2048, 256, 32)):
        for name, features, time in (("softmax", None, softmax), ("favor+", 64, own)):
            spread = {"median": time, "lower": time, "upper": time, "count": 3}
            cells.append({"attention": name, "features": features, "length": length, **shared})
            cells[-1] |= {"milliseconds": spread, "speed_over_softmax": softmax / time}
    shape = {"batch": 1, "heads": 12, "head_dim": 64}
    return {"kind": "bench ops", "cells": cells, "hardware": documents.hardware(), "shape": shape}


def test_a_crossover_is_marked_where_the_lines_cross():
    document = made_up()
    ((_, _), (name, row)) = rows_of(document)
    assert measured_crossover(*speeds_of(row)) == (512, 323)
    table, image = report(document, "ops")
    assert table.rows[1] == [name, "favor+, M = 64", "0.25 ×, 4 ms", "2.00 ×, 8 ms", "8.00 ×, 32 ms", "512 (323)"]
    panel = image.draw().axes[0]
    ring = next(line for line in panel.lines if line.get_fillstyle() == "none")
    assert ring.get_xdata()[0] == 323 and ring.get_ydata()[0] == pytest.approx(6.35, rel=0.01)
    assert [text.get_text() for text in panel.texts] == ["323"]


def test_break_even_labels_do_not_overlap_each_other_or_the_lines():
    lengths, marks = [1024, 4096, 16384], [1037, 1103, 1107, 1598, 1727]
    lines = [plotting.Line("softmax", lengths, [30, 50, 300]), plotting.Line("favor+", lengths, [30, 28, 28])]
    panel = plotting.Panel("", "length", "ms", lines, break_even=[(length, "favor+") for length in marks])
    figure = plotting.draw("", [[panel]])
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw(renderer)
    (axes,) = figure.axes
    boxes = [matplotlib.text.Text.get_window_extent(text, renderer) for text in axes.texts]
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))
    assert axes.bbox.x0 < boxes[0].x0 and boxes[-1].x1 < axes.bbox.x1
    assert max(box.y1 for box in boxes) < axes.transData.transform((1024, 28))[1]


@pytest.mark.parametrize("processor", ["CPU", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, of a virtual machine"])
@pytest.mark.parametrize("panels", [1, 2])
def test_title_and_legend_are_no_wider_than_the_figure(processor, panels):
    figure = Figure(figsize=(5.6 * panels, 5.4), layout="constrained")
    for i, axes in enumerate(figure.subplots(1, 8)):
        axes.plot([1, 2], [1, 2], label=f"a line of a benchmark, M = {2**i}")
    title = f"Time of one attention layer, 12 heads of 64, bfloat16, {processor}, 2 threads"
    plotting.title_and_legend(figure, title)
    renderer = FigureCanvasAgg(figure).get_renderer()
    (legend,) = figure.legends
    for part in (figure._suptitle, legend):
        assert part.get_window_extent(renderer).width <= figure.bbox.width
    assert " ".join(figure.get_suptitle().split()) == title and len(legend.get_texts()) == 8


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--lengths", "0"), "--lengths '0' must be positive integers"),
        (("--attention", "favr"), "Unknown attention 'favr'"),
        (("--dtype", "float8"), "Unknown dtype 'float8'; choose one of float32, bfloat16, float16."),
        (("--directions", "sideways"), "--directions: unknown value 'sideways'; choose from bidirectional, causal."),
        (("--device", "abacus"), "The device 'abacus' is not available."),
    ],
)
def test_mistakes(tmp_path, arguments, message):
    assert message in failure("bench", "ops", "--output", tmp_path / "none", *arguments)
    assert not (tmp_path / "none").exists()
