"""Train a language model on WikiText, pretrained or from scratch, and measure its perplexity.

accelerate launch recipes/finetune_lm.py --model openai-community/gpt2 --attention favor+
accelerate launch recipes/finetune_lm.py --model openai-community/gpt2 --from-scratch --attention fmm --epochs 10
"""

import training.messages  # noqa: F401  # isort: skip

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from training.data import find_source
from training.language import load_text, perplexity, split_blocks, split_windows, tokens_of, window_losses
from training.models import Collator, choose_length, load_model, load_tokenizer, read_config
from training.options import RunOptions, described
from training.run import main
from training.task import Prepared, Task
from transformers import AutoModelForCausalLM

from hf_rfattn.bench.loading import check_decoder
from hf_rfattn.results.documents import name_of
from hf_rfattn.results.schema import Metric

USUAL_LENGTH = 512


@dataclass(kw_only=True)
class LanguageOptions(RunOptions):
    from_scratch: bool = described("Start from random weights, with the config of --model.", False)
    data_config: str = described("Configuration of WikiText on the Hub.", "wikitext-2-raw-v1")
    eval_batch_size: int = described(
        "Batch size per process for evaluation; the logits of large vocabularies need memory.", 8
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_by_length:
            raise ValueError(
                "--group-by-length has no effect here, since all blocks have the same length; leave it out."
            )
        if self.from_scratch and self.model and not self.model_name:
            self.model_name = f"{name_of(self.model)} from scratch"


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
        tokenizer = load_tokenizer(options)
        if options.from_scratch:
            config = read_config("--model", options.model, vocab_size=len(tokenizer))
            model = AutoModelForCausalLM.from_config(config)
        else:
            model = load_model(AutoModelForCausalLM, options, tokenizer)
        check_decoder(model, f"--model {options.model}")
        length = choose_length(model, options, USUAL_LENGTH, tokenizer)
        self.num_bytes = {split: sum(len(text.encode()) for text in examples[split]["text"][:])}
        train = split_blocks(tokens_of(examples["train"], tokenizer), length)
        evaluation = {split: split_windows(tokens_of(examples[split], tokenizer), length)}
        collate = Collator(tokenizer, {"labels": -100})
        return Prepared(model, tokenizer, source, examples, train, evaluation, collate, length)

    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return window_losses(outputs.logits, batch["labels"])

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        return perplexity(predictions["losses"].tolist(), predictions["tokens"].tolist(), self.num_bytes[split])


if __name__ == "__main__":
    main(LanguageTask, LanguageOptions, __doc__)
