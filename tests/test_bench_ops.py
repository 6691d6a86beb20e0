"""`bench ops` at toy size: what it counts, compares, checks and writes. Nothing here asserts a time."""

import dataclasses
import json

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from support.commands import QUICK_OPS, failure, run

from hf_rfattn import build_mechanism, results
from hf_rfattn.bench import contenders, devices, ops, peers
from hf_rfattn.bench.break_even import find_crossover
from hf_rfattn.bench.timing import Competitor, interleave, median_ratio, repetitions_apart
from hf_rfattn.results import measured_crossover
from hf_rfattn.results import plots as plotting


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


def crossover_file(folder, name, found, created="2026-11-16T00:00:00+00:00", kind="bench ops", **changes):
    """A result that this machine could have made, with crossovers alone."""
    hardware = results.hardware() | {"threads": 2} | changes
    shared = {"attention": "favor+", "features": 64, "head_dim": 64, "causal": False, "training": False}
    shared |= {"dtype": "float32", "lengths": [128, 16384]}
    document = {"schema_version": results.SCHEMA_VERSION, "kind": kind, "created": created}
    document |= {"hardware": hardware, "crossovers": [shared | each for each in found]}
    results.write_result(document, folder / name)


def test_the_nearest_shape_of_this_machine_is_found(tmp_path, monkeypatch):
    crossover_file(
        tmp_path,
        "ops.json",
        [
            {"length": 384},
            {"features": 256, "length": 1024},
            {"features": 256, "length": 7, "dtype": "bfloat16"},
            {"causal": True, "length": 768},
            {"training": True, "length": None},
            {"attention": "band", "features": 0, "length": 192},
        ],
    )
    crossover_file(tmp_path, "other.json", [{"length": 3, "features": 100}], cpu="Another CPU")
    crossover_file(tmp_path, "gpu.json", [{"length": 3, "features": 100}], device="cuda")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    shape = {"head_dim": 64, "num_features": None, "causal": False, "folder": tmp_path}

    found = find_crossover("favor+", **shape)
    assert found.length == 384
    assert found.source.startswith(f"{tmp_path / 'ops.json'}: ops, favor+, 64 features, heads of 64, bidirectional inf")
    assert results.hardware()["cpu"] in found.source and "128 to 16,384 tokens" in found.source
    assert find_crossover("favor+", **shape | {"num_features": 200}).length == 1024
    assert find_crossover("favor+", **shape | {"num_features": 100}).length == 384
    assert find_crossover("favor+", **shape | {"causal": True}).length == 768
    assert find_crossover("favor+", **shape, training=True).length is None
    assert find_crossover("band", **shape | {"head_dim": 32}).length == 192
    assert find_crossover("rff", **shape) is None

    crossover_file(tmp_path, "earlier.json", [{"length": 5}], created="2026-11-15T00:00:00+00:00")
    assert find_crossover("favor+", **shape).length == 384
    later = {"created": "2026-11-17T00:00:00+00:00"}
    crossover_file(
        tmp_path, "model.json", [{"length": 6}, {"length": 77, "features": 128}], kind="bench model", **later
    )
    assert find_crossover("favor+", **shape).length == 384
    assert find_crossover("favor+", **shape | {"num_features": 128}).length == 77
    crossover_file(tmp_path, "later.json", [{"length": 500}], **later)
    assert find_crossover("favor+", **shape).length == 500


def test_what_is_slow_runs_less_often():
    now = [0.0]
    ran = []

    def spend(name, seconds):
        ran.append(name)
        now[0] += seconds

    costs = {"fast": 0.1, "slow": 1.0, "slowest": 60.0}
    competitors = {name: Competitor(lambda n=name, s=cost: spend(n, s)) for name, cost in costs.items()}
    seconds = interleave(competitors, 12, max_seconds=8, clock=lambda: now[0])
    assert {name: len(own) for name, own in seconds.items()} == {"fast": 12, "slow": 6, "slowest": 3}
    assert len(ran) == 3 + 12 + 6 + 3  # one warm-up each
    assert sorted(ran[3:6]) == ["fast", "slow", "slowest"]  # all of them in the first repetition that counts
    assert [repetitions_apart(100, count, 1) for count in (3, 4, 5, 8, 9)] == [1, 1, 2, 2, 4]


def test_ratios_are_of_repetitions_that_both_ran_in():
    fast, slow = [1, 9, 2, 9, 4, 9, 8, 9], [10, 20, 40, 80]
    assert median_ratio(slow, fast) == 10 and median_ratio(fast, slow) == 0.1
    assert median_ratio([3, 3, 3], [1, 1, 1]) == 3


def favor(causal=False):
    return contenders.mechanism("favor+", build_mechanism("favor+", num_heads=2, head_dim=8), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_passes_its_check(causal, dtype):
    for contender in (favor(causal), contenders.softmax(causal)):
        found = contenders.check(contender, (2, 2, 8), training=True, dtype=dtype)
        assert found["passed"] and 0 < found["deviation"] < found["tolerance"]


def test_what_is_wrong_does_not_pass():
    right = favor()

    def check(attend, training=False):
        return contenders.check(dataclasses.replace(right, attend=attend), (1, 2, 8), training=training)

    assert not check(lambda q, k, v: right.attend(q, k, v) * 1.01)["passed"]
    assert not check(lambda q, k, v: right.attend(k, q, v))["passed"]
    nan = check(lambda q, k, v: right.attend(q, k, v) * torch.nan)
    assert not nan["passed"] and nan["deviation"] is None
    wrong_gradient = lambda q, k, v: right.attend(q, k.detach() + 0 * k, v)  # noqa: E731
    assert check(wrong_gradient)["passed"] and not check(wrong_gradient, training=True)["passed"]
    turned = dataclasses.replace(right, attend=lambda *x: right.attend(*(y.transpose(1, 2) for y in x)).transpose(1, 2))
    assert contenders.check(dataclasses.replace(turned, length_first=True), (1, 2, 8), training=True)["passed"]


def test_a_result_is_complete(result):
    assert result["kind"] == "bench ops" and result["hardware"]["threads"] == 1
    assert result["shape"] == {"batch": 1, "heads": 2, "head_dim": 8} and result["lengths"] == [32, 48, 64]
    assert [(a["name"], a["config"].get("num_features")) for a in result["attention"]] == [
        ("favor+", 8),
        ("favor+", 16),
        ("band", None),
    ]
    cells = [tuple(c[k] for k in ("kind", "name", "features", "dtype", "length")) for c in result["cells"]]
    kinds = [("softmax", "softmax", None), ("mechanism", "band", 0)]
    kinds += [("mechanism", "favor+", count) for count in (8, 16)]
    every = {(*kind, dtype, length) for kind in kinds for dtype in ("float32", "bfloat16") for length in (32, 48, 64)}
    assert set(cells) == every and len(cells) == 4 * len(every)  # two directions, two passes
    for cell in result["cells"]:
        spread = cell["milliseconds"]
        assert 0 < spread["lower"] <= spread["median"] <= spread["upper"] and spread["count"] == 2
        assert ("speed_over_softmax" in cell) == (cell["kind"] != "softmax")
        assert "speed_over_peers" not in cell
    assert all(check["passed"] and check["deviation"] < check["tolerance"] for check in result["checks"])
    assert len(result["checks"]) == 4 * 8  # softmax and three mechanisms, two types, two directions, two passes
    assert result["neighbours"]["runs"] == 2 * len(cells) and result["peers"] is False
    found = {(c["attention"], c["features"], c["causal"], c["training"], c["dtype"]) for c in result["crossovers"]}
    assert len(found) == len(result["crossovers"]) == 3 * 8


def test_crossovers_are_those_of_the_cells(result):
    for found in result["crossovers"]:
        wanted = {"name": found["attention"], "kind": "mechanism"}
        wanted |= {key: found[key] for key in ("features", "causal", "training", "dtype")}
        cells = ops.cells_of(result, **wanted)
        speeds = [cell["speed_over_softmax"] for cell in cells]
        assert found["lengths"] == [32, 48, 64] and found["head_dim"] == 8
        assert (found["length"], found["interpolated"]) == measured_crossover([32, 48, 64], speeds)
    shape = {"head_dim": 8, "num_features": 8, "causal": True, "folder": result["output"]}
    assert find_crossover("favor+", **shape).source.startswith(str(result["output"] / "ops.json"))


def test_tables_and_plots_need_the_document_alone(result):
    document = json.loads((result["output"] / "ops.json").read_text())
    blocks = ops.report(document, "ops")
    tables = [block for block in blocks if isinstance(block, results.Table)]
    assert [len(table.rows) for table in tables] == [3 * 4] * 2  # three mechanisms in four kinds of round, by dtype
    assert [block.name for block in blocks if isinstance(block, results.Image)] == ["ops.png", "ops_bfloat16.png"]
    figure = ops.plot(document, "bfloat16")
    panel = figure.axes[3]
    assert len(figure.axes) == 4 and panel.get_xscale() == panel.get_yscale() == "log"
    lines = {line.get_label(): line for line in panel.lines}
    softmax = ops.cells_of(document, kind="softmax", dtype="bfloat16", causal=True, training=True)
    assert list(lines["softmax"].get_ydata()) == [cell["milliseconds"]["median"] for cell in softmax]
    assert "favor+, M = 16" in lines
    for name in ("ops.png", "ops_bfloat16.png"):
        assert (result["output"] / name).read_bytes().startswith(b"\x89PNG")
        assert name in result["text"]
    for text in ("causal, forward and backward, bfloat16", "favor+, M = 16", "Softmax is the better choice"):
        assert text in result["text"]


def test_a_crossover_is_marked_where_the_lines_cross():
    shared = {"causal": False, "training": False, "dtype": "float32"}
    cells = []
    for length, softmax, own in ((128, 1, 4), (512, 16, 8), (2048, 256, 32)):
        for kind, name, features, time in (("softmax", "softmax", None, softmax), ("mechanism", "favor+", 64, own)):
            spread = {"median": time, "lower": time, "upper": time, "count": 3}
            cells.append({"kind": kind, "name": name, "features": features, "length": length, **shared})
            cells[-1] |= {"milliseconds": spread, "speed_over_softmax": softmax / time}
    length, interpolated = measured_crossover([128, 512, 2048], [1 / 4, 2, 8])
    assert (length, interpolated) == (512, 323)
    crossing = {"attention": "favor+", "features": 64, "length": length, "interpolated": interpolated, **shared}
    document = {"cells": cells, "crossovers": [crossing | {"lengths": [128, 512, 2048]}], "lengths": [128, 512, 2048]}
    document |= {"causal": [False], "training": [False], "hardware": results.hardware()}
    document |= {"shape": {"batch": 1, "heads": 12, "head_dim": 64}}
    panel = ops.plot(document, "float32").axes[0]
    ring = next(line for line in panel.lines if line.get_fillstyle() == "none")
    assert ring.get_xdata()[0] == 323 and ring.get_ydata()[0] == pytest.approx(6.35, rel=0.01)
    assert [text.get_text() for text in panel.texts] == ["323"]


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


def test_what_fails_its_check_is_reported_and_not_timed(monkeypatch, tmp_path):
    def wrong(name, module, causal):
        right = contenders.mechanism(name, module, causal)
        if module.config.name != "linear":
            return right
        return dataclasses.replace(right, attend=lambda q, k, v: 2 * right.attend(q, k, v))

    monkeypatch.setattr(ops, "mechanism", wrong)
    asked = ("--lengths", 32, "--dtypes", "float32", "--directions", "causal", "--passes", "forward")
    text = run("bench", "ops", *asked, "--attention", "linear,band", *QUICK_OPS, "--output", tmp_path)
    found = json.loads((tmp_path / "ops.json").read_text())
    assert {cell["name"] for cell in found["cells"]} == {"softmax", "band"}
    assert [check["name"] for check in found["checks"] if not check["passed"]] == ["linear"]
    assert "Not timed: differs from its definition" in text and found["causal"] == [True]


def test_peers_that_are_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "PACKAGES", {"no-such-peer": "no_such_peer"})
    message = failure("bench", "ops", "--peers", "--output", tmp_path / "none")
    assert "has no no-such-peer" in message and "`make peers`" in message
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("causal", [False, True])
def test_peers_agree_with_our_definition(causal):
    pytest.importorskip("performer_pytorch", reason="needs the environment of `make peers`")
    pytest.importorskip("fast_transformers")
    found = peers.peers(2, 8, 16, causal)
    assert [peer.name for peer in found] == (peers.NAMES[1:] if causal else peers.NAMES)
    for peer in found:
        assert contenders.check(peer, (2, 2, 8), training=True)["passed"]


def test_products_that_end_the_process_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "_PRODUCT", "import os; os.kill(os.getpid(), 4)")
    with pytest.raises(ValueError, match=r"exit code -4.*ONEDNN_MAX_CPU_ISA"):
        devices.check_bfloat16_products()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--lengths", "0"), "--lengths '0' must be whole numbers"),
        (("--attention", "favr"), "Unknown attention 'favr'"),
        (("--dtypes", "float8"), "dtype 'float8' is not possible; choose one of float32, bfloat16, float16."),
        (("--directions", "sideways"), "--directions 'sideways' is not possible; choose from bidirectional, causal."),
        (("--device", "abacus"), "device 'abacus' is not possible here."),
    ],
)
def test_mistakes(tmp_path, arguments, message):
    assert message in failure("bench", "ops", "--output", tmp_path / "none", *arguments)
    assert not (tmp_path / "none").exists()
