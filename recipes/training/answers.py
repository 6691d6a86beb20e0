"""Question answering: windows over long contexts, and the best answers from what a model says of each window."""

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
    token that stands for "no answer here"; `start_positions` and `end_positions`, the answer as tokens, which is the
    null token if the answer is not in this window; `example`, whose window it is.
    """
    questions = shorten(tokenizer, [q.strip() for q in batch["question"]], max_length // 2)
    if tokenizer.sep_token is None:  # GPT-2 joins the two without a seam
        questions = [f"{question}\n" for question in questions]
    encoded = tokenizer(
        questions, batch["context"], truncation="only_second", max_length=max_length, stride=stride,
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    rows = encoded.pop("overflow_to_sample_mapping")
    offsets = encoded.pop("offset_mapping")
    columns: dict[str, list[Any]] = {name: [] for name in ("starts", "ends", "null_position")}
    for window, spans in enumerate(offsets):
        inside = [i == 1 for i in encoded.sequence_ids(window)]
        columns["starts"].append([a if ok else OUTSIDE for (a, _), ok in zip(spans, inside, strict=True)])
        columns["ends"].append([b if ok else OUTSIDE for (_, b), ok in zip(spans, inside, strict=True)])
        columns["null_position"].append(null_position(encoded["input_ids"][window], tokenizer))
    places = zip(columns["starts"], columns["ends"], rows, columns["null_position"], strict=True)
    positions = [answer_tokens(starts, ends, batch["answers"][row], null) for starts, ends, row, null in places]
    return {
        **encoded,
        **columns,
        "start_positions": [start for start, _ in positions],
        "end_positions": [end for _, end in positions],
        "example": [indices[row] for row in rows],
        "length": [len(ids) for ids in encoded["input_ids"]],
    }


def shorten(tokenizer: PreTrainedTokenizerBase, texts: list[str], most: int) -> list[str]:
    """Cut texts after so many tokens, so that a long question leaves room for the context."""
    encoded = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [
        text if len(spans) <= most else text[: spans[most - 1][1]] for text, spans in zip(texts, encoded, strict=True)
    ]


def null_position(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """[CLS] where there is one; else the last token, the only one that has seen everything in a decoder."""
    if tokenizer.cls_token_id is not None and tokenizer.cls_token_id in ids:
        return ids.index(tokenizer.cls_token_id)
    return len(ids) - 1


def answer_tokens(starts: list[int], ends: list[int], answers: Mapping[str, Any], null: int) -> tuple[int, int]:
    """First and last token of the first answer, or the null token twice."""
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

    A window holds `start` and `end` (scores by token), `starts`, `ends` and `null_position`. An answer scores the sum
    of its first and last token's; "no answer" scores the least that any window gives it.
    """
    found: list[dict[str, Any]] = []
    null = np.inf
    for window in windows:
        size = len(window["starts"])
        start, end = window["start"][:size], window["end"][:size]
        null = min(null, float(start[window["null_position"]] + end[window["null_position"]]))
        inside = np.asarray(window["starts"]) != OUTSIDE
        start, end = np.where(inside, start, -np.inf), np.where(inside, end, -np.inf)
        first, last = _highest(start, n_best), _highest(end, n_best)
        length = last[None, :] - first[:, None] + 1
        scores = np.where(
            (length >= 1) & (length <= max_answer_length), start[first][:, None] + end[last][None, :], -np.inf
        )
        for flat in _highest(scores.ravel(), n_best):
            i, j = divmod(int(flat), len(last))
            if np.isfinite(scores[i, j]):
                text = context[window["starts"][first[i]] : window["ends"][last[j]]]
                found.append({"text": text, "score": float(scores[i, j])})
    found.sort(key=lambda answer: -answer["score"])
    return found[:n_best], float(null)


def _highest(scores: np.ndarray, count: int) -> np.ndarray:
    """Places of the highest scores, highest first; equal ones in order."""
    return np.argsort(-scores, kind="stable")[:count]
