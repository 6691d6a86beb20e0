"""The folder is checked before anything is contacted: what is not fit to publish, and why."""

import json
import shutil
from pathlib import Path

import pytest
from support.documents import edit, make_checkpoint, measured_runs, write_results
from typer.testing import CliRunner

from hf_rfattn.cli import app
from hf_rfattn.hub.cards import write_card
from hf_rfattn.hub.publish import make_plan, publish
from hf_rfattn.results.documents import INDEX, checkpoint_fingerprint

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


def _link(folder):
    key = folder.parent / "id_rsa"
    key.write_text("secret")
    (folder / "LICENSE").symlink_to(key)


def _linked_results(folder):
    (folder / "results").rename(folder.parent / "elsewhere")
    (folder / "results").symlink_to(folder.parent / "elsewhere")


def _private_key(folder):
    (folder / "LICENSE").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n")


def _oauth_token(folder):
    edit(folder / "tokenizer_config.json", lambda config: config.update(note="hf_oauth_eyJhbGciOi.eyJz-dWI_iOiI.x"))


def _no_weights(folder):
    (folder / "model.safetensors").rename(folder / "optimizer.safetensors")


UNFIT = {
    _link: "LICENSE: symbolic links are not followed",
    _linked_results: "results: symbolic links are not followed",
    _private_key: "LICENSE contains a token of the Hub or a private key",
    _oauth_token: "tokenizer_config.json contains a token",
    _no_weights: "has no weights",
    _no_card: "has no card",
    _other_weights: r"does not match its weights and results \(rfattn_checkpoint_sha256\)",
    _other_result: r"\(rfattn_results_sha256\)",
    _boast: r"\(eval_results\)",
    _broken_metadata: "cannot be read",
    _leaked_token: "contains a token",
    _truncated: "cannot be loaded",
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


OTHERS = (
    "optimizer.safetensors", "vocab.sqlite", "secrets.model", "LICENSE_KEYS", "LICENSE.pem", "tokenizer_secrets.json",
    "photo.png", "model.fp16.safetensors", "results/notes.txt", "additional_chat_templates/x.py", "sub/config.json",
    "model-00001-of-00002.safetensors", ".env", "training_args.bin",
)  # fmt: skip


def test_only_what_belongs_to_a_model_is_sent(folder):
    before = make_plan(folder, NAME)
    assert not before.left_out
    for name in OTHERS:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "NOTICE.txt").write_text("fine")
    plan = make_plan(folder, NAME)
    assert set(plan.files) == {*before.files, "NOTICE.txt"} and set(plan.left_out) == {*OTHERS} - {".env"}
    assert publish(folder, NAME, dry_run=True)  # the card is still that of the weights
    assert set(make_plan(folder, NAME, include=["photo.png"]).files) == {*plan.files, "photo.png"}
    with pytest.raises(ValueError, match=r"'other' cannot be included: .* has no such file"):
        make_plan(folder, NAME, include=["other"])


def test_shards(folder):
    before = checkpoint_fingerprint(folder)
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        shutil.copy(folder / "model.safetensors", folder / name)
    assert checkpoint_fingerprint(folder) == before  # one file goes first, as for from_pretrained
    (folder / "model.safetensors").unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    plan = make_plan(folder, NAME)
    assert {*names, INDEX} < set(plan.files) and not plan.left_out


def test_other_files_are_sent_if_they_are_named(folder, monkeypatch):
    for name in ("notes.txt", "photo.png"):
        (folder / name).write_text("mine")
    done = CliRunner().invoke(app, ["publish", str(folder), "--repo", NAME, "--dry-run", "--include", "photo.png"])
    assert "Left out: notes.txt (--include FILE uploads one)" in done.output and "photo.png" in done.output


def test_the_card_names_the_repository(folder):
    with pytest.raises(ValueError, match="does not tell readers to load 'me/other'"):
        publish(folder, "me/other", dry_run=True)


@pytest.mark.parametrize("name", ["tiny", "me/ti ny", "a/b/c", "-me/tiny"])
def test_names_that_are_not_possible(folder, name):
    with pytest.raises(ValueError):
        make_plan(folder, name)
