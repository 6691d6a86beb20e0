"""Fine-tune a model to answer questions: SQuAD 1.1, or SQuAD 2, where some questions have no answer.

accelerate launch recipes/finetune_squad.py --model google-bert/bert-base-uncased --attention fmm
accelerate launch recipes/finetune_squad.py --version 2 --model google-bert/bert-base-uncased --attention fmm
"""

import training.messages  # noqa: F401  # isort: skip

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from datasets import Dataset
from torch import Tensor
from training.answers import encode_windows, find_answer
from training.data import Source, check_texts, find_source, load_split, take
from training.metrics import squad, squad_v2
from training.models import Collator, choose_length, load_model, load_tokenizer
from training.options import RunOptions, described
from training.run import main
from training.task import Prepared, Task
from transformers import AutoModelForQuestionAnswering

from hf_rfattn.results import Metric

USUAL_LENGTH = 384
COLUMNS = ["id", "context", "question", "answers"]
INPUTS = ["input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions", "length"]


@dataclass(kw_only=True)
class SquadOptions(RunOptions):
    version: Literal["1.1", "2"] = described("Of SQuAD; in version 2 some questions have no answer.", "1.1")
    stride: int = described("Tokens that neighbouring windows of a long context share.", 128)
    n_best: int = described("How many first and last tokens of an answer are tried.", 20)
    max_answer_length: int = described("Longest answer in tokens.", 30)
    null_threshold: float = described(
        "Version 2: no answer is given if its score exceeds that of the best answer by more than this.", 0.0
    )


class SquadTask(Task[SquadOptions]):
    task_type = "question-answering"
    main_metric = "f1"

    def __init__(self, options: SquadOptions):
        super().__init__(options)
        self.second = options.version == "2"
        self.name = "squad_v2" if self.second else "squad"
        self.windows: dict[str, Dataset] = {}  # of each evaluation split, with the places of their tokens
        self.examples: dict[str, Dataset] = {}

    def prepare(self) -> Prepared:
        options = self.options
        source = find_source(options.data, f"rajpurkar/{self.name}", None, self.name, options.data_name)
        split = options.eval_split or "validation"
        self.examples = {
            "train": self._load(source, "train", options.max_train_samples),
            split: self._load(source, split, options.max_eval_samples),
        }
        tokenizer = load_tokenizer(options)
        model = load_model(AutoModelForQuestionAnswering, options, tokenizer)
        length = choose_length(model, options, USUAL_LENGTH, tokenizer)
        if options.stride >= length // 2 - 4:
            raise ValueError(f"--stride {options.stride} leaves windows of {length} tokens no room to move on.")
        self.length = length
        encode = partial(encode_windows, tokenizer=tokenizer, max_length=length, stride=options.stride)
        rows = {
            name: part.map(
                encode, batched=True, with_indices=True, remove_columns=part.column_names, desc=f"windows of {name}"
            )
            for name, part in self.examples.items()
        }
        inputs = [name for name in INPUTS if name in rows["train"].column_names]
        self.windows = {split: rows[split].select_columns(["starts", "ends", "null_position", "example"])}
        return Prepared(
            model=model,
            tokenizer=tokenizer,
            source=source,
            examples=self.examples,
            train=rows["train"].select_columns(inputs),
            evaluation={split: rows[split].select_columns(inputs)},
            collate=Collator(tokenizer),
            max_length=length,
        )

    def _load(self, source: Source, split: str, most: int | None) -> Dataset:
        examples = take(load_split(source, split, COLUMNS), most)
        check_texts(examples, ["question", "context"], f"{source.name}, split {split!r}")
        for row in examples.select_columns(["id", "context", "answers"]):
            where = f"{source.name}, split {split!r}, question {row['id']!r}"
            if not self.second and not row["answers"]["text"]:
                raise ValueError(f"{where} has no answer; --version 2 allows that.")
            for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True):
                if start < 0 or row["context"][start : start + len(text)] != text:
                    raise ValueError(f"{where}: the answer {text!r} is not at character {start} of its context.")
        return examples

    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores of all tokens, in rows of one length."""
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=1).float()
        return {"logits": torch.nn.functional.pad(logits, (0, self.length - logits.shape[-1]), value=-torch.inf)}

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        options, examples = self.options, self.examples[split]
        of_example: dict[int, list[dict[str, Any]]] = {}
        for window, (start, end) in zip(self.windows[split], predictions["logits"].numpy(), strict=True):
            of_example.setdefault(window["example"], []).append({**window, "start": start, "end": end})
        answers, doubts = {}, {}
        for i, row in enumerate(examples):
            best, null = find_answer(row["context"], of_example[i], options.n_best, options.max_answer_length)
            answers[row["id"]] = best[0]["text"] if best else ""
            doubts[row["id"]] = null - best[0]["score"] if best else float("inf")
        truths = {row["id"]: row["answers"]["text"] for row in examples}
        if self.second:
            values = squad_v2(answers, truths, doubts, options.null_threshold)
        else:
            values = squad(answers, truths)
        empty = sum(not texts for texts in truths.values())
        counts = {"HasAns": len(truths) - empty, "NoAns": empty}
        chance = dict.fromkeys(("exact_match", "f1"), 100 * empty / len(truths))  # no answer at all
        return {
            name: Metric(value, counts.get(name.partition("_")[0], len(truths)), 100, chance=chance.get(name))
            for name, value in values.items()
        }


if __name__ == "__main__":
    main(SquadTask, SquadOptions, __doc__)
