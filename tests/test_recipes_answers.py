"""Question answering: windows over long contexts, and answers from scores."""

import itertools

import numpy as np
import pytest
from support.recipes import sample_tokenizer
from training.answers import OUTSIDE, encode_windows, find_answer

CONTEXT = " ".join(["gold iron", "salt"] * 10 + ["bread water", "stone ;"] * 6)
START = CONTEXT.index("bread water stone")
EXAMPLE = {
    "question": ["  third "],
    "context": [CONTEXT],
    "answers": [{"text": ["water stone"], "answer_start": [CONTEXT.index("water stone")]}],
}


def encode(tokenizer, **changes):
    found = encode_windows({**EXAMPLE, **changes}, [7], tokenizer, max_length=24, stride=6)
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]


@pytest.mark.parametrize("bert", [True, False])
def test_windows(bert):
    tokenizer = sample_tokenizer(sentences_apart=bert)
    windows = encode(tokenizer)
    assert len(windows) > 2 and {w["example"] for w in windows} == {7}
    covered, with_answer = set(), 0
    for window in windows:
        ids = window["input_ids"]
        assert window["length"] == len(ids) <= 24
        inside = [(a, b) for a, b in zip(window["starts"], window["ends"], strict=True) if a != OUTSIDE]
        covered |= set(inside)
        null = window["null_position"]
        assert null == (0 if bert else len(ids) - 1)
        first, last = window["start_positions"], window["end_positions"]
        if (first, last) != (null, null):
            with_answer += 1
            assert CONTEXT[window["starts"][first] : window["ends"][last]] == "water stone"
            assert tokenizer.decode(ids[first : last + 1]) == "water stone"
    assert with_answer >= 1
    assert len(covered) == len(CONTEXT.split())  # no word fell between two windows
    neighbours = [set(zip(w["starts"], w["ends"], strict=True)) - {(OUTSIDE, OUTSIDE)} for w in windows]
    assert all(len(a & b) >= 6 for a, b in itertools.pairwise(neighbours))


def test_no_answer_and_long_questions():
    tokenizer = sample_tokenizer()
    nothing = encode(tokenizer, answers=[{"text": [], "answer_start": []}])
    assert all((w["start_positions"], w["end_positions"]) == (0, 0) for w in nothing)
    long = encode(tokenizer, question=["second " * 100])
    assert all(w["length"] <= 24 for w in long) and any(w["start_positions"] for w in long)


def test_answers_from_perfect_scores():
    windows = encode(sample_tokenizer())
    for window in windows:
        for name, position in (("start", "start_positions"), ("end", "end_positions")):
            window[name] = np.full(24, -5.0)  # longer than the window: rows are padded to one length
            window[name][window[position]] = 5.0
    best, null = find_answer(CONTEXT, windows, n_best=5, max_answer_length=10)
    assert best[0] == {"text": "water stone", "score": 10.0} and null == -10.0


@pytest.mark.parametrize("seed", range(4))
def test_answers_against_all_spans(seed):
    """With enough tries the best answer is the best of all spans."""
    rng = np.random.default_rng(seed)
    windows = encode(sample_tokenizer())
    spans = []
    for window in windows:
        window["start"], window["end"] = rng.normal(size=(2, 24))
        inside = [i for i, place in enumerate(window["starts"]) if place != OUTSIDE]
        for i, j in itertools.product(inside, inside):
            if i <= j < i + 4:
                text = CONTEXT[window["starts"][i] : window["ends"][j]]
                spans.append((window["start"][i] + window["end"][j], text))
    spans.sort(reverse=True)
    best, null = find_answer(CONTEXT, windows, n_best=24, max_answer_length=4)
    assert [a["text"] for a in best] == [text for _, text in spans[:24]]
    assert [a["score"] for a in best] == pytest.approx([score for score, _ in spans[:24]])
    assert null == pytest.approx(min(w["start"][0] + w["end"][0] for w in windows))
