"""Fine-tune a model on SNLI (natural language inference).

python recipes/finetune_snli.py --model google-bert/bert-base-uncased --attention favor+
"""

import training.messages  # noqa: F401  # isort: skip

from training.classification import ClassificationOptions, ClassificationTask, TextTask
from training.run import main


class SnliTask(ClassificationTask):
    name = "snli"
    hub_name, hub_config = "stanfordnlp/snli", None
    text_task = TextTask(("premise", "hypothesis"), ("entailment", "neutral", "contradiction"))
    drop_unlabelled = True


if __name__ == "__main__":
    main(SnliTask, ClassificationOptions, __doc__)
