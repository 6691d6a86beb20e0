"""Fine-tune a model on your own data: classification or regression of texts or pairs of texts.

python recipes/finetune_text.py --model ./my-bert --data reviews.csv --text-column review --label-column stars
python recipes/finetune_text.py --model BAAI/bge-small-en-v1.5 --data stanfordnlp/imdb --eval-split test --attention fmm
"""

import training.messages  # noqa: F401  # isort: skip

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from datasets import ClassLabel, Dataset, Value
from torch import Tensor
from training.classification import CORRELATIONS, ClassificationOptions, ClassificationTask, TextTask
from training.data import SUBSET_SEED, Source, check_cells
from training.options import described
from training.run import main

from hf_rfattn.results.schema import Metric

HELD_OUT = 0.1  # fraction of a single file that is held out for evaluation


@dataclass(kw_only=True)
class TextOptions(ClassificationOptions):
    data_config: str | None = described("Configuration of the dataset on the Hub.")
    text_column: str = described("Column with the text.", "text")
    text_pair_column: str | None = described("Column with the second text of pairs.")
    label_column: str = described("Column with the label: a class name, a whole number or a score.", "label")
    problem: Literal["classification", "regression"] | None = described(
        "Type of task. Default: regression if the labels are floating-point numbers, otherwise classification."
    )
    eval_share: float | None = described(
        "Fraction of the training examples to hold out for evaluation if there is no evaluation split. "
        f"Default: {HELD_OUT} if --data is a single file."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data is None:
            raise ValueError(
                "--data is missing. Give a CSV, JSON lines or parquet file, a folder of them, or a dataset on the Hub."
            )
        if self.eval_share is None and Path(self.data).expanduser().is_file():
            self.eval_share = HELD_OUT
        if self.eval_share is not None and not 0 < self.eval_share < 1:
            raise ValueError(f"--eval-share must be between 0 and 1, not {self.eval_share}.")
        if self.eval_share is not None and self.eval_split is not None:
            raise ValueError("--eval-split and --eval-share both choose the evaluation examples; give one of them.")


class OwnTextTask(ClassificationTask):
    name = "text"
    hub_name = "stanfordnlp/imdb"
    usual_length = 512

    def __init__(self, options: TextOptions):
        super().__init__(options)
        self.hub_config = options.data_config

    def load(self, source: Source) -> dict[str, Dataset]:
        options = self.options
        self.name = source.name.rpartition("/")[2]
        texts = tuple(filter(None, (options.text_column, options.text_pair_column)))
        split = options.eval_split or "validation"
        parts = {}
        for name in ("train",) if options.eval_share is not None else ("train", split):
            rows = source.load(name, [*texts, options.label_column])
            for column in (*texts, options.label_column):  # empty cells of CSV files are None
                check_cells(rows, column, lambda cell: cell is not None and str(cell).strip() != "", "filled in")
            parts[name] = rows.rename_columns({options.label_column: "label"})
        kind = label_type(parts["train"], options)
        labels = tuple(kind.names) if isinstance(kind, ClassLabel) else ()
        self.text_task = TextTask(texts, labels, ("f1_macro", "accuracy") if labels else CORRELATIONS, (split,))
        for name, rows in parts.items():
            if labels and rows.features["label"] != kind:
                rows = rows.cast_column("label", Value("string"))
            parts[name] = rows.cast_column("label", kind)
            if labels:  # datasets on the Hub mark missing labels with -1
                check_cells(parts[name], "label", range(len(labels)).__contains__, "a label")
        if options.eval_share is not None:
            halves = parts["train"].train_test_split(test_size=options.eval_share, seed=SUBSET_SEED)
            parts = {"train": halves["train"].flatten_indices(), split: halves["test"].flatten_indices()}
        return parts

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        found = super().score(split, predictions)
        if not self.text_task.labels:
            truth, given = (predictions[name].double().numpy() for name in ("references", "predictions"))
            constant = float(np.abs(truth - np.median(truth)).mean())
            error = float(np.abs(truth - given).mean())
            found["mean_absolute_error"] = Metric(error, len(truth), lower_is_better=True, chance=constant)
        return found


def label_type(train: Dataset, options: TextOptions) -> ClassLabel | Value:
    """Return the type of the labels: classes with their names, or floating-point numbers for regression."""
    kind, labels = train.features["label"], train["label"][:]
    if options.problem == "regression" or (options.problem is None and isinstance(labels[0], float)):
        return Value("float64")
    if isinstance(kind, ClassLabel):
        return kind
    names = list(map(str, sorted(set(labels))))
    if len(names) < 2 or len(names) == len(labels) > 2:
        raise ValueError(
            f"{len(labels)} examples have {len(names)} different labels, so {options.label_column!r} does not look "
            "like a column of classes. Choose another --label-column, or give --problem regression for scores."
        )
    return ClassLabel(names=names)


if __name__ == "__main__":
    main(OwnTextTask, TextOptions, __doc__)
