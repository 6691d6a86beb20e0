"""Text classification and regression, shared by the recipes for GLUE, SNLI and your own texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hf_rfattn.results.schema import Metric

from .data import Source, check_cells, check_texts, find_source, take
from .models import Collator, choose_length, load_model, load_tokenizer
from .options import RunOptions, described
from .task import Prepared, Task


def _correlation(statistic: Callable[..., Any]) -> Callable[..., float]:
    """Return a correlation that is 0 if either input is constant."""

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
ACCURACY, CORRELATIONS = ("accuracy",), ("pearson", "spearmanr")


def measure(names: Sequence[str], predictions: Any, references: Any) -> dict[str, float]:
    """Compute the metrics with these names.

    >>> measure(("accuracy", "f1"), [0, 1, 1], [0, 1, 0])
    {'accuracy': 0.6666666666666666, 'f1': 0.6666666666666666}
    """
    return {name: float(METRICS[name](references, predictions)) for name in names}


@dataclass(frozen=True)
class TextTask:
    """A classification task, or a regression task if it has no labels. `texts`: columns of the one or two texts.
    `metrics`: the last one is the main metric. `evaluation`: splits to evaluate on.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ACCURACY
    evaluation: tuple[str, ...] = ("validation",)


@dataclass(kw_only=True)
class ClassificationOptions(RunOptions):
    pooling: Literal["cls", "mean", "model"] | None = described(
        "Input of the classification head of a BERT-like encoder: first token (cls), mean of all tokens, or the pooler "
        "of the model, which embedding models have not trained. Default: as the model was trained."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling == "mean" and self.sequence_parallel > 1:
            raise ValueError("--pooling mean does not work with --sequence-parallel; choose --pooling cls or model.")


class ClassificationTask(Task):
    """Base class. Derived classes set the attributes below, on the class or in `__init__`."""

    task_type = "text-classification"
    text_task: TextTask
    hub_name: str
    hub_config: str | None
    usual_length = 128
    drop_unlabelled = False  # drop examples with the label -1, which marks pairs without a gold label in SNLI

    @property
    def main_metric(self) -> str:  # type: ignore[override]
        return self.text_task.metrics[-1]

    def prepare(self) -> Prepared:
        options = self.options
        source = find_source(options.data, self.hub_name, self.hub_config, options.data_name)
        loaded = self.load(source)
        task = self.text_task
        most = {"train": options.max_train_samples}
        examples = {split: take(part, most.get(split, options.max_eval_samples)) for split, part in loaded.items()}
        names = dict(enumerate(task.labels))
        tokenizer = load_tokenizer(options)
        model = load_model(
            AutoModelForSequenceClassification,
            options,
            tokenizer,
            num_labels=len(names) or 1,
            problem_type="single_label_classification" if names else "regression",
            **({"id2label": names, "label2id": {name: i for i, name in names.items()}} if names else {}),
        )
        length = choose_length(model, options, self.usual_length, tokenizer)

        def encode(batch: Mapping[str, list[Any]]) -> Any:
            encoded = tokenizer(*(batch[column] for column in task.texts), truncation=True, max_length=length)
            return {**encoded, "labels": batch["label"], "length": [len(ids) for ids in encoded["input_ids"]]}

        rows = {
            split: part.map(encode, batched=True, remove_columns=part.column_names, desc=f"tokens of {split}")
            for split, part in examples.items()
        }
        return Prepared(model, tokenizer, source, examples, rows.pop("train"), rows, Collator(tokenizer), length)

    def load(self, source: Source) -> dict[str, Dataset]:
        """Load and check the splits, "train" first. The column "label" contains class numbers or scores."""
        task, given, count = self.text_task, self.options.eval_split, len(self.text_task.labels)
        splits = {}
        for split in ("train", *((given,) if given else task.evaluation)):
            examples = source.load(split, [*task.texts, "label"])
            if self.drop_unlabelled:
                examples = examples.filter(lambda label: label != -1, input_columns="label")
            check_texts(examples, task.texts)
            if count:
                check_cells(examples, "label", range(count).__contains__, f"a label from 0 to {count - 1}")
            splits[split] = examples
        return splits

    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = outputs.logits
        predictions = logits.argmax(-1) if self.text_task.labels else logits[:, 0].float()
        return {"predictions": predictions, "references": batch["labels"]}

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Chance is the score of the best constant prediction. Names of metrics of a second evaluation split end with
        the name of the split, such as accuracy_mismatched.
        """
        task, truth = self.text_task, predictions["references"]
        answers = [torch.full_like(truth, label) for label in range(max(1, len(task.labels)))]
        constants = [measure(task.metrics, answer.numpy(), truth.numpy()) for answer in answers]
        second = split != (self.options.eval_split or task.evaluation[0])
        suffix = f"_{split.removeprefix('validation_')}" if second else ""
        return {
            f"{name}{suffix}": Metric(value, len(truth), 1, chance=max(constant[name] for constant in constants))
            for name, value in measure(task.metrics, predictions["predictions"].numpy(), truth.numpy()).items()
        }
