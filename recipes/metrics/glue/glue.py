"""Metrics of the GLUE tasks, as a module of 🤗 evaluate: `evaluate.load("recipes/metrics/glue", "mrpc")`."""

import math
from collections.abc import Callable

import datasets
import evaluate
import numpy as np

CITATION = """
@inproceedings{wang2019glue,
  title = {{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author = {Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle = {International Conference on Learning Representations},
  year = {2019}
}
"""
DESCRIPTION = "What each GLUE task is measured by; the task is the configuration. SNLI is measured like MNLI."


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Share of labels that are right."""
    return float((predictions == references).mean())


def f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Of class 1: the harmonic mean of precision and recall; 0 where neither exists."""
    hits = int(((predictions == 1) & (references == 1)).sum())
    found, there = int((predictions == 1).sum()), int((references == 1).sum())
    return 2 * hits / (found + there) if found + there else 0.0


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Correlation of predicted and true labels as 0/1 variables; 0 where one of them is constant."""
    return _correlation(predictions.astype(float), references.astype(float))


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    return _correlation(predictions, references)


def spearmanr(predictions: np.ndarray, references: np.ndarray) -> float:
    """Pearson's correlation of the ranks, equal values sharing their mean rank."""
    return _correlation(_ranks(predictions), _ranks(references))


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype(float) - x.mean(), y.astype(float) - y.mean()
    size = math.sqrt(float((x * x).sum()) * float((y * y).sum()))
    return float((x * y).sum()) / size if size else 0.0


def _ranks(x: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


METRICS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], float], ...]] = {
    "cola": (matthews_correlation,),
    "sst2": (accuracy,),
    "mrpc": (accuracy, f1),
    "stsb": (pearson, spearmanr),
    "qqp": (accuracy, f1),
    "mnli": (accuracy,),
    "qnli": (accuracy,),
    "rte": (accuracy,),
    "wnli": (accuracy,),
    "snli": (accuracy,),
}


class Glue(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise ValueError(f"GLUE has no task {self.config_name!r}; it has {', '.join(METRICS)}.")
        kind = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description="predictions and references: one label (stsb: one score) an example.",
            features=datasets.Features({"predictions": kind, "references": kind}),
            format="numpy",
        )

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        return {metric.__name__: metric(predictions, references) for metric in METRICS[self.config_name]}
