"""`bench ops` at toy size: what it counts, compares, checks and writes. Nothing here asserts a time."""

import pytest

from hf_rfattn.bench import results
from hf_rfattn.bench.crossover import find_crossover, measured_crossover


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


def crossover_file(folder, name, found, created="2026-11-16T00:00:00+00:00", **changes):
    """A result that this machine could have made, with crossovers alone."""
    hardware = results.hardware() | {"threads": 2} | changes
    shared = {"attention": "favor+", "features": 64, "head_dim": 64, "causal": False, "training": False}
    shared |= {"dtype": "float32", "lengths": [128, 16384]}
    document = {"schema_version": results.SCHEMA_VERSION, "kind": "bench ops", "created": created}
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
    assert found.length == 384 and found.threads == 2
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
    crossover_file(tmp_path, "later.json", [{"length": 500}], created="2026-11-17T00:00:00+00:00")
    assert find_crossover("favor+", **shape).length == 500

    monkeypatch.chdir(tmp_path)
    assert find_crossover("favor+", **shape | {"folder": None}) is None
    (tmp_path / "bench_out").mkdir()
    (tmp_path / "later.json").rename(tmp_path / "bench_out" / "ops.json")
    assert find_crossover("favor+", **shape | {"folder": None}).length == 500
