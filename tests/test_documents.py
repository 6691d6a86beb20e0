"""Result documents, as cards read them: what is wrong in one is named, and anything else is read or refused."""

import contextlib
import copy
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.documents import speed, task

from hf_rfattn import attention_label, mechanism_names_in
from hf_rfattn.results.documents import new_result, results_fingerprint
from hf_rfattn.results.schema import parse_result, read_results

CARDS = Path(__file__).parents[1] / "model_cards"


def test_what_the_package_writes_is_what_cards_read():
    """Fields that all results share come from `new_result`."""
    fields = {k: v for k, v in task().items() if k not in new_result("task", seed=0)}
    assert parse_result({**new_result("task", seed=4), **fields}).seed == 4


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.pop("metrics"), "has no 'metrics'"),
        (lambda d: d.update(metrics={}), "metrics is empty"),
        (lambda d: d["metrics"]["accuracy"].pop("n"), "metrics: accuracy has no 'n'"),
        (lambda d: d["metrics"]["accuracy"].update(value=float("nan")), "value must be a finite number"),
        (lambda d: d["metrics"]["accuracy"].update(value="0.5"), "value must be a finite number"),
        (lambda d: d.update(schema_version=99), "unknown schema_version 99"),
        (lambda d: d.update(kind="taks"), "unknown kind 'taks'"),
        (lambda d: d.update(attention=["favor+"]), "attention must be 'softmax' or a mechanism"),
        (lambda d: d.update(samples_per_second=-1), "samples_per_second must be a positive number"),
        (lambda d: d["dataset"].pop("fingerprint"), "dataset has no 'fingerprint'"),
    ],
)
def test_documents_that_are_wrong(change, message):
    document = copy.deepcopy(task())
    change(document)
    with pytest.raises(ValueError, match=message):
        parse_result(document, "x.json")


def test_files_that_are_wrong(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is not a JSON document"):
        read_results(tmp_path)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json must be a JSON object"):
        read_results(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_document_is_read_or_refused(data):
    document = copy.deepcopy(data.draw(st.sampled_from([task(), speed()])))
    document[data.draw(st.sampled_from(sorted(document)))] = data.draw(JSON)
    with contextlib.suppress(ValueError):
        parse_result(document)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_attention_is_named_or_refused(data):
    attention = data.draw(
        st.dictionaries(st.sampled_from(["mechanism", "far", "layers", "num_features"]), JSON | st.just("fmm"))
        | st.fixed_dictionaries({"layers": st.dictionaries(st.text(max_size=3) | st.just("0-1"), JSON)})
    )
    with contextlib.suppress(ValueError):
        result = parse_result(task(attention))
        assert isinstance(attention_label(result.attention), str)
        assert isinstance(mechanism_names_in(result.attention), list)


@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in CARDS.glob("*/README.md")), ids=lambda path: path.name
)
def test_committed_cards_are_those_of_their_results(folder):
    """Their weights are not here, but every number is."""
    card, results = ModelCard.load(folder / "README.md"), read_results(folder / "results")
    assert card.data["rfattn_results_sha256"] == results_fingerprint(folder)
    own = [result for result in results if result.checkpoint == card.data["rfattn_checkpoint_sha256"]]
    measured = [metric.value for result in own for metric in result.metrics.values()]
    assert measured and measured == [r.metric_value for r in card.data.eval_results]
    for result in results:
        assert result.document["git"]["changed"] is False
        assert f" | {100 * result.score.value:.1f} |" in card.content
