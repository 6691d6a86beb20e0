"""The folder is checked before anything is contacted: what is not fit to publish, and why."""

import shutil
from pathlib import Path

import pytest
from result_documents import edit, make_checkpoint, measured_runs, write_results

from hf_rfattn.hub.cards import write_card
from hf_rfattn.hub.faults import scrub
from hf_rfattn.hub.publish import make_plan, publish

TOKEN = "hf_" + "aB3" * 11
NAME = "me/tiny"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(folder)
    write_results(folder, measured_runs())
    write_card(folder, repo_id=NAME)
    return folder


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def test_fit(folder):
    assert publish(folder, NAME, dry_run=True).endswith(f"/{NAME}")
    assert publish(folder, NAME, revision="wide", dry_run=True).endswith(f"/{NAME}/tree/wide")


def _no_card(folder):
    (folder / "README.md").unlink()


def _other_weights(folder):
    make_checkpoint(folder, {"mechanism": "favor+", "num_features": 16}, tokenizer=False, seed=9)


def _other_result(folder):
    edit(folder / "results/favor.json", lambda document: document["metrics"]["accuracy"].update(value=0.99))


def _boast(folder):
    path = folder / "README.md"
    path.write_text(path.read_text().replace("value: 0.5703", "value: 0.9999"))


def _broken_metadata(folder):
    path = folder / "README.md"
    path.write_text(path.read_text().replace("tags:\n", "tags: [\n"))


def _pickle(folder):
    (folder / "training_args.bin").write_bytes(b"\x80\x04.")


def _leaked_token(folder):
    edit(folder / "results/speed.json", lambda document: document.update(command=["--token", TOKEN]))
    write_card(folder, repo_id=NAME)


def _truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    write_card(folder, repo_id=NAME)


def _unpatched(folder):
    edit(folder / "config.json", lambda config: (config.pop("rfattn"), config.pop("attn_implementation")))


def _not_finite(folder):
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    next(t for t in tensors.values() if t.ndim > 1)[0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_card(folder, repo_id=NAME)


def _no_model(folder):
    edit(folder / "config.json", lambda config: config.update(architectures=["AutoTokenizer"]))
    write_card(folder, repo_id=NAME)


UNFIT = {
    _no_card: "has no card",
    _other_weights: "was not made for these weights",
    _other_result: "are not those the card was made from",
    _boast: "claims results that its result files do not hold",
    _broken_metadata: "cannot be read",
    _pickle: "training_args.bin: loading such a file can run code",
    _leaked_token: "holds a token",
    _truncated: "does not load again",
    _unpatched: "is not a patched checkpoint",
    _not_finite: "not finite",
    _no_model: "has no model AutoTokenizer",
}


@pytest.mark.parametrize("damage, message", UNFIT.items(), ids=[damage.__name__[1:] for damage in UNFIT])
def test_folders_that_are_not_fit(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        publish(folder, NAME, dry_run=True)
    assert TOKEN not in str(caught.value)


def test_the_card_names_the_repository(folder):
    with pytest.raises(ValueError, match="does not tell readers to load 'me/other'"):
        publish(folder, "me/other", dry_run=True)


@pytest.mark.parametrize("name", ["tiny", "me/ti ny", "a/b/c", "-me/tiny"])
def test_names_that_are_not_possible(folder, name):
    with pytest.raises(ValueError):
        make_plan(folder, name)


def test_scrub():
    assert scrub(f"Bearer {TOKEN}, {TOKEN}!") == "Bearer ***, ***!"
    assert scrub("my-own-token in a text", "my-own-token") == "*** in a text"
