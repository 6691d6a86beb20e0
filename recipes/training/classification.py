"""Text classification and regression: what GLUE, SNLI and own texts share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from hf_rfattn.results import Metric

from .data import Source, check_labels, check_texts, find_source, load_split, take
from .metrics import GLUE, measure
from .models import Collator, choose_length, load_model, load_tokenizer
from .options import RunOptions
from .task import Prepared, Task


@dataclass(frozen=True)
class TextTask:
    """A task: the columns of its texts, its labels (none: a score), its evaluation splits."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] = ()
    evaluation: tuple[str, ...] = ("validation",)


class ClassificationTask(Task[RunOptions]):
    """Derive from it, and say in `__init__` what the task is."""

    task_type = "text-classification"
    text_task: TextTask
    hub_name: str
    hub_config: str | None
    usual_length = 128
    drop_unlabelled = False  # SNLI marks pairs without a gold label by -1

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured; the last one is what tables show."""
        return GLUE[self.name]

    @property
    def main_metric(self) -> str:  # type: ignore[override]
        return self.metrics[-1]

    def prepare(self) -> Prepared:
        options = self.options
        source = find_source(options.data, self.hub_name, self.hub_config, self.name, options.data_name)
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
        return Prepared(
            model=model,
            tokenizer=tokenizer,
            source=source,
            examples=examples,
            train=rows.pop("train"),
            evaluation=rows,
            collate=Collator(tokenizer),
            max_length=length,
        )

    def load(self, source: Source) -> dict[str, Dataset]:
        """The splits, "train" first, checked; labels are numbers in the column "label"."""
        task, given = self.text_task, self.options.eval_split
        splits = {}
        for split in ("train", *((given,) if given else task.evaluation)):
            examples = load_split(source, split, [*task.texts, "label"])
            if self.drop_unlabelled:
                examples = examples.filter(
                    lambda labels: [x != -1 for x in labels], input_columns="label", batched=True
                )
            check_texts(examples, task.texts, f"{source.name}, split {split!r}")
            check_labels(examples, len(task.labels), f"{source.name}, split {split!r}")
            splits[split] = examples
        return splits

    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = outputs.logits
        predictions = logits.argmax(-1) if self.text_task.labels else logits[:, 0].float()
        return {"predictions": predictions, "references": batch["labels"]}

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        """Chance is the best constant answer. Metrics of a second split carry its name: accuracy_mismatched."""
        truth = predictions["references"]
        answers = [torch.full_like(truth, label) for label in range(max(1, len(self.text_task.labels)))]
        constants = [measure(self.metrics, answer.numpy(), truth.numpy()) for answer in answers]
        second = split != (self.options.eval_split or self.text_task.evaluation[0])
        suffix = f"_{split.removeprefix('validation_')}" if second else ""
        return {
            f"{name}{suffix}": Metric(value, len(truth), 1, chance=max(constant[name] for constant in constants))
            for name, value in measure(self.metrics, predictions["predictions"].numpy(), truth.numpy()).items()
        }
