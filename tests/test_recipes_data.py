"""Data from folders and from `sample`, what is checked in it, and the order in which training sees it."""

import itertools
import json
import types
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from support import sample
from training.data import check_cells, find_source, fingerprint, take
from training.language import split_blocks, split_windows
from training.models import Collator
from training.task import TrainingOrder, check_share

ROWS = [{"sentence": f"word {i}", "label": i % 2, "idx": i} for i in range(10)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def source(folder):
    return find_source(str(folder), "nyu-mll/glue", "sst2", None)


@pytest.mark.parametrize("kind", ["parquet", "json", "jsonl", "csv"])
def test_a_folder_of_files(tmp_path, kind):
    folder = tmp_path / "mine"
    folder.mkdir()
    if kind == "parquet":
        for part in range(2):
            Dataset.from_list(ROWS[5 * part : 5 * part + 5]).to_parquet(folder / f"train-0000{part}-of-00002.parquet")
    elif kind == "csv":
        Dataset.from_list(ROWS).to_csv(folder / "train.csv", index=False)
    else:
        (folder / f"train.{kind}").write_text("\n".join(map(json.dumps, ROWS)))
    found = source(folder).load("train", ["sentence", "label"])
    assert found[:] == {"sentence": [r["sentence"] for r in ROWS], "label": [r["label"] for r in ROWS]}
    assert source(folder).name == "mine"


def test_what_is_wrong_with_a_folder(tmp_path):
    Dataset.from_list(ROWS).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(ValueError, match=r"such as validation\.parquet"):
        source(tmp_path).load("validation", ["sentence"])
    with pytest.raises(ValueError, match="has no column 'premise'; it has sentence, label, idx"):
        source(tmp_path).load("train", ["premise", "label"])
    (tmp_path / "validation.parquet").write_bytes(b"PAR1 this is no parquet")
    with pytest.raises(ValueError, match="split 'validation', cannot be read"):
        source(tmp_path).load("validation", ["sentence"])
    (tmp_path / "test.json").write_text('{"sentence": "a"')
    with pytest.raises(ValueError, match="split 'test', cannot be read"):
        source(tmp_path).load("test", ["sentence"])


def test_what_data_means():
    assert find_source(None, "nyu-mll/glue", "rte", None).hub_name == "nyu-mll/glue"
    other = find_source("me/mine", "nyu-mll/glue", "rte", "called so")
    assert (other.hub_name, other.config, other.name) == ("me/mine", "rte", "called so")
    with pytest.raises(ValueError, match="is not a folder or file, nor a name on the Hub"):
        find_source("./nowhere", "nyu-mll/glue", "rte", None)
    with pytest.raises(ValueError, match=r"unknown format '.py'; supported: .parquet, .json"):
        find_source(__file__, "nyu-mll/glue", "rte", None)
    with pytest.raises(ValueError, match="me/mine, split 'train', cannot be read"):
        find_source("me/mine", "a/b", None, None).load("train", ["label"])


def test_cells_are_checked():
    with pytest.raises(ValueError, match=r"example 3 has 3 in the column 'label', not below 3 \(2 rows in total"):
        check_cells(Dataset.from_dict({"label": [0, 1, 2, 3, 3]}), "label", range(3).__contains__, "below 3")


def test_subsets_and_fingerprints():
    whole = Dataset.from_list(ROWS)
    part = take(whole, 4)
    assert len(part) == 4 and take(whole, 4)[:] == part[:] and take(whole, 99) is whole
    assert part["idx"][:] != whole["idx"][:4]  # drawn, since data sets may be sorted
    assert fingerprint({"train": whole}) == fingerprint({"train": Dataset.from_list(ROWS)})
    assert (
        len({fingerprint({"train": d}) for d in (whole, part, whole.remove_columns("idx"), whole.select([1, 0]))}) == 4
    )


@pytest.mark.parametrize("schema", sample.CLASSIFICATION)
def test_the_sample_hides_its_labels_from_bags_of_words(schema):
    """Every example has equally many words of each kind, and every place and label is equally likely."""
    rows = sample.make(schema, "train")
    words_column, place_column, kinds = sample.CLASSIFICATION[schema]
    kind_of = {word: k for k, words in enumerate(sample.KINDS) for word in words}
    for row in rows[:300]:
        words = row[words_column].split()
        place = sample.PLACES.index(row[place_column] if place_column else words[0])
        words = words if place_column else words[2:]
        assert set(Counter(kind_of[w] for w in words).values()) == {len(words) // (kinds or 2)}
        assert row["label"] == kind_of[words[place]] * (5.0 if schema == "stsb" else 1)
    shares = Counter(row["label"] for row in rows)
    assert max(shares.values()) < 1.1 * min(shares.values())
    validation = {str({**r, "idx": 0}) for r in sample.make(schema, "validation")}
    assert len(validation & {str({**r, "idx": 0}) for r in rows}) < len(validation) / 2


def test_the_sample_questions_have_answers_where_they_say():
    for schema in ("squad", "squad_v2"):
        rows = sample.make(schema, "validation")
        for row in rows:
            for text, start in zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True):
                assert row["context"][start:].startswith(text)
                assert row["context"].split()[sample.PLACES.index(row["question"])] == text
        empty = sum(not row["answers"]["text"] for row in rows)
        assert empty == 0 if schema == "squad" else 0.2 < empty / len(rows) < 0.5
    with pytest.raises(ValueError, match="no split 'dev'"):
        sample.make("squad", "dev")
    with pytest.raises(ValueError, match="no schema 'cnn'"):
        sample.make("cnn", "train")


@pytest.mark.parametrize(("size", "batch_size"), [(10, 4), (3, 8), (16, 4)])
@pytest.mark.parametrize("grouped", [False, True])
def test_the_order_of_training(size, batch_size, grouped):
    lengths = [(7 * i) % 5 for i in range(size)] if grouped else None
    order = TrainingOrder(size, batch_size, seed=1, lengths=lengths)
    stream = list(itertools.chain(*itertools.islice(order.batches(0), max(3 * size, 12))))
    for epoch in range(3):
        assert sorted(stream[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert stream[:size] != stream[size : 2 * size] or size == 3
    for step in (1, 2, 5, 11):
        assert next(order.batches(step)) == stream[step * batch_size : (step + 1) * batch_size]
    assert list(TrainingOrder(100, 4, seed=2).epoch(0)) != list(TrainingOrder(100, 4, seed=1).epoch(0))


def test_grouping_by_length_pads_less():
    lengths = [1 + (37 * i) % 101 for i in range(640)]

    def padded(order):
        return sum(max(lengths[i] for i in b) * len(b) for b in itertools.islice(order.batches(0), 40))

    assert padded(TrainingOrder(640, 16, 0, lengths)) < 0.7 * padded(TrainingOrder(640, 16, 0))


@pytest.mark.parametrize(("processes", "passes"), [(1, 1), (2, 1), (1, 4), (2, 2)])
def test_processes_share_each_batch(processes, passes):
    order = TrainingOrder(50, 8, seed=0)
    shares = [order.share(3, 9, rank, processes, passes) for rank in range(processes)]
    assert all(len(share) == 6 * passes for share in shares)
    for step, batch in zip(range(6), order.batches(3), strict=False):
        pieces = [piece for share in shares for piece in share[step * passes : (step + 1) * passes]]
        assert sorted(itertools.chain(*pieces)) == sorted(batch)
        assert {len(piece) for piece in pieces} == {8 // processes // passes}
    with pytest.raises(ValueError, match="must be a multiple of 3"):
        check_share(8, 3, 1)


def test_padding():
    rows = [{"input_ids": [5, 6, 7], "labels": 1, "length": 3}, {"input_ids": [8], "labels": 0, "length": 1}]
    for row in rows:
        row["attention_mask"] = [1] * row["length"]
    batch = Collator(types.SimpleNamespace(pad_token_id=9, pad_token_type_id=0))(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]] and batch["labels"].tolist() == [1, 0]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize("length", [2, 5, 8, 50, 64])
def test_every_token_counts_once(length):
    tokens = np.arange(50)
    seen = []
    for row in split_windows(tokens, length):
        assert row["input_ids"] == row["labels"] and len(row["labels"]) <= length
        seen += row["labels"][1:]  # the first is what the model is given
    assert seen == list(range(1, 50))
    with pytest.raises(ValueError, match="less than one block of 64"):
        split_blocks(tokens, 64)
    blocks = split_blocks(tokens, 8)
    assert torch.tensor(blocks["input_ids"][:]).flatten().tolist() == list(range(48))
