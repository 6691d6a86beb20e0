"""The metrics of the recipes against published examples, and against scikit-learn and scipy."""

import math

import finetune_glue
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from finetune_squad import normal_words, squad, word_f1
from training.classification import measure
from training.language import perplexity

GLUE = {name: task.metrics for name, task in finetune_glue.TASKS.items()}

# values as published on the pages of evaluate's own metrics "squad", "squad_v2" and "glue"
TRUTHS = [["1976"], ["Beyoncé and Bruno Mars"], ["climate change"]]


@pytest.mark.parametrize(
    ("task", "predictions", "references", "expected"),
    [
        ("sst2", [0, 1], [0, 1], {"accuracy": 1.0}),
        ("mrpc", [0, 1], [0, 1], {"accuracy": 1.0, "f1": 1.0}),
        ("stsb", [-10.0, -11, -12, -13, -14, -15], [0.0, 1, 2, 3, 4, 5], {"pearson": -1.0, "spearmanr": -1.0}),
        ("cola", [1, 1], [0, 1], {"matthews_correlation": 0.0}),
    ],
)
def test_glue_as_published(task, predictions, references, expected):
    found = measure(GLUE[task], predictions, references)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_glue_against_scikit_learn_and_scipy(seed):
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(0, 2, 57), rng.integers(0, 2, 57)
    found = {}
    for task in ("cola", "mrpc", "mnli"):
        found |= measure(GLUE[task], guess, truth)
    assert found == pytest.approx(
        {
            "accuracy": sklearn.metrics.accuracy_score(truth, guess),
            "f1": sklearn.metrics.f1_score(truth, guess),
            "matthews_correlation": sklearn.metrics.matthews_corrcoef(truth, guess),
        }
    )
    scores, gold = rng.normal(size=40).round(1), rng.integers(0, 6, 40).astype(float)  # with ties
    found = measure(GLUE["stsb"], scores, gold)
    expected = (scipy.stats.pearsonr(scores, gold).statistic, scipy.stats.spearmanr(scores, gold).statistic)
    assert (found["pearson"], found["spearmanr"]) == pytest.approx(expected)


def test_glue_where_nothing_varies():
    for task, value in (("cola", 0.0), ("mrpc", 0.0), ("stsb", 0.0)):
        found = measure(GLUE[task], [0, 0, 0], [0, 0, 0])
        assert list(found.values())[-1] == value
    assert len(GLUE) == 9


def test_squad_as_published():
    assert squad(["1976"], TRUTHS[:1]) == {"exact_match": 100.0, "f1": 100.0}
    assert squad(["1999"], TRUTHS[:1]) == {"exact_match": 0.0, "f1": 0.0}
    found = squad(["1976", "Beyonce", "climate change"], TRUTHS)
    assert found == pytest.approx({"exact_match": 66.66666666666667, "f1": 66.66666666666667})


def test_squad_2_wants_no_answer_where_there_is_none():
    assert squad(["", "yes"], [[], ["yes"]]) == {"exact_match": 100.0, "f1": 100.0}
    assert squad(["yes", ""], [[], ["yes"]]) == {"exact_match": 0.0, "f1": 0.0}


def test_words_that_count():
    assert normal_words("An  answer: THE U.S.A.") == ["answer", "usa"]
    assert word_f1("in the year 1976", "1976") == pytest.approx(0.5)
    assert squad(["Blue."], [["a red car", "blue"]])["f1"] == 100


def test_perplexity():
    """A fair die has perplexity 6 whatever the lengths; bits a byte come from the whole."""
    metrics = perplexity([3 * math.log(6), 5 * math.log(6)], [3, 5], num_bytes=4)
    assert all(metric.n == 8 and metric.lower_is_better for metric in metrics.values())
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx({"perplexity": 6.0, "loss": math.log(6), "bits_per_byte": 2 * math.log2(6)})


@pytest.mark.parametrize(
    ("task", "labels", "chance"),
    [
        ("rte", [0, 0, 0, 1], {"accuracy": 0.75}),
        ("mrpc", [0, 0, 0, 1], {"accuracy": 0.75, "f1": 0.4}),  # of "equivalent" for all: precision 1/4, recall 1
        ("cola", [0, 1, 1, 1], {"matthews_correlation": 0.0}),
        ("stsb", [0.0, 1.5, 5.0, 2.0], {"pearson": 0.0, "spearmanr": 0.0}),
    ],
)
def test_chance_is_the_best_constant_answer(task, labels, chance):
    made = finetune_glue.GlueTask(finetune_glue.GlueOptions(task=task))
    references = torch.tensor(labels)
    found = made.score("validation", {"predictions": references.flip(0), "references": references})
    assert {name: metric.chance for name, metric in found.items()} == chance
