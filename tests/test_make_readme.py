"""The parts of README.md that are made from result files."""

import importlib.util
import json
from pathlib import Path

import pytest
from test_bench_ops import QUICK as QUICK_OPS
from test_cli import run

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def make_readme():
    spec = importlib.util.spec_from_file_location("make_readme", ROOT / "recipes" / "make_readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_is_what_the_results_say(make_readme):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert make_readme.fill(text, make_readme.read_documents(ROOT / "recipes" / "results")) == text, "run `make readme`"


def test_everything_in_the_speed_part_comes_from_results(make_readme, tmp_path):
    """A run of each benchmark; plots are drawn once, and the second time nothing changes."""
    folder = tmp_path / "results"
    asked = ("--lengths", "32,64", "--features", "8", "--dtypes", "float32")
    run("bench", "ops", *asked, *QUICK_OPS, "--output", folder)
    plot = folder / "ops.png"
    plot.unlink()
    document = json.loads((folder / "ops.json").read_text())
    for crossing, length in zip(document["crossovers"], (None, 32, 64, 64), strict=True):
        crossing |= {"length": length, "interpolated": 45 if length == 64 else None}
    document["cells"][1] |= {"speed_over_softmax": 12.345, "speed_over_peers": {"performer-pytorch": 3.21}}
    bar = {"what": "to fly", "value": 1.25, "relation": "at least", "bound": 2, "unit": "m", "met": False, "where": "a"}
    check = {"kind": "peer", "name": "performer-pytorch", "magnitude": 0.25, "tolerance": 0.01, "passed": True}
    check |= {"deviation_at_magnitude_1": 0.5}
    with_peers = document | {"peers": True, "bars": [bar], "checks": [check]}
    (folder / "ops.json").write_text(json.dumps(document))
    (folder / "peers.json").write_text(json.dumps(with_peers))
    readme = tmp_path / "README.md"
    compared = "".join(f"<!-- {name}:start -->\n<!-- {name}:end -->\n" for name in ("pictures", "guide", "accuracy"))
    readme.write_text(f"{compared}before\n<!-- speed:start -->\nold\n<!-- speed:end -->\nafter\n")

    make_readme.main(readme, folder)
    text = readme.read_text()
    assert "before\n<!-- speed:start -->\n**One" in text and text.endswith("\n<!-- speed:end -->\nafter\n")
    assert document["hardware"]["cpu"] in text and "1 thread, torch" in text
    assert "| bidirectional, forward, float32 | favor+, M = 8 | 12.3 × |" in text
    assert "| bidirectional, forward, M = 8 | performer-pytorch | 3.21 × | – |" in text
    assert "`favor+` with M = 8 at every length measured (up to 64)" in text
    assert "`favor+` with M = 8 at no length measured (from 32 on)" in text
    assert "(causal, forward, float32) over `favor+` with M = 8 below about 45 tokens" in text
    assert "0 of 1 met" in text and "| to fly | ≥ 2 m | 1.25 m | a | not met |" in text
    assert "performer-pytorch is off by 50 %" in text
    assert plot.read_bytes().startswith(b"\x89PNG") and (folder / "peers.png").exists()

    written = plot.stat().st_mtime_ns, readme.stat().st_mtime_ns
    make_readme.main(readme, folder)
    assert (plot.stat().st_mtime_ns, readme.stat().st_mtime_ns) == written


def test_nothing_measured_and_markers_that_are_missing(make_readme):
    marked = "".join(f"<!-- {name}:start -->\n<!-- {name}:end -->\n" for name, _ in make_readme.SECTIONS)
    filled = make_readme.fill(marked, {})
    assert "Nothing has been measured yet." in filled and "Nothing has been compared yet." in filled
    with pytest.raises(ValueError, match="must have <!-- pictures:start -->"):
        make_readme.fill("no markers", {})
