"""Fine-tune a model on one of the nine GLUE tasks.

accelerate launch recipes/finetune_glue.py --task sst2 --model google-bert/bert-base-uncased --attention favor+
"""

import training.messages  # noqa: F401  # isort: skip

from dataclasses import dataclass
from typing import Literal

from training.classification import CORRELATIONS, ClassificationOptions, ClassificationTask, TextTask
from training.options import described
from training.run import main

MATCHED = ("validation_matched", "validation_mismatched")
PAIR, F1 = ("sentence1", "sentence2"), ("accuracy", "f1")
TASKS = {
    "cola": TextTask(("sentence",), ("unacceptable", "acceptable"), ("matthews_correlation",)),
    "sst2": TextTask(("sentence",), ("negative", "positive")),
    "mrpc": TextTask(PAIR, ("not_equivalent", "equivalent"), F1),
    "stsb": TextTask(PAIR, (), CORRELATIONS),
    "qqp": TextTask(("question1", "question2"), ("not_duplicate", "duplicate"), F1),
    "mnli": TextTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"), evaluation=MATCHED),
    "qnli": TextTask(("question", "sentence"), ("entailment", "not_entailment")),
    "rte": TextTask(PAIR, ("entailment", "not_entailment")),
    "wnli": TextTask(PAIR, ("not_entailment", "entailment")),
}


@dataclass(kw_only=True)
class GlueOptions(ClassificationOptions):
    task: Literal["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"] = described(
        "GLUE task to fine-tune on.", "sst2"
    )


class GlueTask(ClassificationTask):
    hub_name = "nyu-mll/glue"

    def __init__(self, options: GlueOptions):
        super().__init__(options)
        self.name = self.hub_config = options.task
        self.text_task = TASKS[options.task]


if __name__ == "__main__":
    main(GlueTask, GlueOptions, __doc__)
