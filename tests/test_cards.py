"""Cards: every number from the documents, nothing claimed that was not measured, metadata that the Hub takes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from support.documents import BASE, FMM, THIS, edit, make_checkpoint, measured_runs, speed, task, write_results
from typer.testing import CliRunner

from hf_rfattn.cli import app
from hf_rfattn.hub.cards import cite, make_card, write_card
from hf_rfattn.install import install_command
from hf_rfattn.mechanisms import mechanism_names
from hf_rfattn.results.documents import checkpoint_fingerprint
from hf_rfattn.results.report import in_bytes, number, times


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Saved once for each attention, by name."""
    top = tmp_path_factory.mktemp("checkpoints")
    make_checkpoint(top / "favor")
    make_checkpoint(top / "fmm", FMM, tokenizer=False)
    return top


@pytest.fixture
def folder(checkpoints, tmp_path):
    return Path(shutil.copytree(checkpoints / "favor", tmp_path / "tiny"))


@pytest.fixture
def measured(folder):
    write_results(folder, measured_runs())
    return folder


def section(text, title):
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_scores_stand_beside_softmax_and_the_controls(measured):
    text = section(str(make_card(measured)), "Results")
    assert "| attention | accuracy (%) | of softmax | samples/s | over softmax | peak memory |" in text
    assert "| softmax | 63.6 | 100.0 % | 131.9 | 1.00 × | 777 MiB |".replace("131.9", "132") in text
    assert "| **this model**: favor+, num_features=16 | 57.0 | 89.6 % | 117 | 0.89 × | 777 MiB |" in text
    assert text.index("| hedgehog |") < text.index("| band, bandwidth=16 |") and "| average | 47.9 |" in text
    assert "transfer" not in text and "(chance) |" not in text and "Not measured" not in text
    edit(measured / "results" / "favor.json", lambda document: document.update(transfer={"steps": 30}))
    edit(measured / "results" / "softmax.json", lambda document: document["metrics"]["accuracy"].update(chance=0.56))
    (measured / "results" / "average.json").unlink()
    text = section(str(make_card(measured)), "Results")
    assert "| **this model**: favor+, num_features=16, after 30 steps of transfer | 57.0 (chance) |" in text
    assert "Not measured: control: no attention." in text


def test_metadata(measured):
    """Read back by huggingface_hub's own classes from the YAML in the file."""
    write_card(measured, repo_id="me/tiny")
    card = ModelCard.load(measured / "README.md")
    data = card.data.to_dict()
    assert data["base_model"] == BASE and data["base_model_relation"] == "finetune"
    assert data["library_name"] == "transformers" and data["license"] == "apache-2.0"
    assert data["pipeline_tag"] == "text-classification"
    assert data["datasets"] == ["stanfordnlp/snli"] and data["metrics"] == ["accuracy"]
    assert {"hf_rfattn", "favor+"} <= set(data["tags"])
    assert data["rfattn_checkpoint_sha256"] == checkpoint_fingerprint(measured)
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_type, result.dataset_split) == (
        "text-classification",
        "stanfordnlp/snli",
        "validation",
    )
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.5703)
    again = ModelCardData(**yaml.safe_load(str(card).split("---\n")[1]))
    assert again.eval_results == card.data.eval_results


def test_says_what_it_is_and_how_to_load_it(measured):
    text = str(make_card(measured, repo_id="me/tiny"))
    assert '| 0-1 | softmax → favor+ | `num_features=16`, `projection="orthogonal"`' in text
    assert 'model = BertForSequenceClassification.from_pretrained("me/tiny")' in text
    assert text.index("import hf_rfattn") < text.index("from transformers import")
    assert f"Install hf-rfattn: {install_command()}." in text and "classification recipes" not in text
    assert "commit `0123456789abcdef` of hf_rfattn, seed 3" in text
    assert "`python finetune_snli.py --attention favor+`" in text
    assert "Rethinking Attention with Performers" in text and "Hedgehog" not in section(text, "Citations")
    assert "{{" not in text and "{%" not in text and "None" not in text


@pytest.mark.parametrize(
    ("pooling", "architecture", "noted"),
    [
        ("cls", "BertForSequenceClassification", True),
        ("mean", "BertForSequenceClassification", True),
        ("model", "BertForSequenceClassification", False),  # the pooler of BERT itself
        ("mean", "ModernBertForSequenceClassification", False),  # which implements the field
        ("mean", "SomebodysOwnModel", False),
    ],
)
def test_pooling_that_only_the_recipes_load(folder, pooling, architecture, noted):
    """transformers ignores `classifier_pooling` of a BERT and initializes its pooler at random."""
    edit(folder / "config.json", lambda config: config.update(classifier_pooling=pooling, architectures=[architecture]))
    text = section(str(make_card(folder, repo_id="me/tiny")), "How to load it")
    assert (f"`classifier_pooling: {pooling}`" in text and "(`--model me/tiny`)" in text) == noted


def test_the_snippet_runs(measured):
    """The code of the card, with the folder in the place of the repository."""
    text = str(make_card(measured, repo_id="me/tiny"))
    code = text.partition("```python\n")[2].partition("```")[0]
    scope = {}
    exec(code.replace("me/tiny", str(measured)), scope)
    assert scope["model"].bert.encoder.layer[0].attention.self.rf is not None
    assert len(scope["tokenizer"]("a b").input_ids) == 4


def numbers_in(text):
    return set(re.findall(r"(?<![\w.,])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e-\d+)?", text.replace(" ×", "×")))


def leaves(document):
    if isinstance(document, dict):
        return [leaf for value in document.values() for leaf in leaves(value)]
    if isinstance(document, list):
        return [leaf for value in document for leaf in leaves(value)]
    return [document]


def test_every_number_of_the_results_is_in_the_documents(measured):
    """Tables: numbers as they are written, scores in percent, or ratios of two of them. Nothing else."""
    documents = measured_runs()
    text = section(str(make_card(measured)), "Results")
    plain = [leaf for leaf in leaves(documents) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)]
    allowed = {number(value) for value in plain} | {str(value) for value in plain} | {number(v, 3) for v in plain}
    allowed |= {in_bytes(value).split()[0] for value in plain} | {"2.13"}  # of torch
    timings = documents["speed.json"]["lengths"]
    allowed |= {number(t[f"{who}_seconds"] * 1000) for t in timings for who in ("softmax", "patched")}
    allowed |= {number(t["softmax_seconds"] / t["patched_seconds"], 3) for t in timings}
    tasks = [document for document in documents.values() if document["kind"] == "task"]
    scores = [document["metrics"]["accuracy"]["value"] for document in tasks]
    allowed |= {f"{100 * score:.1f}" for score in scores} | {f"{100 * score / 0.6364:.1f}" for score in scores}
    allowed |= {times(document["samples_per_second"] / 131.9).split()[0] for document in tasks}
    allowed.add(f"{100 * (0.6364 * (1 - 0.6364) / 1987) ** 0.5:.1f}")  # standard error
    labels = {str(value) for name in ("band.json", "favor.json") for value in documents[name]["attention"].values()}
    found = numbers_in(text)
    assert len(found) > 25
    assert found <= allowed | labels


def number_leaves(document, path=()):
    if isinstance(document, dict):
        for key, value in document.items():
            yield from number_leaves(value, (*path, key))
    elif isinstance(document, list):
        for i, value in enumerate(document):
            yield from number_leaves(value, (*path, i))
    elif isinstance(document, float) or (isinstance(document, int) and path[-1] in ("n", "batch", "length", "seed")):
        yield path


SHOWN = [
    (name, path)
    for name in ("favor.json", "softmax.json", "average.json", "speed.json")
    for path in number_leaves(measured_runs()[name])
    if path[0] in ("metrics", "samples_per_second", "lengths", "batch") and path[-1] not in ("n", "scale")
]


@pytest.mark.parametrize(
    "name, path", SHOWN, ids=lambda part: part if isinstance(part, str) else ".".join(map(str, part))
)
def test_a_changed_number_changes_the_card(measured, name, path):
    before = str(make_card(measured))

    def change(document):
        for key in path[:-1]:
            document = document[key]
        value = document[path[-1]]
        document[path[-1]] = value + 1 if isinstance(value, int) else value * 0.9

    edit(measured / "results" / name, change)
    body = str(make_card(measured))
    assert body.partition("# tiny")[2] != before.partition("# tiny")[2]  # not the fingerprint alone


def test_another_budget_or_data_set_is_no_comparison(folder):
    write_results(
        folder,
        {
            "favor.json": task(checkpoint=THIS),
            "longer.json": task("softmax", 0.81, budget={"epochs": 3}),
            "other.json": task("softmax", 0.82, dataset={"name": "x/y", "split": "test", "fingerprint": "1"}),
            "base.json": task("softmax", 0.83, model="google-bert/bert-base-uncased"),
        },
    )
    text = str(make_card(folder))
    assert not {"81.0", "82.0", "83.0"} & numbers_in(text.partition("# tiny")[2])


def test_citations(checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints / "fmm", tmp_path / "fmm"))
    cited = section(str(make_card(folder)), "Citations")
    assert "FMMformer" in cited and "{RNNs}" in cited and "Performers" not in cited
    for name in mechanism_names():
        entries = cite({"mechanism": name})
        assert entries or name == "average", name
        for entry in entries:
            assert entry.count("{") == entry.count("}") and "year" in entry and "title" in entry
    assert len(cite({"mechanism": "favor+", "variance": "optimal"})) == 2


def test_runs_of_other_seeds_are_shown_but_not_claimed(folder):
    own = checkpoint_fingerprint(folder)
    runs = {"a.json": task(accuracy=0.51, seed=1, checkpoint="0" * 64), "b.json": task(seed=2, checkpoint=own)}
    write_results(folder, runs)
    card = make_card(folder)
    assert [result.metric_value for result in card.data.eval_results] == [0.5703]
    assert "| favor+, num_features=16 | 51.0 |" in str(card)


def test_results_of_other_checkpoints_are_not_its_own(folder):
    write_results(folder, {"a.json": task(checkpoint="0" * 64), "b.json": task("softmax", 0.6), "c.json": speed()})
    text = str(make_card(folder))
    assert "No accuracy was measured" in text and "No speed by length was measured" in text


def test_without_results_it_claims_nothing(folder):
    write_card(folder, base_model=BASE, license="apache-2.0")
    card = ModelCard.load(folder / "README.md")
    assert "model-index" not in card.data.to_dict() and card.data.eval_results is None
    assert "datasets" not in card.data.to_dict() and "metrics" not in card.data.to_dict()
    assert "No accuracy was measured" in card.text and "No speed by length was measured" in card.text
    assert not numbers_in(section(card.text, "Results"))


def test_licence_and_base_model(measured):
    data = make_card(measured, base_model="me/other", license="mit").data
    assert (data.base_model, data.license) == ("me/other", "mit")
    edit(measured / "results/favor.json", lambda d: d.update(base_license=None, model="/data/local/bert"))
    (measured / "results/speed.json").unlink()
    text = str(make_card(measured))
    assert "base_model" not in text and "license:" not in text and "not recorded; check it" in text


def test_links_are_replaced_not_followed(measured, tmp_path):
    """Files of the Hub's cache are links to what other models may share."""
    (tmp_path / "README.md").write_text("shared")
    (measured / "README.md").symlink_to(tmp_path / "README.md")
    write_card(measured)
    assert (tmp_path / "README.md").read_text() == "shared" and not (measured / "README.md").is_symlink()


def test_command(folder, tmp_path):
    write_results(folder, measured_runs())
    (folder / "results").rename(tmp_path / "runs")
    (tmp_path / "runs" / "decode.json").write_text(json.dumps({"kind": "bench decode"}))
    words = ["card", str(folder), "--results", str(tmp_path / "runs"), "--repo", "me/tiny"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "from 6 result files" in result.output, result.output
    assert "0.5703" in (folder / "README.md").read_text()
    result = CliRunner().invoke(app, ["card", str(tmp_path)])
    assert result.exit_code == 2 and "has no config.json" in result.output
