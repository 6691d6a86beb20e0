"""Fine-tune a model on one of the nine GLUE tasks.

accelerate launch recipes/finetune_glue.py --task sst2 --model google-bert/bert-base-uncased --attention favor+
"""

import training.messages  # noqa: F401  # isort: skip

from dataclasses import dataclass
from typing import Literal

from training.classification import ClassificationTask, TextTask
from training.options import RunOptions, described
from training.run import main

MATCHED = ("validation_matched", "validation_mismatched")
TASKS = {
    "cola": TextTask(("sentence",), ("unacceptable", "acceptable")),
    "sst2": TextTask(("sentence",), ("negative", "positive")),
    "mrpc": TextTask(("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "stsb": TextTask(("sentence1", "sentence2")),
    "qqp": TextTask(("question1", "question2"), ("not_duplicate", "duplicate")),
    "mnli": TextTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), evaluation=MATCHED),
    "qnli": TextTask(("question", "sentence"), ("entailment", "not_entailment")),
    "rte": TextTask(("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "wnli": TextTask(("sentence1", "sentence2"), ("not_entailment", "entailment")),
}


@dataclass(kw_only=True)
class GlueOptions(RunOptions):
    task: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"] = described(
        "Which of the nine tasks.", "sst2"
    )


class GlueTask(ClassificationTask):
    hub_name = "nyu-mll/glue"

    def __init__(self, options: GlueOptions):
        super().__init__(options)
        self.name = self.hub_config = options.task
        self.text_task = TASKS[options.task]


if __name__ == "__main__":
    main(GlueTask, GlueOptions, __doc__)
