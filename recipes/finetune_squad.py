"""Fine-tune a model on SQuAD 1.1 or on SQuAD 2, which has questions without an answer.

accelerate launch recipes/finetune_squad.py --model google-bert/bert-base-uncased --attention fmm
accelerate launch recipes/finetune_squad.py --version 2 --model google-bert/bert-base-uncased --attention fmm
"""

import training.messages  # noqa: F401  # isort: skip

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from training.data import check_texts, find_source, take
from training.models import Collator, choose_length, load_model, load_tokenizer
from training.options import RunOptions, described
from training.run import main
from training.task import Prepared, Task
from transformers import AutoModelForQuestionAnswering, PreTrainedTokenizerBase

from hf_rfattn.results.schema import Metric

USUAL_LENGTH = 384
LONGEST_ANSWER = 30  # maximum number of tokens of an answer
COLUMNS = ["id", "context", "question", "answers"]
INPUTS = ["input_ids", "attention_mask", "token_type_ids", "start_positions", "end_positions", "length"]
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(kw_only=True)
class SquadOptions(RunOptions):
    version: Literal["1.1", "2"] = described("SQuAD version; in version 2 some questions have no answer.", "1.1")
    stride: int = described("Number of tokens by which windows of a long context overlap.", 128)


class SquadTask(Task):
    task_type = "question-answering"
    main_metric = "f1"

    def __init__(self, options: SquadOptions):
        super().__init__(options)
        self.name = "squad_v2" if options.version == "2" else "squad"
        self.windows: dict[
            str, Dataset
        ] = {}  # by evaluation split: positions of the tokens of each window in its context
        self.examples: dict[str, Dataset] = {}

    def prepare(self) -> Prepared:
        options = self.options
        source = find_source(options.data, f"rajpurkar/{self.name}", None, options.data_name)
        split = options.eval_split or "validation"
        for name, most in (("train", options.max_train_samples), (split, options.max_eval_samples)):
            self.examples[name] = take(source.load(name, COLUMNS), most)
            check_texts(self.examples[name], ["question", "context"])
        tokenizer = load_tokenizer(options)
        model = load_model(AutoModelForQuestionAnswering, options, tokenizer)
        self.length = choose_length(model, options, USUAL_LENGTH, tokenizer)
        encode = partial(encode_windows, tokenizer=tokenizer, max_length=self.length, stride=options.stride)
        rows = {
            name: part.map(
                encode, batched=True, with_indices=True, remove_columns=part.column_names, desc=f"windows of {name}"
            )
            for name, part in self.examples.items()
        }
        inputs = [name for name in INPUTS if name in rows["train"].column_names]
        self.windows = {split: rows[split].select_columns(["starts", "ends", "null_position", "example"])}
        return Prepared(
            model,
            tokenizer,
            source,
            self.examples,
            rows["train"].select_columns(inputs),
            {split: rows[split].select_columns(inputs)},
            Collator(tokenizer),
            self.length,
        )

    def predict(self, outputs: Any, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start and end logits of all tokens, padded to the maximum length."""
        logits = torch.stack([outputs.start_logits, outputs.end_logits], dim=1).float()
        return {"logits": torch.nn.functional.pad(logits, (0, self.length - logits.shape[-1]), value=-torch.inf)}

    def score(self, split: str, predictions: Mapping[str, Tensor]) -> dict[str, Metric]:
        of_example: dict[int, list[dict[str, Any]]] = {}
        for window, (start, end) in zip(self.windows[split], predictions["logits"].numpy(), strict=True):
            of_example.setdefault(window["example"], []).append({**window, "start": start, "end": end})
        answers, truths = [], []
        for i, row in enumerate(self.examples[split]):
            text, score, null = find_answer(row["context"], of_example[i])
            answers.append("" if self.options.version == "2" and null > score else text)
            truths.append(row["answers"]["text"])
        chance = 100 * sum(not texts for texts in truths) / len(truths)  # score of answering no question
        return {name: Metric(value, len(truths), 100, chance=chance) for name, value in squad(answers, truths).items()}


def encode_windows(
    batch: Mapping[str, list[Any]],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
) -> dict[str, list[Any]]:
    """Convert each example to one or more windows of the question and a part of the context.

    Windows overlap by `stride` tokens. Returns the columns of the tokenizer, and
    - `starts`, `ends`: range of characters in the context for each token; -1 for tokens outside the context,
    - `null_position`: token that represents "no answer": [CLS], or the last token in decoders, which sees all others,
    - `start_positions`, `end_positions`: first and last token of the answer, or twice the null position,
    - `example`: index of the example.
    """
    questions = [question.strip() for question in batch["question"]]
    if tokenizer.sep_token is None:  # as in GPT-2, which would not separate question and context
        questions = [f"{question}\n" for question in questions]
    encoded = tokenizer(
        questions, batch["context"], truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    rows, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
    places: list[dict[str, Any]] = []
    for window, (row, spans, ids) in enumerate(zip(rows, offsets, encoded["input_ids"], strict=True)):
        inside = [part == 1 for part in encoded.sequence_ids(window)]
        null = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else len(ids) - 1
        first = last = None
        if batch["answers"][row]["text"]:
            begin, text = batch["answers"][row]["answer_start"][0], batch["answers"][row]["text"][0].rstrip()
            first, last = (encoded.char_to_token(window, i, 1) for i in (begin, begin + len(text) - 1))
        found = first is not None and last is not None
        places.append({
            "starts": [span[0] if own else -1 for span, own in zip(spans, inside, strict=True)],
            "ends": [span[1] if own else -1 for span, own in zip(spans, inside, strict=True)],
            "null_position": null,
            "start_positions": first if found else null,
            "end_positions": last if found else null,
            "example": indices[row],
            "length": len(ids),
        })  # fmt: skip
    return {**encoded, **{name: [place[name] for place in places] for name in places[0]}}


def find_answer(context: str, windows: Sequence[Mapping[str, Any]]) -> tuple[str, float, float]:
    """Return the best answer over all windows of an example, its score, and the score of "no answer".

    A window has logits `start` and `end`, and `starts`, `ends` and `null_position`. The score of an answer is the sum
    of the logits of its first and last token. The score of "no answer" is the minimum over windows.
    """
    answer, best, null = "", -np.inf, np.inf
    for window in windows:
        size = len(window["starts"])
        start, end = (np.asarray(window[name][:size], dtype=np.float64) for name in ("start", "end"))
        null = min(null, float(start[window["null_position"]] + end[window["null_position"]]))
        inside = np.asarray(window["starts"]) != -1
        possible = np.triu(np.tri(size, k=LONGEST_ANSWER - 1, dtype=bool)) & inside[:, None] & inside
        scores = np.where(possible, start[:, None] + end, -np.inf)
        first, last = np.unravel_index(scores.argmax(), scores.shape)
        if scores[first, last] > best:
            answer, best = context[window["starts"][first] : window["ends"][last]], float(scores[first, last])
    return answer, best, null


def normal_words(text: str) -> list[str]:
    """Split into lower-case words without punctuation and articles, as the official script of SQuAD does.

    >>> normal_words("The  Eiffel-Tower, a tower.")
    ['eiffeltower', 'tower']
    """
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split()


def exact_match(prediction: str, truth: str) -> float:
    return float(normal_words(prediction) == normal_words(truth))


def word_f1(prediction: str, truth: str) -> float:
    """F1 score of the words of two answers; an empty answer matches only an empty one.

    >>> word_f1("the red car", "red bus"), word_f1("", "")
    (0.5, 1.0)
    """
    found, wanted = normal_words(prediction), normal_words(truth)
    if not found or not wanted:
        return float(found == wanted)
    return 2 * sum((Counter(found) & Counter(wanted)).values()) / (len(found) + len(wanted))


def squad(answers: Sequence[str], truths: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent, with the best reference of each question; without references, "" is correct."""
    pairs = list(zip(answers, truths, strict=True))
    return {
        name: 100 * fmean(max(measure(answer, truth) for truth in texts or [""]) for answer, texts in pairs)
        for name, measure in (("exact_match", exact_match), ("f1", word_f1))
    }


if __name__ == "__main__":
    main(SquadTask, SquadOptions, __doc__)
