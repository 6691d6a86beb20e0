"""Question answering: windows over long contexts, and the best answers from the scores of each window."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

OUTSIDE = -1  # the place in the context of a token that is not of the context


def encode_windows(
    batch: Mapping[str, list[Any]],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    stride: int,
) -> dict[str, list[Any]]:
    """Each example becomes one or more windows: the question, and as much of the context as fits; neighbours share
    `stride` tokens.

    Columns: the tokens; `starts` and `ends`, the characters of the context that each token covers; `null_position`, the
    token that stands for "no answer here" ([CLS], or in a decoder the last token, the only one that has seen all);
    `start_positions` and `end_positions`, the answer as tokens, or the null token twice; `example`, whose window it is.
    """
    # a long question leaves half of the window to the context
    short = tokenizer(batch["question"], add_special_tokens=False, truncation=True, max_length=max_length // 2)
    questions = tokenizer.batch_decode(short["input_ids"])
    long = [len(ids) == max_length // 2 for ids in short["input_ids"]]
    questions = [
        cut if is_long else q.strip() for cut, q, is_long in zip(questions, batch["question"], long, strict=True)
    ]
    if tokenizer.sep_token is None:  # GPT-2 joins the two without a seam
        questions = [f"{question}\n" for question in questions]
    encoded = tokenizer(
        questions, batch["context"], truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    rows, offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
    names = ("starts", "ends", "null_position", "start_positions", "end_positions")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for window, (row, spans, ids) in enumerate(zip(rows, offsets, encoded["input_ids"], strict=True)):
        inside = [i == 1 for i in encoded.sequence_ids(window)]
        starts = [a if ok else OUTSIDE for (a, _), ok in zip(spans, inside, strict=True)]
        ends = [b if ok else OUTSIDE for (_, b), ok in zip(spans, inside, strict=True)]
        null = ids.index(tokenizer.cls_token_id) if tokenizer.cls_token_id in ids else len(ids) - 1
        found = (starts, ends, null, *answer_tokens(starts, ends, batch["answers"][row], null))
        for name, value in zip(names, found, strict=True):
            columns[name].append(value)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    return {**encoded, **columns, "example": [indices[row] for row in rows], "length": lengths}


def answer_tokens(starts: list[int], ends: list[int], answers: Mapping[str, Any], null: int) -> tuple[int, int]:
    """First and last token of the first answer, or the null token twice if it is not in this window."""
    if not answers["answer_start"]:
        return null, null
    first = answers["answer_start"][0]
    last = first + len(answers["text"][0])
    inside = [i for i, place in enumerate(starts) if place != OUTSIDE]
    touched = [i for i in inside if starts[i] < last and ends[i] > first]
    if not touched or starts[inside[0]] > first or ends[inside[-1]] < last:
        return null, null
    return touched[0], touched[-1]


def find_answer(
    context: str, windows: Sequence[Mapping[str, Any]], n_best: int, max_answer_length: int
) -> tuple[list[dict[str, Any]], float]:
    """The `n_best` answers of an example from all its windows, best first; and the score of "no answer".

    A window holds `start` and `end` (scores by token), `starts`, `ends` and `null_position`. The score of an answer is
    the sum of those of its first and last token; that of "no answer" the smallest of all windows.
    """
    found: list[dict[str, Any]] = []
    null = np.inf
    for window in windows:
        size = len(window["starts"])
        start, end = window["start"][:size], window["end"][:size]
        null = min(null, float(start[window["null_position"]] + end[window["null_position"]]))
        inside = np.flatnonzero(np.asarray(window["starts"]) != OUTSIDE)
        first, last = (inside[np.argsort(-scores[inside], kind="stable")[:n_best]] for scores in (start, end))
        for i in first:
            for j in last:
                if i <= j < i + max_answer_length:
                    text = context[window["starts"][i] : window["ends"][j]]
                    found.append({"text": text, "score": float(start[i] + end[j])})
    found.sort(key=lambda answer: -answer["score"])
    return found[:n_best], float(null)
