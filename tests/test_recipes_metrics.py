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
from training.metrics import GLUE, glue, normal_words, perplexity, squad, squad_v2, word_f1

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
    found = glue(task, predictions, references)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_glue_against_scikit_learn_and_scipy(seed):
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(0, 2, 57), rng.integers(0, 2, 57)
    found = {}
    for task in ("cola", "mrpc", "mnli"):
        found |= glue(task, guess, truth)
    assert found == pytest.approx(
        {
            "accuracy": sklearn.metrics.accuracy_score(truth, guess),
            "f1": sklearn.metrics.f1_score(truth, guess),
            "matthews_correlation": sklearn.metrics.matthews_corrcoef(truth, guess),
        }
    )
    scores, gold = rng.normal(size=40).round(1), rng.integers(0, 6, 40).astype(float)  # with ties
    found = glue("stsb", scores, gold)
    expected = (scipy.stats.pearsonr(scores, gold).statistic, scipy.stats.spearmanr(scores, gold).statistic)
    assert (found["pearson"], found["spearmanr"]) == pytest.approx(expected)


def test_glue_where_nothing_varies():
    for task, value in (("cola", 0.0), ("mrpc", 0.0), ("stsb", 0.0)):
        found = glue(task, [0, 0, 0], [0, 0, 0])
        assert list(found.values())[-1] == value
    assert len(GLUE) == 10


def test_squad_as_published():
    assert squad(*asked("1976")) == {"exact_match": 100.0, "f1": 100.0}
    assert squad(*asked("1999")) == {"exact_match": 0.0, "f1": 0.0}
    found = squad(*asked("1976", "Beyonce", "climate change"))
    assert found == pytest.approx({"exact_match": 66.66666666666667, "f1": 66.66666666666667})


def test_squad_2_as_published():
    for guesses, score in ((["1976"], 100.0), (["1999"], 0.0), (["1976", "Beyonce", "climate change"], 200 / 3)):
        n = len(guesses)
        found = squad_v2(*asked(*guesses), dict.fromkeys(QUESTIONS, 0.0))
        assert found == pytest.approx(
            {
                "exact": score, "f1": score, "total": n, "HasAns_exact": score, "HasAns_f1": score, "HasAns_total": n,
                "best_exact": score, "best_exact_thresh": 0.0, "best_f1": score, "best_f1_thresh": 0.0,
            }
        )  # fmt: skip


def test_words_that_count():
    assert doctest.testmod(metrics).attempted and not doctest.testmod(metrics).failed
    assert normal_words("An  answer: THE U.S.A.") == ["answer", "usa"]
    assert word_f1("in the year 1976", "1976") == pytest.approx(0.5)
    assert squad({"q": "Blue."}, {"q": ["a red car", "blue"]})["f1"] == 100


@pytest.mark.parametrize("seed", range(5))
def test_best_threshold_of_squad_2(seed):
    """Against every threshold tried one by one."""
    rng = np.random.default_rng(seed)
    n = 30
    possible = rng.random(n) < 0.6
    right = rng.random(n) < 0.5
    doubts = rng.normal(size=n).round(1).tolist()
    answers = {str(i): "yes" if right[i] else "no" for i in range(n)}
    truths = {str(i): ["yes"] if possible[i] else [] for i in range(n)}
    by_question = {str(i): doubt for i, doubt in enumerate(doubts)}
    found = squad_v2(answers, truths, by_question, math.inf)

    def score(threshold):
        silent = np.array(doubts) > threshold
        return 100 * np.where(possible, right & ~silent, silent).mean()

    assert found["exact"] == pytest.approx(100 * np.where(possible, right, False).mean())
    assert found["NoAns_total"] == (~possible).sum() and found["HasAns_total"] == possible.sum()
    for threshold in (-0.5, 0.0, 0.7):
        silenced = squad_v2(answers, truths, by_question, threshold)
        assert silenced["exact"] == silenced["f1"] == pytest.approx(score(threshold))
        assert silenced["best_exact"] == found["best_exact"]
    best = max(score(t) for t in [-math.inf, *doubts])
    # equal doubts are taken one by one, as in the official script, which can only find more
    assert best - 1e-9 <= found["best_exact"] <= best + 100 * 3 / n


def test_a_question_without_prediction_is_told():
    answers, truths = asked("1976", "x")
    with pytest.raises(ValueError, match="no prediction for the question '56d2"):
        squad({QUESTIONS[0]: answers[QUESTIONS[0]]}, truths)
    with pytest.raises(ValueError, match="only version 2"):
        squad({QUESTIONS[0]: "1976"}, {QUESTIONS[0]: []})


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
