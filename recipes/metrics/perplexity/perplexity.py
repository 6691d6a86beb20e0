"""Perplexity from log-likelihoods, as a module of 🤗 evaluate: `evaluate.load("recipes/metrics/perplexity")`.

Unlike evaluate's own "perplexity" it loads no model: it is given what a model has said of each piece of text.
"""

import math

import datasets
import evaluate

CITATION = """
@article{jelinek1977perplexity,
  title = {Perplexity: a measure of the difficulty of speech recognition tasks},
  author = {Jelinek, Fred and Mercer, Robert L. and Bahl, Lalit R. and Baker, James K.},
  journal = {The Journal of the Acoustical Society of America},
  volume = {62},
  year = {1977}
}
"""
DESCRIPTION = "exp of the mean negative log-likelihood of a token; and bits a byte, which tokenizers do not change."


class Perplexity(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description="predictions: negative log-likelihood (natural logarithm) of each piece of text, summed "
            "over its tokens; references: how many tokens that were. num_bytes: of the whole text, if known.",
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(
        self, predictions: list[float], references: list[int], num_bytes: int | None = None
    ) -> dict[str, float]:
        total, tokens = math.fsum(predictions), sum(references)
        if tokens < 1:
            raise ValueError("There is no token to be predicted.")
        mean = total / tokens
        found = {"perplexity": math.exp(mean) if mean < 700 else math.inf, "loss": mean}
        if num_bytes:
            found["bits_per_byte"] = total / math.log(2) / num_bytes
        return found
