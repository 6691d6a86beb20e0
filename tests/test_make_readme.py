"""The parts of README.md, the results page and the upstream page that are made from result files."""

import json
import re
import shutil
from pathlib import Path

import make_readme
import pytest
from support.commands import QUICK_OPS, run
from support.documents import BASE, shared, task

from hf_rfattn.results.documents import read_result, write_result
from hf_rfattn.results.report import as_markdown

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def documents():
    folder = ROOT / make_readme.RESULTS
    return {str(path.relative_to(folder)): read_result(path) for path in sorted(folder.rglob("*.json"))}


@pytest.mark.parametrize("name", make_readme.PAGES, ids=str)
def test_pages_and_plots_are_those_of_the_results(documents, name, tmp_path):
    text, folder = (ROOT / name).read_text(encoding="utf-8"), ROOT / make_readme.RESULTS
    filled, images = make_readme.fill(text, documents, *make_readme.PAGES[name])
    assert filled == text, "run `make readme`"
    for image in images:
        (tmp_path / image.name).parent.mkdir(exist_ok=True)
        shutil.copy(folder / image.name, tmp_path / image.name)
        assert not make_readme.draw(image, documents, tmp_path), f"{image.name}: run `make readme`"
    for target in re.findall(r"\]\(([^)#:\s]+)[)#]", text):
        assert (ROOT / name).parent.joinpath(target).exists(), target


def test_every_result_file_is_on_the_page(documents):
    text = (ROOT / make_readme.RESULTS / "README.md").read_text(encoding="utf-8")
    for name, document in documents.items():
        if "comparison" in document:
            assert f"({Path(name).parent})" in text, name
        elif document["kind"] not in ("upstream", "task"):
            assert f"]({name})" in text, name


def test_a_benchmark_fills_the_pages_and_a_second_run_changes_nothing(tmp_path):
    folder = tmp_path / make_readme.RESULTS
    run("bench", "ops", "--lengths", "32,64", "--features", "8", *QUICK_OPS, "--output", folder)
    (folder / "ops.png").unlink()
    document = json.loads((folder / "ops.json").read_text())
    document["cells"][1]["speed_over_softmax"] = 12.345
    (folder / "ops.json").write_text(json.dumps(document))
    for name, (_, parts) in make_readme.PAGES.items():
        marked = "".join(f"before\n<!-- {part}:start -->\nold\n<!-- {part}:end -->\nafter\n" for part in parts)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(marked)
    make_readme.main(tmp_path)
    for name in list(make_readme.PAGES)[:2]:
        text = (tmp_path / name).read_text()
        assert "old" not in text and document["hardware"]["cpu"] in text
        assert "| favor+, M = 8 | 12.3 ×" in text
        assert "before\n<!-- accuracy:start -->\nNothing has been measured yet." in text
    assert "](ops.png)" in (tmp_path / make_readme.RESULTS / "README.md").read_text()
    written = [folder / "ops.png", *(tmp_path / name for name in make_readme.PAGES)]
    before = [path.stat().st_mtime_ns for path in written]
    make_readme.main(tmp_path)
    assert [path.stat().st_mtime_ns for path in written] == before
    with pytest.raises(ValueError, match="must have <!-- "):
        make_readme.fill("no markers", {}, *make_readme.PAGES[Path("README.md")])


def test_evaluations_stand_beside_softmax(tmp_path):
    """Those of one model, task and budget in one table; those of a comparison elsewhere."""
    taught = {"transfer": {"steps": 7}}
    found = {
        "fmm.json": task({"mechanism": "fmm"}, 0.4, samples_per_second=30.0, **taught),
        "softmax.json": task("softmax", 0.8, samples_per_second=10.0),
    }
    for name, document in found.items():
        write_result(document, tmp_path / name)
    text = as_markdown(make_readme.evaluations(found, ""))
    assert "| softmax | 80.0 | 100.0 % | 10 | 1.00 × | 777 MiB |" in text
    assert "| fmm, after 7 steps of transfer | 40.0 | 50.0 % | 30 | 3.00 × |" in text
    for document in found.values():
        document["load_average"] = [5.0, 5.0, 5.0]
    text = as_markdown(make_readme.evaluations(found, ""))
    assert "| softmax | 80.0 | 100.0 % | 777 MiB |" in text and "samples/s" not in text  # the machine was busy


def test_evaluations_take_their_speed_from_the_benchmark_of_the_model():
    """At their length, inference and training; scores are means over seeds."""
    fmm = {"mechanism": "fmm"}
    budget = {"budget": {"steps": 3, "max_length": 64}}
    found = {f"{seed}.json": task(fmm, 0.4 + seed / 5, seed=seed, **budget) for seed in (0, 1)}
    found["softmax.json"] = task("softmax", 0.8, **budget)
    cell = {"length": 64, "samples_per_second": 17.0, "step_bytes": 2**20}
    cells = [
        {**cell, "attention": name, "training": training, "speed_over_softmax": speed}
        for name, speeds in (("softmax", (1.0, 1.0)), ("fmm", (1.7, 1.5)))
        for training, speed in zip((False, True), speeds, strict=True)
    ]
    found["bench.json"] = {"kind": "bench model", "model": {"name": BASE}, "attention": {"fmm": fmm}, "cells": cells}
    text = as_markdown(make_readme.evaluations(found, ""))
    assert "| softmax | 80.0 | 100.0 % | 17 | 1.00 × | 1.00 × | 1 MiB |" in text
    assert "| fmm | 50.0 ± 14.1 | 62.5 % | 17 | 1.70 × | 1.50 × | 1 MiB |" in text


def test_decoders_by_context_length():
    """Speeds are those of one run, the one of most repetitions; trained models have a column beside their base."""
    fmm = {"mechanism": "fmm"}

    def document(model, values, tokens, repetitions, speed):
        cells = []
        for name, value in values.items():
            measured = {"prefill_tokens_per_second": 100 * speed, "ms_per_token": 50.0, "cache_bytes": 2**20}
            measured["ms_per_token"] /= 2 if name == "own" else 1
            metrics = {"perplexity": {"value": value}} if tokens else {}
            cell = {"attention": name, "stage": "before training", "length": 64, "metrics": metrics}
            cells.append({**cell, **(measured if repetitions else {})})
        about = {"model": model, "tokens": tokens, "repetitions": repetitions, "dtype": "bfloat16"}
        kinds = {name: "softmax" if name == "softmax" else fmm for name in values}
        return {**shared("bench lm"), **about, "attention": kinds, "dataset": {"name": "text"}, "cells": cells}

    found = {
        "a.json": document("me/base, LoRA", {"own": 22.0}, 512, 0, 0),
        "b.json": document("me/base", {"softmax": None, "own": None}, 0, 3, 1),
        "c.json": document("me/base", {"softmax": 20.0, "own": 30.0}, 512, 1, 7),
        "d.json": document("me/base, LoRA", {"softmax": 16.0}, 512, 0, 0),
    }
    text = as_markdown(make_readme.contexts(found, ""))
    assert "**me/base** in bfloat16" in text and "perplexity on 512 tokens of text" in text
    assert "| 64 | softmax | 20 (1.00 ×) | 16 (0.80 × / 1.00 ×) | 100 (1.00 ×) | 50 (1.00 ×) | 1 MiB |" in text
    assert "| 64 | fmm | 30 (1.50 ×) | 22 (1.10 × / 1.38 ×) | 100 (1.00 ×) | 25 (2.00 ×) | 1 MiB |" in text
