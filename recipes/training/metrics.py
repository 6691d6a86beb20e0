"""The metrics of the tasks: those of GLUE by scikit-learn and scipy, those of SQuAD as its official script has them."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

PUNCTUATION = str.maketrans("", "", string.punctuation)


def _correlation(statistic: Callable[..., Any]) -> Callable[..., float]:
    """0 where one of the two is constant."""

    def correlation(references: Any, predictions: Any) -> float:
        constant = np.ptp(references) == 0 or np.ptp(predictions) == 0
        return 0.0 if constant else float(statistic(references, predictions).statistic)

    return correlation


GLUE_METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy_score,
    "f1": lambda references, predictions: f1_score(references, predictions, zero_division=0.0),
    "matthews_correlation": matthews_corrcoef,
    "pearson": _correlation(pearsonr),
    "spearmanr": _correlation(spearmanr),
}
GLUE: dict[str, tuple[str, ...]] = {  # what each task is measured by; the last one is what tables show
    "cola": ("matthews_correlation",),
    "mrpc": ("accuracy", "f1"),
    "stsb": ("pearson", "spearmanr"),
    "qqp": ("accuracy", "f1"),
    **dict.fromkeys(("sst2", "mnli", "qnli", "rte", "wnli", "snli"), ("accuracy",)),
}


def glue(task: str, predictions: Any, references: Any) -> dict[str, float]:
    """
    >>> glue("mrpc", [0, 1, 1], [0, 1, 0])
    {'accuracy': 0.6666666666666666, 'f1': 0.6666666666666666}
    """
    return {name: float(GLUE_METRICS[name](references, predictions)) for name in GLUE[task]}


def text_scores(predictions: Any, references: Any, classes: bool) -> dict[str, float]:
    """Of classes: accuracy and the mean of their F1; of numbers: correlations.

    >>> text_scores([0, 1, 1], [0, 1, 0], classes=True)
    {'accuracy': 0.6666666666666666, 'f1_macro': 0.6666666666666666}
    """
    if classes:
        mean = f1_score(references, predictions, average="macro", zero_division=0.0)
        return {"accuracy": float(accuracy_score(references, predictions)), "f1_macro": float(mean)}
    return {name: float(GLUE_METRICS[name](references, predictions)) for name in GLUE["stsb"]}


def perplexity(losses: Sequence[float], tokens: Sequence[int], num_bytes: int | None = None) -> dict[str, float]:
    """From the negative log-likelihood of each piece of text and its number of tokens; bits a byte do not depend on the
    tokenizer.
    """
    total, count = math.fsum(losses), sum(tokens)
    if count < 1:
        raise ValueError("There is no token to be predicted.")
    mean = total / count
    found = {"perplexity": math.exp(mean) if mean < 700 else math.inf, "loss": mean}
    return found | ({"bits_per_byte": total / math.log(2) / num_bytes} if num_bytes else {})


def normal_words(text: str) -> list[str]:
    """Words that count: in lower case, without punctuation and articles.

    >>> normal_words("The  Eiffel-Tower, a tower.")
    ['eiffeltower', 'tower']
    """
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def exact_match(prediction: str, truth: str) -> float:
    return float(normal_words(prediction) == normal_words(truth))


def word_f1(prediction: str, truth: str) -> float:
    """Overlap of words; an empty answer matches an empty one alone.

    >>> word_f1("the red car", "red bus"), word_f1("", "")
    (0.5, 1.0)
    """
    found, wanted = normal_words(prediction), normal_words(truth)
    if not found or not wanted:
        return float(found == wanted)
    return 2 * sum((Counter(found) & Counter(wanted)).values()) / (len(found) + len(wanted))


def squad(answers: Mapping[str, str], truths: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Version 1.1: exact match and F1 out of 100, against the truth that fits best. Both by question."""
    scores = _scores(answers, truths)
    return {"exact_match": _percent(scores["exact"]), "f1": _percent(scores["f1"])}


def squad_v2(
    answers: Mapping[str, str],
    truths: Mapping[str, Sequence[str]],
    doubts: Mapping[str, float],
    threshold: float = 1.0,
) -> dict[str, float]:
    """Version 2, where a question may have no truth. An answer whose doubt is above the threshold is not given; "best_"
    is over all thresholds.
    """
    possible = {q: bool(texts) for q, texts in truths.items()}
    scores = _scores(answers, {q: [t for t in texts if normal_words(t)] or [""] for q, texts in truths.items()})
    groups = {"": list(truths), "HasAns_": [q for q in truths if possible[q]]}
    groups["NoAns_"] = [q for q in truths if not possible[q]]
    found: dict[str, float] = {}
    for prefix, questions in groups.items():
        for name, by_question in scores.items() if questions else ():
            silent = {q: float(not possible[q]) if doubts[q] > threshold else by_question[q] for q in questions}
            found[f"{prefix}{name}"] = _percent(silent)
        if questions:
            found[f"{prefix}total"] = len(questions)
    for name, by_question in scores.items():
        best = _best_threshold(by_question, answers, doubts, possible)
        found[f"best_{name}"], found[f"best_{name}_thresh"] = best
    return found


def _scores(answers: Mapping[str, str], truths: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    for question, texts in truths.items():
        if question not in answers:
            raise ValueError(f"There is no prediction for the question {question!r}.")
        if not texts:
            raise ValueError(f"Question {question!r} has no answer, which only version 2 knows of.")
    return {
        name: {q: max(measure(answers[q], truth) for truth in texts) for q, texts in truths.items()}
        for name, measure in (("exact", exact_match), ("f1", word_f1))
    }


def _percent(scores: Mapping[str, float]) -> float:
    return 100.0 * sum(scores.values()) / len(scores)


def _best_threshold(
    scores: Mapping[str, float], answers: Mapping[str, str], doubts: Mapping[str, float], possible: Mapping[str, bool]
) -> tuple[float, float]:
    """The highest score over all thresholds, and where: begins with no question answered, and answers one more at a
    time, as the official script does.
    """
    total = best = float(sum(not has for has in possible.values()))
    threshold = 0.0
    for question in sorted(scores, key=lambda q: doubts[q]):
        if possible[question]:
            total += scores[question]
        elif answers[question]:
            total -= 1
        if total > best:
            best, threshold = total, doubts[question]
    return 100 * best / len(scores), threshold
