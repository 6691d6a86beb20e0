"""The metrics of the tasks: those of GLUE by scikit-learn and scipy, those of SQuAD as its official script has them."""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
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


METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy_score,
    "f1_macro": lambda references, predictions: f1_score(references, predictions, average="macro", zero_division=0.0),
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
CLASSES, REGRESSION = ("f1_macro", "accuracy"), GLUE["stsb"]  # of own texts


def measure(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """
    >>> measure(GLUE["mrpc"], [0, 1, 1], [0, 1, 0])
    {'accuracy': 0.6666666666666666, 'f1': 0.6666666666666666}
    """
    return {name: float(METRICS[name](references, predictions)) for name in names}


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
    return {
        name: 100 * fmean(max(measure(answers[q], truth) for truth in texts) for q, texts in truths.items())
        for name, measure in (("exact_match", exact_match), ("f1", word_f1))
    }


def squad_v2(
    answers: Mapping[str, str], truths: Mapping[str, Sequence[str]], doubts: Mapping[str, float], threshold: float
) -> dict[str, float]:
    """Version 2, where a question may have no truth: an answer whose doubt is above the threshold is not given.

    Also for the questions with an answer (HasAns_) and those without (NoAns_).
    """
    given = {q: "" if doubts[q] > threshold else answer for q, answer in answers.items()}
    texts = {q: [t for t in found if normal_words(t)] or [""] for q, found in truths.items()}
    groups = {"": texts}
    groups["HasAns_"] = {q: texts[q] for q, found in truths.items() if found}
    groups["NoAns_"] = {q: texts[q] for q, found in truths.items() if not found}
    scores = {prefix: squad(given, group) for prefix, group in groups.items() if group}
    return {f"{prefix}{name}": value for prefix, found in scores.items() for name, value in found.items()}
