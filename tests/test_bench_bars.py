"""What a run of `bench ops` shows of the bars, and what it says where one is not met."""

import pytest

from hf_rfattn.bench import bars


def cell(length, features=64, causal=False, training=False, **ratios):
    time = {"median": float(length), "lower": 1.0, "upper": 1.0, "count": 3}
    labels = {"kind": "mechanism", "name": "favor+", "features": features, "causal": causal, "training": training}
    return labels | {"dtype": "float32", "length": length, "milliseconds": time, "speed_over_softmax": 1.0} | ratios


def bars_of(cells=(), crossovers=(), memory=(), threads=2, heads=12):
    document = {"shape": {"batch": 1, "heads": heads, "head_dim": 64}, "hardware": {"threads": threads}}
    document["hardware"]["device"] = "cpu"
    document |= {"cells": list(cells), "crossovers": list(crossovers), "memory": list(memory)}
    return {bar["what"]: bar for bar in bars.bars(document)}


def test_bars_are_the_worst_of_what_was_measured():
    found = bars_of(
        [
            cell(512, speed_over_peers={"performer-pytorch": 0.1}, time_over_limit=9.0),  # too short to count
            cell(1024, speed_over_peers={"performer-pytorch": 2.0, "fast-transformers": 1.6}, time_over_limit=1.5),
            cell(4096, speed_over_peers={"performer-pytorch": 1.9, "fast-transformers": 1.4}, time_over_limit=1.7),
            cell(8192, speed_over_softmax=16.0),
            cell(8192, causal=True, speed_over_softmax=5.0),
            cell(16384, features=256, time_over_limit=2.1),
            cell(16384),
        ]
    )
    assert len(found) == 20
    bar = found["speed over performer-pytorch, bidirectional forward, M = 64, L ≥ 1,024"]
    assert bar["value"] == 1.9 and bar["met"] is True
    assert bar["where"] == "M = 64, L = 4,096; its matrix products alone would give 3.23 ×"
    assert found["speed over fast-transformers, bidirectional forward, M = 64, L ≥ 1,024"]["met"] is False
    assert found["speed over fast-transformers, causal forward, M = 64, L ≥ 1,024"]["met"] is None
    assert found["speed over softmax, bidirectional forward, M = 64, L = 8,192"]["met"] is True
    assert found["speed over softmax, causal forward, M = 64, L = 8,192"]["met"] is False
    limit = found["time over that of the matrix products alone, bidirectional forward, L ≥ 1,024"]
    assert (limit["value"], limit["met"], limit["where"]) == (2.1, False, "M = 256, L = 16,384")
    bounded = bars_of([cell(2048, time_over_limit=2.5, shares={"products": 0.4, "exponentials": 0.25})])
    told = bounded["time over that of the matrix products alone, bidirectional forward, L ≥ 1,024"]["where"]
    assert told == (
        "M = 64, L = 2,048; of its time: products 40 %, exponentials 25 %, "
        "the rest (passes over features, waiting) 35 %"
    )
    again = bars_of([cell(2048, training=True, time_over_limit=2.5, shares={"products": 0.4})])
    told = again["time over that of the matrix products alone, bidirectional forward and backward, L ≥ 1,024"]["where"]
    assert told.endswith("(passes over features, products that backward computes again, waiting) 60 %")
    slow = cell(16384, shares={"fresh memory": 0.2}) | {"milliseconds": {"median": 5.0 * 4096}}
    grown = bars_of([cell(4096, shares={"fresh memory": 0.01}), slow])
    growth = grown["growth of time from 4,096 to 16,384 tokens, bidirectional forward, M = 64"]
    assert growth["met"] is False
    assert growth["where"] == "fetching fresh memory for the results takes 1 % at 4,096 and 20 % at 16,384 tokens"
    growth = found["growth of time from 4,096 to 16,384 tokens, bidirectional forward, M = 64"]
    assert growth["value"] == 4 and growth["met"] is True
    assert bars_of(threads=1) == {} and bars_of(heads=8) == {}


@pytest.mark.parametrize(
    "length, interpolated, value, met",
    [(384, 300, 384, True), (512, 400, 512, False), (None, None, None, False), (512, None, None, None)],
)
def test_bars_of_crossovers(length, interpolated, value, met):
    found = {"attention": "favor+", "features": 64, "causal": False, "training": False, "dtype": "float32"}
    found |= {"length": length, "interpolated": interpolated, "lengths": [512, 1024]}
    bar = bars_of(crossovers=[found])["crossover with softmax, bidirectional forward, M = 64"]
    assert (bar["value"], bar["met"], bar["bound"]) == (value, met, 384)


def test_bars_of_memory():
    row = {"name": "favor+", "features": 64, "causal": True, "length": 65536}
    what = "memory of a training step of one causal layer, M = 64, L = 65,536"
    bar = bars_of(memory=[row | {"step_bytes": 3 * 10**9, "peak_bytes": 3500 * 10**6}])[what]
    assert (bar["value"], bar["met"], bar["where"]) == (3, True, "the whole process 3.50 GB")
    assert bars_of(memory=[row | {"skipped": "no memory"}])[what]["met"] is None
