"""Train a language model on WikiText, from a pretrained one or from scratch; measured by perplexity.

accelerate launch recipes/finetune_lm.py --model openai-community/gpt2 --attention favor+
accelerate launch recipes/finetune_lm.py --from-scratch recipes/gpt2_mini.json --max-length 256 --learning-rate 1e-3
"""

import training.messages  # noqa: F401  # isort: skip

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from torch import Tensor
from training.data import find_source
from training.language import (
    config_from_scratch,
    load_text,
    perplexity,
    split_blocks,
    split_windows,
    tokens_of,
    train_tokenizer,
    window_losses,
)
from training.models import Collator, choose_length, load_model, load_tokenizer, with_padding
from training.options import RunOptions, described
from training.run import main
from training.session import TOKENIZER
from training.task import Prepared, Task
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_rfattn.results import Metric

USUAL_LENGTH = 512


@dataclass(kw_only=True)
class LanguageOptions(RunOptions):
    from_scratch: str | None = described(
        "Begin with random weights: a JSON file of config fields (GPT-2 unless it names a model_type), or a model's "
        "folder whose shape to take."
    )
    vocab_size: int = described(
        "Of the tokenizer that is trained on the text, if none is given to --from-scratch.", 8192
    )
    data_config: str = described("Which WikiText on the Hub.", "wikitext-2-raw-v1")
    eval_batch_size: int = described(
        "Windows a process evaluates at once; logits of a large vocabulary fill memory.", 8
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.model is None) == (self.from_scratch is None):
            raise ValueError("Give --model or --from-scratch, one of them.")
        if self.group_by_length:
            raise ValueError("--group-by-length has no meaning here: all blocks are of one length.")
        if self.from_scratch and self.model_name is None:
            self.model_name = f"{Path(self.from_scratch).stem} from scratch"


class LanguageTask(Task):
    name = "wikitext"
    task_type = "text-generation"
    main_metric = "perplexity"

    def __init__(self, options: LanguageOptions):
        super().__init__(options)
        self.num_bytes: dict[str, int] = {}

    def prepare(self) -> Prepared:
        options = self.options
        source = find_source(options.data, "Salesforce/wikitext", options.data_config, options.data_name)
        split = options.eval_split or "validation"
        examples = {
            "train": load_text(source, "train", options.max_train_samples),
            split: load_text(source, split, options.max_eval_samples),
        }
        tokenizer = self._tokenizer(examples["train"])
        if options.from_scratch:
            model = AutoModelForCausalLM.from_config(config_from_scratch(options.from_scratch, tokenizer))
        else:
            model = load_model(AutoModelForCausalLM, options, tokenizer)
        length = choose_length(model, options, USUAL_LENGTH, tokenizer)
        self.num_bytes = {split: sum(len(text.encode()) for text in examples[split]["text"][:])}
        train = split_blocks(tokens_of(examples["train"], tokenizer), length)
        evaluation = {split: split_windows(tokens_of(examples[split], tokenizer), length)}
        collate = Collator(tokenizer, {"labels": -100})
        return Prepared(model, tokenizer, source, examples, train, evaluation, collate, length)

    def _tokenizer(self, text: Dataset) -> PreTrainedTokenizerBase:
        """The model's, or one of the user's, or one that the main process trains and leaves for the others."""
        options = self.options
        if options.tokenizer or not options.from_scratch:
            return load_tokenizer(options)
        folder = Path(options.output) / TOKENIZER
        if PartialState().is_main_process and not (options.resume and folder.exists()):
            train_tokenizer(text, options.vocab_size).save_pretrained(folder)
        return with_padding(PreTrainedTokenizerFast.from_pretrained(folder))

    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return window_losses(outputs.logits, batch["labels"])

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        return perplexity(predictions["losses"].tolist(), predictions["tokens"].tolist(), self.num_bytes[split])


if __name__ == "__main__":
    main(LanguageTask, LanguageOptions, __doc__)
