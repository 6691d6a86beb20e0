"""Cards: every number from the documents, nothing claimed that was not measured, metadata that the Hub takes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData
from support.documents import BASE, FAVOR, FMM, edit, make_checkpoint, measured_runs, task, write_results
from typer.testing import CliRunner

from hf_rfattn.cli import app
from hf_rfattn.hub.card_text import PAPERS, bibliography
from hf_rfattn.hub.cards import make_card, write_card
from hf_rfattn.hub.folder import CheckpointFolder
from hf_rfattn.mechanisms import mechanism_names
from hf_rfattn.results import FAR, checkpoint_fingerprint, in_bytes, number


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Saved once for each attention, by name."""
    top = tmp_path_factory.mktemp("checkpoints")
    make_checkpoint(top / "favor")
    make_checkpoint(top / "fmm", FMM, tokenizer=False)
    make_checkpoint(top / "one", FAVOR, layers=[1])
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


def test_attention_transfer_is_told(measured):
    """It is more training than softmax has had."""
    assert "transfer" not in section(make_card(measured).render(), "Results")
    edit(measured / "results" / "favor.json", lambda document: document.update(transfer={"steps": 30, "batch_size": 4}))
    text = section(make_card(measured).render(), "Results")
    assert "this model, after 30 steps of attention transfer" in text
    assert text.count("steps of attention transfer") == 1


def test_a_task_that_was_not_learnt_is_told(measured):
    def at_chance(document):
        document["metrics"]["accuracy"]["chance"] = document["metrics"]["accuracy"]["value"] - 0.001

    assert "constant answer" not in make_card(measured).render()
    edit(measured / "results" / "favor.json", at_chance)
    said = section(make_card(measured).render(), "Limitations")
    assert "the best constant answer (0.5693)" in said


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
    text = make_card(measured, repo_id="me/tiny").render()
    assert '| 0-1 | softmax → favor+ | `num_features=16`, `projection="orthogonal"`' in text
    assert 'model = BertForSequenceClassification.from_pretrained("me/tiny")' in text
    assert text.index("import hf_rfattn") < text.index("from transformers import")
    assert "pip install hf-rfattn" in text
    assert "commit `0123456789abcdef` of hf_rfattn, seed 3" in text
    assert "`python finetune_snli.py --attention favor+`" in text
    assert "Rethinking Attention with Performers" in text and "Hedgehog" not in section(text, "Citations")
    assert "{{" not in text and "{%" not in text and "None" not in text


def test_the_snippet_runs(measured):
    """The code of the card, with the folder in the place of the repository."""
    text = make_card(measured, repo_id="me/tiny").render()
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
    """Tables: numbers as they are written, or a ratio of two of them. Nothing else."""
    documents = measured_runs()
    text = section(make_card(measured).render(), "Results")
    plain = [leaf for leaf in leaves(documents) if isinstance(leaf, (int, float)) and not isinstance(leaf, bool)]
    allowed = {number(value) for value in plain} | {json.dumps(value) for value in plain}
    allowed |= {in_bytes(value).split()[0] for value in plain}
    timings = documents["speed.json"]["lengths"]
    allowed |= {number(t[f"{who}_seconds"] * 1000) for t in timings for who in ("softmax", "patched")}
    allowed |= {number(t["softmax_seconds"] / t["patched_seconds"], 3) for t in timings}
    labels = {str(value) for name in ("band.json", "favor.json") for value in documents[name]["attention"].values()}
    found = numbers_in(re.sub(r"!\[.*", "", text))
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
    if path[0] in ("metrics", "samples_per_second", "tokens_per_second", "lengths", "batch", "seed")
    and not (path[-1] == "n" and name != "favor.json")
]


@pytest.mark.parametrize(
    "name, path", SHOWN, ids=lambda part: part if isinstance(part, str) else ".".join(map(str, part))
)
def test_a_changed_number_changes_the_card(measured, name, path):
    before = make_card(measured).render()

    def change(document):
        for key in path[:-1]:
            document = document[key]
        value = document[path[-1]]
        document[path[-1]] = value + 1 if isinstance(value, int) else value * 0.9

    edit(measured / "results" / name, change)
    body = make_card(measured).render()
    assert body.partition("# tiny")[2] != before.partition("# tiny")[2]  # not the fingerprint alone


def test_limitations_come_from_the_numbers(measured):
    said = section(make_card(measured).render(), "Limitations")
    worse = "softmax, same budget (0.6364, seed 3), control: window alone (0.5411, seed 3)"
    assert f"snli: accuracy 0.5703 is not clearly better than {worse}." in said
    edit(measured / "results/average.json", lambda d: d["metrics"]["accuracy"].update(value=0.58))
    edit(measured / "results/softmax.json", lambda d: d["metrics"]["accuracy"].update(value=0.5))
    said = section(make_card(measured).render(), "Limitations")
    assert "control: no attention (0.58, seed 3)" in said and "softmax" not in said
    edit(measured / "results/favor.json", lambda d: d["metrics"]["accuracy"].update(value=0.7))
    assert "not clearly better" not in section(make_card(measured).render(), "Limitations")


def test_metrics_where_less_is_more(folder):
    for name, value in (("a.json", 31.5), ("b.json", 24.25)):
        metrics = {"perplexity": {"value": value, "n": 4000, "lower_is_better": True}}
        write_results(folder, {name: task("softmax" if name == "b.json" else FAVOR, metrics=metrics)})
    assert "perplexity 31.5 is not clearly better than softmax" in section(make_card(folder).render(), "Limitations")
    edit(folder / "results/b.json", lambda d: d["metrics"]["perplexity"].update(value=40))
    assert "not clearly better" not in section(make_card(folder).render(), "Limitations")


def test_what_was_not_measured_is_named(folder):
    write_results(folder, {"favor.json": task()})
    said = section(make_card(folder).render(), "Limitations")
    assert "snli: not measured: control: no attention; control: window alone." in said
    assert "No speed was measured" in said


def test_another_budget_or_data_set_is_no_comparison(folder):
    write_results(
        folder,
        {
            "favor.json": task(),
            "longer.json": task("softmax", 0.81, budget={"epochs": 3}),
            "other.json": task("softmax", 0.82, dataset={"name": "x/y", "split": "test", "fingerprint": "1"}),
            "base.json": task("softmax", 0.83, model="google-bert/bert-base-uncased"),
        },
    )
    text = make_card(folder).render()
    assert not {"0.81", "0.82", "0.83"} & numbers_in(text.partition("# tiny")[2])


def test_controls_of_a_hybrid(checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints / "fmm", tmp_path / "fmm"))
    near, far = {"mechanism": "band", "bandwidth": 4}, {"mechanism": "linear"}
    write_results(folder, {"own.json": task(FMM), "near.json": task(near, 0.5711), "far.json": task(far, 0.5)})
    card = make_card(folder)
    assert [role for role, _ in card.comparisons[0]][1] == FAR
    text = card.render()
    assert "accuracy 0.5703 is not clearly better than control: window alone (0.5711, seed 3)." in text
    cited = section(text, "Citations")
    assert "FMMformer" in cited and "{RNNs}" in cited and "Performers" not in cited


def test_runs_of_other_seeds_are_shown_but_not_claimed(folder):
    own = checkpoint_fingerprint(folder)
    runs = {"a.json": task(accuracy=0.51, seed=1, checkpoint="0" * 64), "b.json": task(seed=2, checkpoint=own)}
    write_results(folder, runs)
    card = make_card(folder)
    assert [result.metric_value for result in card.evaluations] == [0.5703]
    text = card.render()
    assert "| another run | 1 | 0.51 |" in text
    for name in runs:
        edit(folder / "results" / name, lambda document: document.pop("checkpoint"))
    with pytest.raises(ValueError, match=r"a\.json, b\.json: any of these runs may have made"):
        make_card(folder)


def test_results_of_other_options_or_layers_are_not_its_own(checkpoints, folder):
    write_results(folder, {"a.json": task({"mechanism": "favor+", "num_features": 32}), "b.json": task("softmax", 0.6)})
    assert make_card(folder).comparisons == []
    whole, one = CheckpointFolder(checkpoints / "favor"), CheckpointFolder(checkpoints / "one")
    assert whole.holds({**FAVOR, "mechanism": "performer"}) and whole.holds({"layers": {"0": FAVOR, "1": FAVOR}})
    assert not one.holds(FAVOR) and one.holds({"layers": {"1": FAVOR}})
    assert one.holds({"layers": {"0": "softmax", "1": FAVOR}}) and not one.holds("softmax")


def test_without_results_it_claims_nothing(folder):
    write_card(folder, base_model=BASE, license="apache-2.0")
    card = ModelCard.load(folder / "README.md")
    assert "model-index" not in card.data.to_dict() and card.data.eval_results is None
    assert "datasets" not in card.data.to_dict() and "metrics" not in card.data.to_dict()
    assert "Nothing was measured with this checkpoint" in card.text
    assert "No accuracy was measured" in card.text and "No speed was measured" in card.text
    assert not numbers_in(section(card.text, "Results"))


def test_licence_and_base_model(measured):
    with pytest.raises(ValueError, match="one licence, but there are several: mit, apache"):
        make_card(measured, license="mit")
    with pytest.raises(ValueError, match="one base model"):
        make_card(measured, base_model="me/other")
    edit(measured / "results/favor.json", lambda d: d.update(base_license=None, model="/data/local/bert"))
    (measured / "results/speed.json").unlink()
    text = make_card(measured).render()
    assert "base_model" not in text and "license:" not in text and "not recorded here; look it up" in text


def test_links_are_replaced_not_followed(measured, tmp_path):
    """Files of the Hub's cache are links to what other models may share."""
    (tmp_path / "README.md").write_text("shared")
    (measured / "README.md").symlink_to(tmp_path / "README.md")
    write_card(measured)
    assert (tmp_path / "README.md").read_text() == "shared" and not (measured / "README.md").is_symlink()


def test_command(folder, tmp_path):
    for name, document in measured_runs().items():
        (tmp_path / "runs").mkdir(exist_ok=True)
        (tmp_path / "runs" / name).write_text(json.dumps(document))
    (tmp_path / "runs" / "decode.json").write_text(json.dumps({"kind": "bench decode"}))
    words = ["card", str(folder), "--results", str(tmp_path / "runs"), "--repo", "me/tiny"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "from 6 result files" in result.output, result.output
    assert "0.5703" in (folder / "README.md").read_text()
    result = CliRunner().invoke(app, ["card", str(tmp_path)])
    assert result.exit_code == 2 and "has no config.json" in result.output


def test_every_mechanism_is_cited_or_has_no_paper():
    assert {"favor+", "rff", "linear", "hedgehog", "fmm", "band"} <= set(PAPERS) <= set(mechanism_names())
    cited = {key for keys in PAPERS.values() for key in keys} | {"likhosherstov2022chefs"}
    assert cited == set(bibliography())
    for entry in bibliography().values():
        assert entry.count("{") == entry.count("}") and "year" in entry and "title" in entry
