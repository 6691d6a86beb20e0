"""Question answering: windows over long contexts, and answers from scores."""

import itertools

import numpy as np
import pytest
from finetune_squad import LONGEST_ANSWER, encode_windows, find_answer
from support.recipes import sample_tokenizer

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
        inside = [(a, b) for a, b in zip(window["starts"], window["ends"], strict=True) if a != -1]
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
    neighbours = [set(zip(w["starts"], w["ends"], strict=True)) - {(-1, -1)} for w in windows]
    assert all(len(a & b) >= 6 for a, b in itertools.pairwise(neighbours))


def test_no_answer():
    nothing = encode(sample_tokenizer(), answers=[{"text": [], "answer_start": []}])
    assert all((w["start_positions"], w["end_positions"]) == (0, 0) for w in nothing)


def test_answers_from_perfect_scores():
    windows = encode(sample_tokenizer())
    for window in windows:
        for name, position in (("start", "start_positions"), ("end", "end_positions")):
            window[name] = np.full(24, -5.0)  # longer than the window: rows are padded to one length
            window[name][window[position]] = 5.0
    assert find_answer(CONTEXT, windows) == ("water stone", 10.0, -10.0)


@pytest.mark.parametrize("seed", range(4))
def test_answers_against_all_spans(seed, monkeypatch):
    monkeypatch.setattr("finetune_squad.LONGEST_ANSWER", 4)
    rng = np.random.default_rng(seed)
    windows = encode(sample_tokenizer())
    spans = []
    for window in windows:
        window["start"], window["end"] = rng.normal(size=(2, 24))
        inside = [i for i, place in enumerate(window["starts"]) if place != -1]
        for i, j in itertools.product(inside, inside):
            if i <= j < i + 4:
                text = CONTEXT[window["starts"][i] : window["ends"][j]]
                spans.append((window["start"][i] + window["end"][j], text))
    text, score, null = find_answer(CONTEXT, windows)
    assert (score, text) == max(spans) and LONGEST_ANSWER == 30
    assert null == pytest.approx(min(w["start"][0] + w["end"][0] for w in windows))
