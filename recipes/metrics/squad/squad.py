"""Exact match and F1 of SQuAD, as a module of 🤗 evaluate: `evaluate.load("recipes/metrics/squad", "v2")`.

Inputs and outputs are those of evaluate's own "squad" (configuration "v1") and "squad_v2" ("v2").
"""

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import evaluate

CITATION = """
@inproceedings{rajpurkar2016squad,
  title = {{SQuAD}: 100,000+ Questions for Machine Comprehension of Text},
  author = {Rajpurkar, Pranav and Zhang, Jian and Lopyrev, Konstantin and Liang, Percy},
  booktitle = {Proceedings of EMNLP},
  year = {2016}
}
@inproceedings{rajpurkar2018know,
  title = {Know What You Don't Know: Unanswerable Questions for {SQuAD}},
  author = {Rajpurkar, Pranav and Jia, Robin and Liang, Percy},
  booktitle = {Proceedings of ACL},
  year = {2018}
}
"""
DESCRIPTION = "Share of answers that are right to the word, and mean overlap of words, both out of 100."
PUNCTUATION = str.maketrans("", "", string.punctuation)
VERSIONS = ("v1", "v2")


def normal_words(text: str) -> list[str]:
    """Words that count: in lower case, without punctuation and articles.

    >>> normal_words("The  Eiffel-Tower, a tower.")
    ['eiffeltower', 'tower']
    """
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def exact_match(prediction: str, truth: str) -> float:
    return float(normal_words(prediction) == normal_words(truth))


def f1(prediction: str, truth: str) -> float:
    """Overlap of words; an empty answer matches an empty one alone.

    >>> f1("the red car", "red bus"), f1("", "")
    (0.5, 1.0)
    """
    found, wanted = normal_words(prediction), normal_words(truth)
    if not found or not wanted:
        return float(found == wanted)
    return 2 * sum((Counter(found) & Counter(wanted)).values()) / (len(found) + len(wanted))


def best_over_truths(prediction: str, truths: Sequence[str]) -> tuple[float, float]:
    """(exact match, F1) against the truth that fits best."""
    return max(exact_match(prediction, t) for t in truths), max(f1(prediction, t) for t in truths)


def best_threshold(
    scores: Mapping[str, float], doubts: Mapping[str, float], answered: Mapping[str, bool], possible: Mapping[str, bool]
) -> tuple[float, float]:
    """The highest total over all thresholds, and where: questions whose doubt is above it go unanswered.

    Begins with no question answered, which is right for those without an answer, and answers one more at a time.
    """
    total = best = float(sum(not has for has in possible.values()))
    threshold = 0.0
    for question in sorted(doubts, key=lambda q: doubts[q]):
        if possible[question]:
            total += scores[question]
        elif answered[question]:
            total -= 1
        if total > best:
            best, threshold = total, doubts[question]
    return 100 * best / len(scores), threshold


class Squad(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in VERSIONS:
            raise ValueError(f"SQuAD has no version {self.config_name!r}; it has {', '.join(VERSIONS)}.")
        prediction = {"id": datasets.Value("string"), "prediction_text": datasets.Value("string")}
        if self.config_name == "v2":
            prediction["no_answer_probability"] = datasets.Value("float64")
        answers = {
            "text": datasets.List(datasets.Value("string")),
            "answer_start": datasets.List(datasets.Value("int64")),
        }
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description="predictions: id and prediction_text (v2: and no_answer_probability, or any measure of "
            "doubt); references: id and answers. no_answer_threshold: above it no answer counts as given.",
            features=datasets.Features(
                {"predictions": prediction, "references": {"id": datasets.Value("string"), "answers": answers}}
            ),
        )

    def _compute(
        self,
        predictions: list[dict[str, Any]],
        references: list[dict[str, Any]],
        no_answer_threshold: float = 1.0,
    ) -> dict[str, float]:
        by_id = {p["id"]: p for p in predictions}
        exact, overlap, possible = {}, {}, {}
        for reference in references:
            question, texts = reference["id"], list(reference["answers"]["text"])
            if question not in by_id:
                raise ValueError(f"There is no prediction for the question {question!r}.")
            possible[question] = bool(texts)
            truths = [t for t in texts if normal_words(t)] or [""] if self.config_name == "v2" else texts
            if not truths:
                raise ValueError(f"Question {question!r} has no answer, which only version 2 knows of.")
            exact[question], overlap[question] = best_over_truths(by_id[question]["prediction_text"], truths)
        if self.config_name == "v1":
            return {"exact_match": _percent(exact, exact), "f1": _percent(overlap, overlap)}
        return self._version_2(by_id, exact, overlap, possible, no_answer_threshold)

    def _version_2(
        self,
        by_id: Mapping[str, Any],
        exact: Mapping[str, float],
        overlap: Mapping[str, float],
        possible: Mapping[str, bool],
        threshold: float,
    ) -> dict[str, float]:
        found: dict[str, float] = {}
        doubts = {q: by_id[q]["no_answer_probability"] for q in exact}

        def with_silence(scores: Mapping[str, float]) -> dict[str, float]:
            """Where the doubt is above the threshold no answer counts as given."""
            return {q: float(not possible[q]) if doubts[q] > threshold else scores[q] for q in scores}

        final, final_overlap = with_silence(exact), with_silence(overlap)
        groups = {
            "": list(exact),
            "HasAns_": [q for q in exact if possible[q]],
            "NoAns_": [q for q in exact if not possible[q]],
        }
        for prefix, questions in groups.items():
            if questions:
                found |= {
                    f"{prefix}exact": _percent(final, questions),
                    f"{prefix}f1": _percent(final_overlap, questions),
                    f"{prefix}total": len(questions),
                }
        answered = {q: bool(by_id[q]["prediction_text"]) for q in exact}
        for name, scores in (("exact", exact), ("f1", overlap)):
            found[f"best_{name}"], found[f"best_{name}_thresh"] = best_threshold(scores, doubts, answered, possible)
        return found


def _percent(scores: Mapping[str, float], questions: Any) -> float:
    return 100.0 * sum(scores[q] for q in questions) / len(questions)
