"""The parts of README.md and of the page of results that are made from result files."""

import json
import re
import shutil
from pathlib import Path

import make_readme
import pytest
from readme import studies
from readme.guide import guide
from readme.pages import Page
from support.commands import QUICK_OPS, run

from hf_rfattn.results import as_markdown
from hf_rfattn.study import STUDIES

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", make_readme.PAGES, ids=str)
def test_pages_are_what_the_results_say(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    found = make_readme.read_documents(ROOT / make_readme.RESULTS)
    assert make_readme.fill(text, found, *make_readme.PAGES[name]) == text, "run `make readme`"


def test_plots_are_those_of_the_results(tmp_path):
    folder = ROOT / make_readme.RESULTS
    for path in folder.glob("**/*.png"):
        (tmp_path / path.relative_to(folder)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(folder))
    assert make_readme.draw_plots(make_readme.read_documents(folder), tmp_path) == [], "run `make readme`"


def test_everything_in_the_speed_part_comes_from_results(tmp_path):
    """A run of each benchmark; plots are drawn once, and the second time nothing changes."""
    folder = tmp_path / make_readme.RESULTS
    asked = ("--lengths", "32,64", "--features", "8", "--dtypes", "float32")
    run("bench", "ops", *asked, *QUICK_OPS, "--output", folder)
    plot = folder / "ops.png"
    plot.unlink()
    document = json.loads((folder / "ops.json").read_text())
    for crossing, length in zip(document["crossovers"], (None, 32, 64, 64), strict=True):
        crossing |= {"length": length, "interpolated": 45 if length == 64 else None}
    document["cells"][1] |= {"speed_over_softmax": 12.345, "speed_over_peers": {"performer-pytorch": 3.21}}
    check = {"kind": "peer", "name": "performer-pytorch", "magnitude": 0.25, "tolerance": 0.01, "passed": True}
    check |= {"deviation_at_magnitude_1": 0.5}
    with_peers = document | {"peers": True, "checks": [check]}
    (folder / "ops.json").write_text(json.dumps(document))
    (folder / "peers.json").write_text(json.dumps(with_peers))
    for name, (_, parts) in make_readme.PAGES.items():
        marked = "".join(f"before\n<!-- {part}:start -->\nold\n<!-- {part}:end -->\nafter\n" for part in parts)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(marked)

    make_readme.main(tmp_path)
    readme, page, _ = ((tmp_path / name).read_text() for name in make_readme.PAGES)
    assert "before\n<!-- speed:start -->\n**One" in page and "\n<!-- speed:end -->\nafter\n" in page
    for text in (readme, page):
        assert "old" not in text and document["hardware"]["cpu"] in text and "1 thread, torch" in text
        assert "| bidirectional, forward, float32 | favor+, M = 8 | 12.3 × |" in text
    assert "| bidirectional, forward, M = 8 | performer-pytorch | 3.21 × | – |" in page
    assert "`favor+` with M = 8 at every length measured (up to 64)" in page
    assert "`favor+` with M = 8 at no length measured (from 32 on)" in page
    assert "(causal, forward, float32) over `favor+` with M = 8 below about 45 tokens" in page
    assert "](ops.png)" in page
    assert "performer-pytorch is off by 50 %" in page
    assert (
        "3.21 × to 3.21 × that of performer-pytorch, from the worst" in readme
        and "(recipes/results/ops.json)" in readme
    )
    assert plot.read_bytes().startswith(b"\x89PNG") and (folder / "peers.png").exists()

    assert make_readme.mark_of(plot)
    written = [plot, *(tmp_path / name for name in make_readme.PAGES)]
    before = [path.stat().st_mtime_ns for path in written]
    make_readme.main(tmp_path)
    assert [path.stat().st_mtime_ns for path in written] == before


def test_nothing_measured_and_markers_that_are_missing():
    for page, parts in make_readme.PAGES.values():
        marked = "".join(f"<!-- {part}:start -->\n<!-- {part}:end -->\n" for part in parts)
        filled = make_readme.fill(marked, {}, page, parts)
        assert all(f"<!-- {part}:start -->\nNothing has been " in filled for part in parts)
        with pytest.raises(ValueError, match="must have <!-- "):
            make_readme.fill("no markers", {}, page, parts)


def test_every_study_is_told():
    assert list(studies.STUDIES) == list(STUDIES)
    found = make_readme.read_documents(ROOT / make_readme.RESULTS)
    whole, short = (as_markdown(make(found, Page(""))) for make in (studies.whole, studies.short))
    for name in STUDIES:
        conclusions = found[f"studies/{name}.json"]["conclusions"]
        assert all(f"- {sentence}\n" in whole for sentence in conclusions)
        assert sum(sentence.replace("|", r"\|") in short for sentence in conclusions) == 1


def test_links_and_plots_of_the_pages_are_there():
    for name in make_readme.PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:\s]+)[)#]", text):
            assert (ROOT / name).parent.joinpath(target).exists(), target


def test_the_guide_tells_what_was_measured():
    stages = {"before training": 0.5, "after transfer": 0.75}
    shares = {"softmax": 1.0, "fmm": 0.7, "band": 0.6}
    rows = [{"row": name, "over_softmax": share} for name, share in shares.items()]
    table = {"part": "snli", "rows": rows, "learnt": True}
    favor = {"row": "favor+", "mean_share_by_stage": stages, "mean_share_of_softmax": 0.9}
    untaught = favor | {"row": "linear", "mean_share_by_stage": stages | {"after transfer": None}}
    summary = {"accuracy": [table], "overview": [favor, untaught]}
    crossing = {"attention": "favor+", "dtype": "float32", "features": 64, "causal": True}
    crossings = [crossing | {"training": training, "interpolated": 1300 + training} for training in (False, True)]
    ops = {"kind": "bench ops", "crossovers": crossings}
    cell = {"attention": "fmm", "length": 99, "training": True, "speed_over_softmax": 3.21}
    model = {"kind": "bench model", "model": {"name": "a bert"}, "lengths": [9, 99], "cells": [cell]}
    times = {name: {"median": time} for name, time in (("softmax", 70.2), ("fmm", 20.1))}
    cells = [{"attention": name, "context": 5, "batch": 1, "ms_per_token": time} for name, time in times.items()]
    decode = {"kind": "bench decode", "contexts": [5], "batches": [1], "cells": cells}
    lines = as_markdown(guide(summary, [ops, model, decode])).splitlines()
    assert len(lines) == 4
    assert (
        lines[0].startswith("- **Length**, one causal layer") and "1,300 tokens to infer and 1,301 to train" in lines[0]
    )
    assert lines[1] == "- **A whole model**, a bert, 99 tokens: fmm trains 3.2 × as fast as softmax."
    assert lines[2].endswith("favor+ 50.0 % → 75.0 % → 90.0 %.")  # a row without transfer has no such line
    assert lines[3] == "- **Generation** after 5 tokens, milliseconds a token: softmax 70, fmm 20."
    rows.append({"row": "favor+", "over_softmax": 0.65})
    other = {"part": "sst2", "learnt": True, "rows": [{**row, "over_softmax": 0.8} for row in rows]}
    lacking = {"part": "rte", "learnt": True, "rows": rows[:2]}
    told = as_markdown(guide({**summary, "accuracy": [table, other, lacking]}, []))
    assert (
        "beside each alone:** fmm 75.0 %, band 70.0 %, favor+ 72.5 % of softmax's score, mean over snli, sst2" in told
    )
    assert as_markdown(guide(None, [])) == "Nothing has been measured yet.\n"
