"""Small sets in the schemas of the real ones, made here, on which a model without attention fails.

Classification: an ordinal points at one of six words, and the label is the kind of that word. Each kind occurs equally
often in every example, so the words by themselves say nothing: only looking at the place that the ordinal names does.
Question answering: the ordinal points into a first list; the answer is the same word in a second list, whose order is
another. Language modelling: every line says a random list of words twice; the second time can be looked up.
All words are single tokens of the common vocabularies.
"""

import atexit
import functools
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

PLACES = ("first", "second", "third", "fourth", "fifth", "sixth")
KINDS = (
    ("good", "warm", "bright", "kind", "happy", "strong"),
    ("bad", "cold", "dark", "cruel", "sad", "weak"),
    ("red", "green", "blue", "white", "black", "brown"),
)
THINGS = ("bread", "water", "stone", "paper", "glass", "silver", "iron", "wood", "salt", "sugar", "milk", "gold")
ANSWERS, NOTHING = THINGS[:4], "nothing"
LIST_LENGTH = 6  # words of a line of the language model
SIZES = {"train": 6000, "validation": 400, "test": 400}
SEED = 20_240_601

# column of the list of words, column of the ordinal (None: both stand in one sentence), number of kinds
CLASSIFICATION = {
    "cola": ("sentence", None, 2),
    "sst2": ("sentence", None, 2),
    "mrpc": ("sentence1", "sentence2", 2),
    "stsb": ("sentence1", "sentence2", 0),
    "qqp": ("question1", "question2", 2),
    "mnli": ("premise", "hypothesis", 3),
    "qnli": ("sentence", "question", 2),
    "rte": ("sentence1", "sentence2", 2),
    "wnli": ("sentence1", "sentence2", 2),
    "snli": ("premise", "hypothesis", 3),
}


@functools.cache
def folder(schema: str) -> str:
    """A folder of parquet files named by split, as `--data` takes it."""
    found = Path(tempfile.mkdtemp(prefix="sample-")) / schema
    atexit.register(shutil.rmtree, found.parent, ignore_errors=True)
    found.mkdir()
    splits = ["train", "validation", "test"]
    for split in [*splits, *(["validation_matched", "validation_mismatched"] if schema == "mnli" else [])]:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(make(schema, split)), found / f"{split}.parquet")
    return str(found)


def make(schema: str, split: str) -> list[dict[str, Any]]:
    """The rows of a split; always the same ones.

    >>> row = make("sst2", "validation")[0]
    >>> sorted(row), make("sst2", "validation")[0] == row
    (['idx', 'label', 'sentence'], True)
    """
    size = SIZES.get(split.removesuffix("_matched").removesuffix("_mismatched"))
    if size is None:
        raise ValueError(f"sample has no split {split!r}; it has {', '.join(SIZES)}.")
    rng = random.Random(f"{SEED} {schema} {split}")
    if schema in CLASSIFICATION:
        return [classify(schema, i, rng) for i in range(size)]
    if schema in ("squad", "squad_v2"):
        return [ask(i, rng, answerable=schema == "squad" or rng.random() < 2 / 3) for i in range(size)]
    if schema == "wikitext":
        return [{"text": repeat(rng)} for _ in range(size)]
    raise ValueError(f"sample has no schema {schema!r}; it has {', '.join(CLASSIFICATION)}, squad, wikitext.")


def classify(schema: str, idx: int, rng: random.Random) -> dict[str, Any]:
    """An ordinal, six words, and the kind of the word it points at."""
    words_column, place_column, num_kinds = CLASSIFICATION[schema]
    kinds = [i % (num_kinds or 2) for i in range(len(PLACES))]
    rng.shuffle(kinds)
    words = " ".join(rng.choice(KINDS[kind]) for kind in kinds)
    place = rng.randrange(len(PLACES))
    texts = {words_column: words, place_column: PLACES[place]}
    if place_column is None:
        texts = {words_column: f"{PLACES[place]} : {words}"}
    return {**texts, "label": 5.0 * kinds[place] if schema == "stsb" else kinds[place], "idx": idx}


def ask(idx: int, rng: random.Random, answerable: bool) -> dict[str, Any]:
    """Two lists of the same four words; without an answer, the second one lacks the word that is asked for."""
    words = rng.sample(ANSWERS, len(ANSWERS))
    there = rng.sample(ANSWERS, len(ANSWERS))
    place = rng.randrange(len(ANSWERS))
    if not answerable:
        there[there.index(words[place])] = NOTHING
    front = " ".join(words) + " ; "
    context = front + " ".join(there)
    answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
    if answerable:
        start = len(front) + len(" ".join([*there[: there.index(words[place])], ""]))
        answers = {"text": [words[place]], "answer_start": [start]}
    fields = {"id": f"sample-{idx}", "title": "sample", "context": context, "question": PLACES[place]}
    return {**fields, "answers": answers}


def repeat(rng: random.Random) -> str:
    """A list of words, twice."""
    words = " ".join(rng.sample([*THINGS, *KINDS[0], *KINDS[1]], LIST_LENGTH))
    return f" {words} : {words} .\n"
