"""What `convert` is trained on: texts, batches or one batch; the same when it resumes, and on every process."""

import copy

import pytest
import torch
from datasets import Dataset
from support.conversion import Torn, learnt, make_batches, same, torn
from support.models import lively, tiny_bert
from support.recipes import sample_tokenizer
from torch import distributed

from hf_rfattn import FavorConfig, attention_error, convert, patch_model
from hf_rfattn.conversion.transfer import STATE

TEXTS = [f"{a} : {b} ; {a} ." for a in ("box", "cup", "jar", "pot") for b in ("red", "blue", "green", "grey")]


def test_one_batch_alone_in_a_list_or_as_texts():
    model, words = lively(tiny_bert()), sample_tokenizer()
    (batch,) = make_batches(1)
    encoded = words(TEXTS[:4], padding=True, return_tensors="pt")
    found = []
    for data, options in (
        (batch, {}),
        ([batch], {}),
        (dict(encoded), {}),
        (TEXTS[:4], {"tokenizer": words}),
        (Dataset.from_dict({"text": TEXTS[:4]})["text"], {"tokenizer": words}),
    ):
        copied = copy.deepcopy(model)
        report = convert(copied, "hedgehog", data, steps=6, progress=False, **options)
        assert all(a < b for a, b in zip(report.after.overall, report.before.overall, strict=True))
        found.append(learnt(copied))
    assert same(found[0], found[1]) and same(found[3], found[4])
    for name, value in found[2].items():  # up to the order of the rows
        torch.testing.assert_close(found[3][name], value, rtol=0, atol=1e-3)


def test_one_text_and_few_texts():
    """One batch of them is trained on, and measured on, unless a whole batch can be kept apart."""
    model = lively(tiny_bert())
    options = {"tokenizer": sample_tokenizer(), "batch_size": 4, "steps": 3, "progress": False}
    for texts in (TEXTS[0], TEXTS[:1], TEXTS[:5], TEXTS[:7]):
        copied = copy.deepcopy(model)
        report = convert(copied, "hedgehog", texts, **options)
        assert all(a < b for a, b in zip(report.after.overall, report.before.overall, strict=True))
    one = sample_tokenizer()(TEXTS[:1], return_tensors="pt")
    copied = copy.deepcopy(model)
    report = convert(copied, "hedgehog", TEXTS[0], **options)
    assert report.after.overall == attention_error(copied, one).overall
    with pytest.raises(ValueError, match="an empty text"):
        convert(copied, "hedgehog", "", **options)


def test_texts_are_cut_where_the_tokenizer_says():
    model, words = lively(tiny_bert()), sample_tokenizer()
    words.model_max_length = 160  # as many as there are positions
    convert(model, "hedgehog", ["box : red ; " * 100] * 2, tokenizer=words, steps=1, progress=False)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A conversion that broke off at step 5, with a state of step 4: what made it, and where it is."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("begun")
    model, batches = lively(tiny_bert()), make_batches()
    options = {"measure": batches[0], "steps": 8, "save_every": 2, "progress": False}
    with pytest.raises(Torn):
        convert(copy.deepcopy(model), "hedgehog", torn(batches, 5), checkpoint=folder, **options)
    return model, batches, options, folder


def test_resuming_skips_the_batches_of_the_steps_done(begun):
    model, batches, options, folder = begun
    again, whole = copy.deepcopy(model), copy.deepcopy(model)
    convert(again, "hedgehog", copy.deepcopy(batches), checkpoint=folder, **options)
    convert(whole, "hedgehog", batches, **options)
    assert same(learnt(again), learnt(whole))


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "no document", "of an earlier version", "no tensors"])
def test_a_damaged_state(begun, tmp_path, damage):
    model, batches, options, folder = begun
    written = (folder / STATE).read_bytes()
    state = torch.load(folder / STATE, weights_only=True)
    if damage in ("cut", "empty", "text"):
        (tmp_path / STATE).write_bytes({"cut": written[:-40], "empty": b"", "text": b"nonsense" * 9}[damage])
    else:
        missing = "seconds" if damage == "of an earlier version" else "parameters"
        rest = {name: value for name, value in state.items() if name != missing}
        torch.save([] if damage == "no document" else rest, tmp_path / STATE)
    with pytest.raises(ValueError, match=rf"{STATE} is damaged.*Delete it to start the conversion again"):
        convert(copy.deepcopy(model), "hedgehog", batches, checkpoint=tmp_path, **options)


def test_a_state_runs_no_code(begun, tmp_path):
    model, batches, options, _ = begun
    torch.save({"settings": pytest.raises}, tmp_path / STATE)
    with pytest.raises(ValueError, match=f"{STATE} is damaged"):
        convert(copy.deepcopy(model), "hedgehog", batches, checkpoint=tmp_path, **options)


def _convert_otherwise(rank, folder, model, batches):
    """Each process with a seed, an option or a draw of its own: none of them may begin to train."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    said = []
    options = {"steps": 2, "progress": False}
    attempts = [
        lambda m: convert(m, "favor+", batches, trainable=True, seed=rank, **options),
        lambda m: convert(m, "hedgehog", batches, learning_rate=0.05 + rank, **options),
        lambda m: convert(patch_model(m, "rff", seed=rank), None, batches, **options),
        lambda m: convert(m, "hedgehog", batches, checkpoint=f"{folder}/{rank}", **options),
        lambda m: convert(m, "hedgehog", batches, checkpoint=f"{folder}/one" if rank else None, **options),
    ]
    convert(copy.deepcopy(model), "hedgehog", batches, checkpoint=f"{folder}/0", **options)  # a state of process 0
    for attempt in attempts:
        try:
            attempt(copy.deepcopy(model))
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    mine = [{name: value[rank::2] for name, value in batch.items()} for batch in batches]
    far = (FavorConfig(variance="optimal"),)
    report = convert(copy.deepcopy(model), "fmm", mine, far=far, checkpoint=f"{folder}/shared", **options)
    convert(model, "fmm", mine, far=far, checkpoint=f"{folder}/shared", **options)  # goes on from there
    torch.save((said, model.state_dict(), report.before.overall), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_that_differ_are_refused(tmp_path):
    model, batches = lively(tiny_bert()), make_batches(4)
    torch.multiprocessing.spawn(_convert_otherwise, (str(tmp_path), model, batches), nprocs=2)
    (first, weights, before), (second, others, same_before) = (torch.load(tmp_path / f"{r}.pt") for r in range(2))
    assert first == second and before == same_before
    for said, message in zip(
        first,
        ["seed: 0, 1", "settings", "mechanisms", "steps_in_the_checkpoint: 2, 0", "save_every: None, 100"],
        strict=True,
    ):
        assert f"The processes differ in {message}" in said
    assert same(weights, others)  # calibrated on the batch of the first process
