"""The metrics of the recipes against published examples, and against scikit-learn and scipy."""

import doctest
import math

import finetune_glue
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from training import metrics
from training.metrics import GLUE, measure, normal_words, perplexity, squad, squad_v2, word_f1

# questions and values as published on the pages of evaluate's own metrics "squad", "squad_v2" and "glue"
QUESTIONS = ["56e10a3be3433e1400422b22", "56d2051ce7d4791d0090260b", "5733b5344776f419006610e1"]
TRUTHS = ["1976", "Beyoncé and Bruno Mars", "climate change"]


def asked(*texts):
    """Answers and truths of the first questions."""
    questions = QUESTIONS[: len(texts)]
    return dict(zip(questions, texts, strict=True)), {q: [t] for q, t in zip(questions, TRUTHS, strict=False)}


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
    assert len(GLUE) == 10


def test_squad_as_published():
    assert squad(*asked("1976")) == {"exact_match": 100.0, "f1": 100.0}
    assert squad(*asked("1999")) == {"exact_match": 0.0, "f1": 0.0}
    found = squad(*asked("1976", "Beyonce", "climate change"))
    assert found == pytest.approx({"exact_match": 66.66666666666667, "f1": 66.66666666666667})


def test_squad_2_as_published():
    for guesses, score in ((["1976"], 100.0), (["1999"], 0.0), (["1976", "Beyonce", "climate change"], 200 / 3)):
        found = squad_v2(*asked(*guesses), dict.fromkeys(QUESTIONS, 0.0), threshold=1.0)
        names = ("exact_match", "f1", "HasAns_exact_match", "HasAns_f1")
        assert found == pytest.approx(dict.fromkeys(names, score))


def test_words_that_count():
    assert doctest.testmod(metrics).attempted and not doctest.testmod(metrics).failed
    assert normal_words("An  answer: THE U.S.A.") == ["answer", "usa"]
    assert word_f1("in the year 1976", "1976") == pytest.approx(0.5)
    assert squad({"q": "Blue."}, {"q": ["a red car", "blue"]})["f1"] == 100


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.7, math.inf])
def test_squad_2_gives_no_answer_above_the_threshold(threshold):
    rng = np.random.default_rng(0)
    n = 30
    possible, right, doubts = rng.random(n) < 0.6, rng.random(n) < 0.5, rng.normal(size=n).round(1)
    answers = {str(i): "yes" if right[i] else "no" for i in range(n)}
    truths = {str(i): ["yes"] if possible[i] else [] for i in range(n)}
    found = squad_v2(answers, truths, {str(i): float(doubt) for i, doubt in enumerate(doubts)}, threshold)
    silent = doubts > threshold
    score = np.where(possible, right & ~silent, silent)
    assert found["exact_match"] == found["f1"] == pytest.approx(100 * score.mean())
    assert found["HasAns_f1"] == pytest.approx(100 * score[possible].mean())
    assert found["NoAns_f1"] == pytest.approx(100 * score[~possible].mean())


def test_perplexity():
    """A fair die has perplexity 6 whatever the lengths; bits a byte come from the whole."""
    found = perplexity([3 * math.log(6), 5 * math.log(6)], [3, 5], num_bytes=4)
    assert found == pytest.approx({"perplexity": 6.0, "loss": math.log(6), "bits_per_byte": 2 * math.log2(6)})
    with pytest.raises(ValueError, match="no token"):
        perplexity([0.0], [0])


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
