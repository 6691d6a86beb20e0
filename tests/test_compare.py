"""Comparisons: what a file asks for, what is refused at once, and how runs are started, skipped, and survive."""

import dataclasses
import json
import os
import sys

import compare
import demo
import pytest
import torch
import yaml
from comparison import plan
from comparison.report import read_comparison
from evaluate_embeddings import read_beir
from support import sample
from support.documents import make_checkpoint, task
from support.recipes import make_gpt2, run_apart

from hf_rfattn.results.documents import checkpoint_fingerprint

QUICK = {
    "data": sample.folder("sst2"),
    "max_train_samples": 64,
    "max_eval_samples": 16,
    "batch_size": 8,
    "max_steps": 2,
}
SMALL = {
    "title": "Small",
    "variables": {"model": None},
    "training": {**QUICK, "model": "${model}"},
    "attention": [{"label": "softmax"}, {"label": "favor+", "options": {"num_features": 8}}],
    "tasks": [{"label": "sst2", "recipe": "glue", "training": {"task": "sst2"}}],
}


@pytest.fixture
def planned(tmp_path, bert):
    """From the fields of a file to its plan."""

    def make(**changes):
        path = tmp_path / "file.yaml"
        path.write_text(yaml.safe_dump({**SMALL, **changes}))
        return plan.read_plan(path, tmp_path / "out", {"model": bert})

    return make


def test_runs_are_rows_by_tasks_by_seeds(planned, tmp_path, bert):
    made = planned(
        seeds=[0, 1],
        tasks=[
            {"label": "sst2", "recipe": "glue", "training": {"task": "sst2"}},
            {"label": "A pair", "recipe": "snli", "rows": ["favor+"], "seeds": [5], "processes": 2, "lengths": [16, 32],
             "threads": 1},
            {"label": "scaling", "recipe": "snli", "rows": ["favor+"], "seeds": [5], "processes": [1, 2]},
        ],
    )  # fmt: skip
    names = [run.name for run in made.runs]
    assert names[:4] == ["sst2_softmax_seed_0", "sst2_favor+_seed_0", "sst2_softmax_seed_1", "sst2_favor+_seed_1"]
    assert names[4:6] == ["A-pair_favor+_16_tokens_seed_5", "A-pair_favor+_32_tokens_seed_5"]
    assert names[6:] == ["scaling-1-process_favor+_seed_5", "scaling-2-processes_favor+_seed_5"]
    second = made.runs[1].options
    assert (second.model, second.attention, second.attention_options) == (bert, "favor+", ["num_features=8"])
    assert (second.task, second.seed, second.output) == ("sst2", 0, str(tmp_path / "out/runs/sst2_favor+_seed_0"))
    assert made.runs[1].place == {"part": "sst2", "row": "favor+", "order": [0, 0, 1]}
    pair = made.runs[5]
    assert (pair.processes, pair.threads, pair.options.max_length) == (2, 1, 32)
    assert [(run.processes, run.place["part"]) for run in made.runs[6:]] == [
        (1, "scaling, 1 process"),
        (2, "scaling, 2 processes"),
    ]


def test_rows_may_differ_in_options_of_the_recipe(planned):
    rows = [
        {"label": "softmax"},
        {"label": "hedgehog"},
        {"label": "hedgehog, fast", "mechanism": "hedgehog", "training": {"mechanism_learning_rate": 0.01}},
    ]
    plain, fast = (run.options for run in planned(attention=rows).runs[1:])
    assert (plain.attention, plain.mechanism_learning_rate) == ("hedgehog", None)
    assert (fast.attention, fast.mechanism_learning_rate) == ("hedgehog", 0.01)


def test_a_task_may_change_options_of_a_row(planned):
    tasks = [{"label": "a", "recipe": "snli", "options": {"favor+": {"num_features": 16, "projection": "iid"}}}]
    assert planned(tasks=tasks).runs[1].options.attention_options == ["num_features=16", "projection=iid"]


def test_a_run_that_comes_before(planned, bert):

    before = {"recipe": "lm", "training": {"from_scratch": True}}
    lm = {"label": "lm", "recipe": "lm", "before": before, "training": {"model": "${before}/model"}}
    first, *others = planned(tasks=[lm]).runs
    assert (first.name, first.place, first.options.model) == ("lm_before", None, bert)
    assert {run.options.model for run in others} == {f"{first.options.output}/model"}
    assert {run.needs for run in others} == {"lm_before"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": []}, "unknown field 'task' (did you mean 'tasks'?)"),
        ({"seeds": [0, "one"]}, "argument --seed: invalid int value: 'one'"),
        ({"attention": [{"label": "favor+"}]}, "attention has no softmax"),
        ({"attention": [{"label": "softmax"}, {"label": "favour"}]}, "Unknown attention 'favour'"),
        ({"attention": [{"label": "softmax"}, {"label": "rff", "options": {"features": 3}}]}, "no option 'features'"),
        ({"attention": [{"label": "softmax"}, {"label": "rff", "training": {"learning_rate": 1}}]},
         "the row 'rff' sets learning_rate, which must be the same in all rows"),
        ({"attention": [{"label": "softmax"}, {"label": "softmax"}]}, "sst2_softmax_seed_0 would run twice"),
        ({"tasks": [{"label": "a", "recipe": "glu"}]}, "unknown recipe 'glu'; known: glue, snli, squad"),
        ({"tasks": [{"label": "a", "recipe": "glue", "rows": ["rff"]}]}, "rows of a: unknown field 'rff'"),
        ({"tasks": [{"label": "a", "recipe": "glue", "options": {"rff": {}}}]}, "rows of a: unknown field 'rff'"),
        ({"tasks": [{"label": "a", "recipe": "glue", "options": {"favor+": {"bands": 3}}}]}, "has no option 'bands'"),
        ({"tasks": [{"recipe": "glue"}]}, "the field 'label' is missing"),
        ({"training": {"batchsize": 3}}, "Unknown option '--batchsize=3' (did you mean '--batch-size'?)"),
        ({"training": {"seed": 3}}, "the comparison sets seed itself"),
        ({"training": {"attention-options": ["num_features=4"]}}, "the comparison sets attention_options itself"),
        ({"training": {**QUICK, "model": "${modle}"}}, "unknown variable 'modle'; known: model, recipes"),
        ({"training": {**QUICK, "epochs": "few"}}, "argument --epochs"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_before_any_run(planned, changes, message):
    with pytest.raises(ValueError) as error:
        planned(**changes)
    assert message in str(error.value) and "file.yaml" in str(error.value)


def test_variables_and_files(tmp_path):
    path = tmp_path / "file.yaml"
    with pytest.raises(ValueError, match="There is no file"):
        plan.read_plan(path, tmp_path, {})
    path.write_text("a: [")
    with pytest.raises(ValueError, match=r"file\.yaml: while parsing"):
        plan.read_plan(path, tmp_path, {})
    path.write_text(yaml.safe_dump(SMALL))
    with pytest.raises(ValueError, match=r"file\.yaml: needs --set model=\.\.\."):
        plan.read_plan(path, tmp_path, {})
    with pytest.raises(ValueError, match=r"--set: unknown field 'modle' \(did you mean 'model'\?\)"):
        plan.read_plan(path, tmp_path, {"modle": "x"})


def test_the_launcher_that_fits(planned, monkeypatch):
    alone, two = planned().runs[0], planned(processes=2).runs[0]
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in compare.launch_command(alone)[1]  # what the user has set stays
    assert compare.launch_command(dataclasses.replace(alone, threads=2))[1]["OMP_NUM_THREADS"] == "2"
    monkeypatch.delenv("OMP_NUM_THREADS")
    words, environment = compare.launch_command(alone, "--resume")
    assert words[:2] == [sys.executable, str(alone.script)] and words[-1] == "--resume"
    assert environment["OMP_NUM_THREADS"] == "6"
    words, environment = compare.launch_command(two)
    assert words[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    assert environment["ACCELERATE_USE_CPU"] == "true" and environment["OMP_NUM_THREADS"] == "3"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    words, environment = compare.launch_command(two)
    assert words[1:5] == ["-m", "accelerate.commands.launch", "--num_processes", "2"]
    assert "ACCELERATE_USE_CPU" not in environment


# Runs that take no time: a script that leaves the result of a recipe --------------------------------------------------

STAND_IN = """
import json, shutil, sys, time
from pathlib import Path
words = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word and word.startswith("--"))
output = Path(words["output"])
output.mkdir(parents=True, exist_ok=True)
with (output / "calls").open("a") as calls:
    calls.write(sys.argv[-1] + "\\n")
behaviour = json.loads(Path(__file__).with_suffix(".json").read_text())
(output / "run.json").write_text(json.dumps(behaviour["results"][output.name]["options"]))
print("about to train")
do = behaviour.get(output.name)
if do == "fail":
    sys.exit("the loss became nan")
if do == "hang":
    print("hanging", flush=True)
    time.sleep(600)
shutil.copytree(behaviour["model"], output / "model", dirs_exist_ok=True)
if words["attention"] == "favor+" and words["seed"] == "0":
    (output / "model" / "README.md").write_text("a card")
(output / "result.json").write_text(json.dumps(behaviour["results"][output.name]))
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch, bert):
    """A comparison whose runs do as they are told; returns a function that starts it and gives the exit code."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    monkeypatch.setattr(plan.Run, "script", property(lambda run: script))
    path = tmp_path / "file.yaml"
    favor = {"mechanism": "favor+", "num_features": 8}
    make_checkpoint(tmp_path / "model", favor)

    def result(run):
        softmax = run.options.attention == "softmax"
        own = checkpoint_fingerprint(tmp_path / "model") if run.options.attention == "favor+" else "another"
        return task(
            "softmax" if softmax else favor if own != "another" else {"mechanism": run.options.attention or "average"},
            0.75 if softmax else 0.5 if own != "another" else 0.25,
            seed=run.options.seed,
            options=dataclasses.asdict(run.options),
            processes=run.processes,
            main_metric="accuracy",
            budget={"steps": 2, "max_length": 64},
            checkpoint=own if run.options.seed == 0 else "another",
        )

    def start(*, file=None, told=None, changes=None, begin=compare.main, **arguments):
        path.write_text(yaml.safe_dump({**SMALL, **(changes or {})}))
        runs = plan.read_plan(file or path, tmp_path / "out", {"model": bert}).runs
        results = {run.name: result(run) for run in runs}
        behaviour = {**(told or {}), "results": results, "model": str(tmp_path / "model")}
        script.with_suffix(".json").write_text(json.dumps(behaviour))
        try:
            begin(**{"config": path, "assignments": [f"model={bert}"], "output": tmp_path / "out", **arguments})
        except SystemExit as stop:
            return stop.code
        return 0

    start.calls = lambda name: (tmp_path / "out/runs" / name / "calls").read_text().split()
    start.output = tmp_path / "out"
    return start


def test_finished_runs_are_not_made_again(stand_in, capsys):
    assert stand_in() == 0
    assert "2 runs, 2 left" in capsys.readouterr().out
    result = json.loads((stand_in.output / "results/sst2_favor+_seed_0.json").read_text())
    assert result["comparison"]["row"] == "favor+"
    assert result["options"]["output"] == "sst2_favor+_seed_0"  # and not where it lies
    card = (stand_in.output / "runs/sst2_favor+_seed_0/model/README.md").read_text()
    assert "| softmax | 75.0 |" in card  # and not the result of its own run alone

    assert stand_in() == 0
    assert "2 runs, 0 left" in capsys.readouterr().out
    assert stand_in.calls("sst2_favor+_seed_0") == ["--overwrite"]

    assert stand_in(changes={"seeds": [0, 1]}) == 0
    assert "4 runs, 2 left" in capsys.readouterr().out

    other = {"training": {**SMALL["training"], "learning_rate": 0.5}}
    assert stand_in(changes=other) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "sst2_softmax_seed_0.json was made with another --learning-rate. Pass --redo to run it again" in said
    assert stand_in(changes=other, redo=True) == 0
    assert len(stand_in.calls("sst2_softmax_seed_0")) == 2


def test_a_run_that_fails_does_not_stop_the_others(stand_in, capsys):
    assert stand_in(told={"sst2_softmax_seed_0": "fail"}) == 1
    said = capsys.readouterr().out
    assert "sst2_softmax_seed_0: FAILED: exit code 1" in said and "the loss became nan" in said
    assert "[2/2] sst2_favor+_seed_0: accuracy 0.5" in said
    assert "1 run(s) failed" in said and (stand_in.output / "report.html").exists()
    assert stand_in() == 0
    assert "2 runs, 1 left" in capsys.readouterr().out


def test_what_needs_a_failed_run_is_not_tried(stand_in, tmp_path, capsys):
    before = {"recipe": "lm", "training": {"from_scratch": True}}
    lm = {"label": "lm", "recipe": "lm", "before": before, "training": {"model": "${before}/model"}}
    changes = {"tasks": [*SMALL["tasks"], lm]}
    assert stand_in(told={"lm_before": "fail"}, changes=changes) == 1
    said = capsys.readouterr().out
    assert said.count("it needs lm_before, which failed") == 2
    assert not (stand_in.output / "runs/lm_softmax_seed_0").exists()


def test_ctrl_c_ends_the_run_at_hand_and_nothing_is_lost(stand_in, monkeypatch, capsys):
    started = []

    class Interrupted(compare.subprocess.Popen):
        def communicate(self, *arguments, **options):
            if "favor+_seed_0" not in " ".join(self.args):
                return super().communicate(*arguments, **options)
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(compare.subprocess, "Popen", Interrupted)
    assert stand_in(told={"sst2_favor+_seed_0": "hang"}) == 130
    assert "Interrupted. Run the same command again to resume." in capsys.readouterr().err
    assert started[0].poll() is not None  # and not left behind
    assert (stand_in.output / "results/sst2_softmax_seed_0.json").exists()


def test_models_can_be_left_out(stand_in):
    assert stand_in(changes={"keep_models": False}) == 0
    assert not list(stand_in.output.glob("runs/*/model")) and len(list(stand_in.output.glob("results/*.json"))) == 2


def test_only_the_report(stand_in, tmp_path, capsys):
    assert stand_in() == 0
    (stand_in.output / "report.html").unlink()
    compare.main(tmp_path / "no-such.yaml", output=stand_in.output, report_only=True)
    assert (stand_in.output / "report.html").exists()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        compare.main(tmp_path / "no-such.yaml", output=tmp_path / "empty", report_only=True)
    assert stop.value.code == 2 and "contains no results of a comparison" in capsys.readouterr().err


def test_the_demo_ends_with_a_table_a_report_and_what_comes_next(stand_in, bert, capsys):
    def begin(config, assignments, output):
        demo.main(output=output, model=bert)

    assert stand_in(file=demo.FOLDER / "compare" / "demo.yaml", begin=begin) == 0
    said = " ".join(capsys.readouterr().out.split())
    for row in ("softmax", "multipole", "fmm", "hedgehog", "average"):
        assert f"│ {row}" in said
    assert "evaluate_embeddings.py" in said and "samples/s" in said
    for name in ("report.html", "report.md", "pareto.png"):
        assert (stand_in.output / name).exists()


def test_the_documents_of_the_demo():
    """Sentences of queries were removed from their documents, and every query has one document."""
    data = read_beir(demo.FOLDER / "addresses", "test")
    assert len(data.documents) == 100 and len(data.queries) == 200
    for query, relevant in data.relevant.items():
        (document,) = relevant
        assert data.queries[query] not in data.documents[document]
    assert all(1200 < len(text.split()) < 1700 for text in data.documents.values())


@pytest.mark.slow
def test_real_runs(tmp_path, bert):
    """Two rows in processes of their own, one of them on two processes; nothing stands in for anything."""
    path = tmp_path / "file.yaml"
    two = {"label": "two", "recipe": "glue", "rows": ["favor+"], "processes": 2}
    path.write_text(yaml.safe_dump({**SMALL, "tasks": [{**SMALL["tasks"][0], "rows": ["softmax"]}, two]}))
    words = ["--set", f"model={bert}", "--output", str(tmp_path / "out")]
    done = run_apart("compare.py", path, *words)
    assert "[2/2] two_favor+_seed_0: accuracy" in done.stdout
    _, tables = read_comparison(tmp_path / "out/results")
    found = {(table.title, table.first.document["processes"]): table.rows[0] for table in tables}
    assert set(found) == {("sst2", 1), ("two", 2)}
    assert all(row.speed is None for row in found.values())  # two steps are not timed


@pytest.mark.parametrize(
    ("name", "variables"), [("stories", ("data", "models")), ("accuracy", ("data", "minilm", "bge"))]
)
def test_the_files_that_come_with_it(name, variables, tmp_path, bert):
    """Are well-formed whatever the folders: with the shapes of the data they name, nothing in them is refused."""
    for folder in ("glue_sst2", "glue_cola", "glue_rte", "glue_stsb", "snli", "squad", "wikitext-2-raw-v1"):
        (tmp_path / folder).mkdir()
    make_gpt2(tmp_path / "tinyllama-stories15M")
    given = {variable: str(tmp_path) if variable in ("data", "models") else bert for variable in variables}
    made = plan.read_plan(demo.FOLDER / "compare" / f"{name}.yaml", tmp_path / "out", given)
    judged = [run for run in made.runs if run.place]
    least = {"softmax", "favor+", "hedgehog", "fmm", "band", "average"}  # with both halves of fmm and no attention
    rows = [{run.place["row"] for run in judged if run.place["part"] == part.place["part"]} for part in judged]
    assert all(found >= least for found in rows)
    assert name == "stories" or all(found >= least | {"rff", "linear", "taylor"} for found in rows)


@pytest.mark.parametrize(("name", "models"), [("embeddings", ("minilm", "bge")), ("long_reviews", ("model",))])
def test_the_files_about_long_inputs(name, models, tmp_path, bert):
    for folder in ("squad", "glue_stsb"):
        (tmp_path / folder).mkdir()
    given = {"data": str(tmp_path), **dict.fromkeys(models, bert)}
    made = plan.read_plan(demo.FOLDER / "compare" / f"{name}.yaml", tmp_path / "out", given)
    parts = {(run.place["part"], run.options.max_length): set() for run in made.runs if run.place}
    for run in made.runs:
        if run.place:
            parts[run.place["part"], run.options.max_length].add(run.place["row"])
    assert len(parts) == {"embeddings": 6, "long_reviews": 3}[name]
    assert all(rows >= {"softmax", "multipole", "fmm", "band", "average"} for rows in parts.values())
