"""The metrics of the recipes against published examples, and against scikit-learn and scipy."""

import doctest
import math

import evaluate
import finetune_glue
import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
from metrics.glue.glue import METRICS, Glue
from metrics.perplexity.perplexity import Perplexity
from metrics.squad import squad
from metrics.squad.squad import Squad, f1, normal_words
from support.recipes import ROOT

# questions and values as published on the pages of evaluate's own metrics "squad", "squad_v2" and "glue"
QUESTIONS = ["56e10a3be3433e1400422b22", "56d2051ce7d4791d0090260b", "5733b5344776f419006610e1"]
TRUTHS = [("1976", 97), ("Beyoncé and Bruno Mars", 233), ("climate change", 891)]
REFERENCES = [
    {"id": question, "answers": {"text": [text], "answer_start": [start]}}
    for question, (text, start) in zip(QUESTIONS, TRUTHS, strict=True)
]


def answers(*texts, doubt=None):
    doubts = {} if doubt is None else {"no_answer_probability": doubt}
    return [{"id": q, "prediction_text": t, **doubts} for q, t in zip(QUESTIONS, texts, strict=False)]


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
    found = Glue(task, keep_in_memory=True).compute(predictions=predictions, references=references)
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_glue_against_scikit_learn_and_scipy(seed):
    rng = np.random.default_rng(seed)
    truth, guess = rng.integers(0, 2, 57), rng.integers(0, 2, 57)
    found = {}
    for task in ("cola", "mrpc", "mnli"):
        found |= Glue(task, keep_in_memory=True).compute(predictions=guess, references=truth)
    assert found == pytest.approx(
        {
            "accuracy": sklearn.metrics.accuracy_score(truth, guess),
            "f1": sklearn.metrics.f1_score(truth, guess),
            "matthews_correlation": sklearn.metrics.matthews_corrcoef(truth, guess),
        }
    )
    scores, gold = rng.normal(size=40).round(1), rng.integers(0, 6, 40).astype(float)  # with ties
    found = Glue("stsb", keep_in_memory=True).compute(predictions=scores, references=gold)
    expected = (scipy.stats.pearsonr(scores, gold).statistic, scipy.stats.spearmanr(scores, gold).statistic)
    assert (found["pearson"], found["spearmanr"]) == pytest.approx(expected)


def test_glue_where_nothing_varies():
    for task, value in (("cola", 0.0), ("mrpc", 0.0), ("stsb", 0.0)):
        found = Glue(task, keep_in_memory=True).compute(predictions=[0, 0, 0], references=[0, 0, 0])
        assert list(found.values())[-1] == value
    with pytest.raises(ValueError, match="no task 'sst3'"):
        Glue("sst3")
    assert len(METRICS) == 10


def test_squad_as_published():
    metric = Squad("v1", keep_in_memory=True)
    assert metric.compute(predictions=answers("1976"), references=REFERENCES[:1]) == {"exact_match": 100.0, "f1": 100.0}
    assert metric.compute(predictions=answers("1999"), references=REFERENCES[:1]) == {"exact_match": 0.0, "f1": 0.0}
    found = metric.compute(predictions=answers("1976", "Beyonce", "climate change"), references=REFERENCES)
    assert found == pytest.approx({"exact_match": 66.66666666666667, "f1": 66.66666666666667})


def test_squad_2_as_published():
    metric = Squad("v2", keep_in_memory=True)
    for guesses, score in ((["1976"], 100.0), (["1999"], 0.0), (["1976", "Beyonce", "climate change"], 200 / 3)):
        n = len(guesses)
        found = metric.compute(predictions=answers(*guesses, doubt=0.0), references=REFERENCES[:n])
        assert found == pytest.approx(
            {
                "exact": score, "f1": score, "total": n, "HasAns_exact": score, "HasAns_f1": score, "HasAns_total": n,
                "best_exact": score, "best_exact_thresh": 0.0, "best_f1": score, "best_f1_thresh": 0.0,
            }
        )  # fmt: skip


def test_words_that_count():
    assert doctest.testmod(squad).attempted and not doctest.testmod(squad).failed
    assert normal_words("An  answer: THE U.S.A.") == ["answer", "usa"]
    assert f1("in the year 1976", "1976") == pytest.approx(0.5)
    metric = Squad("v1", keep_in_memory=True)
    several = [{"id": "q", "answers": {"text": ["a red car", "blue"], "answer_start": [0, 4]}}]
    assert metric.compute(predictions=[{"id": "q", "prediction_text": "Blue."}], references=several)["f1"] == 100


@pytest.mark.parametrize("seed", range(5))
def test_best_threshold_of_squad_2(seed):
    """Against every threshold tried one by one."""
    rng = np.random.default_rng(seed)
    n = 30
    possible = rng.random(n) < 0.6
    right = rng.random(n) < 0.5
    doubts = rng.normal(size=n).round(1).tolist()
    predictions = [
        {"id": str(i), "prediction_text": "yes" if right[i] else "no", "no_answer_probability": doubts[i]}
        for i in range(n)
    ]
    references = [
        {"id": str(i), "answers": {"text": ["yes"] if possible[i] else [], "answer_start": [0] if possible[i] else []}}
        for i in range(n)
    ]
    found = Squad("v2", keep_in_memory=True).compute(
        predictions=predictions, references=references, no_answer_threshold=math.inf
    )

    def score(threshold):
        silent = np.array(doubts) > threshold
        return 100 * np.where(possible, right & ~silent, silent).mean()

    assert found["exact"] == pytest.approx(100 * np.where(possible, right, False).mean())
    assert found["NoAns_total"] == (~possible).sum() and found["HasAns_total"] == possible.sum()
    for threshold in (-0.5, 0.0, 0.7):
        silenced = Squad("v2", keep_in_memory=True).compute(
            predictions=predictions, references=references, no_answer_threshold=threshold
        )
        assert silenced["exact"] == silenced["f1"] == pytest.approx(score(threshold))
        assert silenced["best_exact"] == found["best_exact"]
    best = max(score(t) for t in [-math.inf, *doubts])
    # equal doubts are taken one by one, as in the official script, which can only find more
    assert best - 1e-9 <= found["best_exact"] <= best + 100 * 3 / n


def test_a_question_without_prediction_is_told():
    with pytest.raises(ValueError, match="no prediction for the question '56d2"):
        Squad("v1", keep_in_memory=True).compute(predictions=answers("1976", "x")[:1] * 2, references=REFERENCES[:2])
    with pytest.raises(ValueError, match="only version 2"):
        Squad("v1", keep_in_memory=True).compute(
            predictions=answers("1976"), references=[{"id": QUESTIONS[0], "answers": {"text": [], "answer_start": []}}]
        )


def test_perplexity():
    """A fair die has perplexity 6 whatever the lengths; bits a byte come from the whole."""
    metric = Perplexity(keep_in_memory=True)
    found = metric.compute(predictions=[3 * math.log(6), 5 * math.log(6)], references=[3, 5], num_bytes=4)
    assert found == pytest.approx({"perplexity": 6.0, "loss": math.log(6), "bits_per_byte": 2 * math.log2(6)})
    with pytest.raises(ValueError, match="no token"):
        metric.compute(predictions=[0.0], references=[0])


def test_evaluate_loads_them_from_their_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path))
    for folder, config in (("glue", "rte"), ("squad", "v2"), ("perplexity", None)):
        module = evaluate.load(str(ROOT / "recipes" / "metrics" / folder), config)
        assert isinstance(module, evaluate.Metric) and module.info.citation
    module = evaluate.load(str(ROOT / "recipes" / "metrics" / "glue"), "rte")
    assert module.compute(predictions=[1, 0], references=[1, 1]) == {"accuracy": 0.5}


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
    assert {name: metric.to_dict()["chance"] for name, metric in found.items()} == chance
