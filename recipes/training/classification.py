"""Text classification and regression: what the GLUE tasks and SNLI share."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from hf_rfattn.results import Metric

from .data import Source, check_labels, check_scores, check_texts, find_source, load_split, take
from .metrics import GLUE, glue
from .models import choose_length, collator, load_config, load_model, load_tokenizer
from .options import RunOptions
from .task import Prepared, Task

SCORES = (0.0, 5.0)  # of tasks without labels


@dataclass(frozen=True)
class TextTask:
    """A task: the columns of its texts, its labels (none: a score within SCORES), its splits."""

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

    def prepare(self) -> Prepared:
        options = self.options
        source = find_source(options.data, self.hub_name, self.hub_config, self.name, options.data_name)
        loaded = self.load(source)
        task = self.text_task
        splits = [split for split in loaded if split != "train"]
        examples = {
            split: take(part, options.max_train_samples if split == "train" else options.max_eval_samples)
            for split, part in loaded.items()
        }
        names = dict(enumerate(task.labels))
        config = load_config(
            options,
            num_labels=len(names) or 1,
            problem_type="single_label_classification" if names else "regression",
            finetuning_task=self.name,
            **({"id2label": names, "label2id": {name: i for i, name in names.items()}} if names else {}),
        )
        tokenizer = load_tokenizer(options)
        model = load_model(AutoModelForSequenceClassification, options, config, tokenizer)
        length = choose_length(model, options, self.usual_length, tokenizer)
        encode = partial(encode_texts, tokenizer=tokenizer, texts=task.texts, max_length=length)
        rows = {
            split: part.map(encode, batched=True, remove_columns=part.column_names, desc=f"tokens of {split}")
            for split, part in examples.items()
        }
        return Prepared(
            model=model,
            tokenizer=tokenizer,
            source=source,
            examples=examples,
            train=rows["train"],
            evaluation={split: rows[split] for split in splits},
            collate=collator(tokenizer),
            max_length=length,
        )

    def load(self, source: Source) -> dict[str, Dataset]:
        """The splits, "train" first, checked; labels are numbers in the column "label"."""
        options = self.options
        splits = (options.eval_split,) if options.eval_split else self.text_task.evaluation
        return {split: self._load(source, split) for split in ("train", *splits)}

    def _load(self, source: Source, split: str) -> Dataset:
        task, where = self.text_task, f"{source.name}, split {split!r}"
        examples = load_split(source, split, [*task.texts, "label"])
        if self.drop_unlabelled:
            examples = examples.filter(
                lambda labels: [label != -1 for label in labels], input_columns="label", batched=True
            )
        check_texts(examples, task.texts, where)
        if task.labels:
            check_labels(examples, len(task.labels), where)
        else:
            check_scores(examples, *SCORES, where)
        return examples

    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        logits = outputs.logits
        return {
            "predictions": logits.argmax(-1) if self.text_task.labels else logits[:, 0].float(),
            "references": batch["labels"],
        }

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        references = predictions["references"]
        values = self.measure(predictions["predictions"], references)
        constants = [
            self.measure(torch.full_like(references, answer), references)
            for answer in range(max(1, len(self.text_task.labels)))
        ]
        return {
            self.metric_name(name, split): Metric(
                value, len(references), 1, chance=max(constant[name] for constant in constants)
            )
            for name, value in values.items()
        }

    def measure(self, predictions: Tensor, references: Tensor) -> dict[str, float]:
        return glue(self.name, predictions.numpy(), references.numpy())

    @property
    def main_metric(self) -> str:  # type: ignore[override]
        return GLUE[self.name][-1]

    def metric_name(self, name: str, split: str) -> str:
        """Metrics of a second split carry its name: accuracy_mismatched."""
        first = self.options.eval_split or self.text_task.evaluation[0]
        return name if split == first else f"{name}_{split.removeprefix('validation_')}"


def encode_texts(
    batch: Mapping[str, list[Any]], tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...], max_length: int
) -> dict[str, Any]:
    """Token lists, cut at `max_length`, with the label."""
    encoded = tokenizer(*(batch[column] for column in texts), truncation=True, max_length=max_length)
    encoded["labels"] = batch["label"]
    encoded["length"] = [len(ids) for ids in encoded["input_ids"]]
    return encoded
