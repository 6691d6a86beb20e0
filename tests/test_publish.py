"""Publishing with the real huggingface_hub client, over HTTP, to a Hub on loopback that also fails on demand."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from packaging.version import Version
from support.documents import make_checkpoint, measured_runs, write_results
from support.hub import Blob, LoopbackHub

from hf_rfattn.hub.cards import write_card

TOKEN, STRANGER = "hf_" + "aB3" * 11, "hf_" + "xY9" * 11
ROOT = Path(__file__).parents[1]
NAME = "me/tiny"
SENT = {
    "README.md", "config.json", "model.safetensors", "results/favor.json", "results/softmax.json",
    "results/band.json", "results/average.json", "results/hedgehog.json", "results/speed.json", "tokenizer.json",
    "tokenizer_config.json", "vocab.txt", "modeling_hf_rfattn.py",
}  # fmt: skip


@pytest.fixture(scope="module")
def hub():
    with LoopbackHub({TOKEN: "me", STRANGER: "stranger"}) as hub:
        yield hub


@pytest.fixture(autouse=True)
def empty_hub(hub):
    hub.reset()


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A checkpoint with results and a card, and the model it was saved from."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    model = make_checkpoint(folder)
    write_results(folder, measured_runs())
    write_card(folder, repo_id=NAME)
    return folder, model


@pytest.fixture
def folder(original, tmp_path):
    return Path(shutil.copytree(original[0], tmp_path / "tiny"))


def environment(hub, home, xet=False):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    return kept | {
        "HF_ENDPOINT": hub.address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "0" if xet else "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


class Worker:
    """A process with the real client in it; `heard` is everything it has ever said."""

    def __init__(self, hub, home, xet=False):
        self.log = (home / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "hub_worker.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment(hub, home, xet),
        )  # fmt: skip

    def ask(self, request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        watchdog = threading.Timer(120, self.process.kill)  # then the answer is empty
        watchdog.start()
        answer = self.process.stdout.readline()
        watchdog.cancel()
        assert answer, Path(self.log.name).read_text()[-3000:]
        assert not any(token in answer for token in (TOKEN, STRANGER))
        return json.loads(answer)

    def load(self, name, revision=None, token=None):
        answer = self.ask({"load": {"name": name, "revision": revision}, "environment": {"HF_TOKEN": token}})
        assert "error" not in answer, answer["error"]
        return answer

    def publish(self, folder, *options, repo=NAME, token=TOKEN, code=0, **variables):
        words = ["publish", str(folder), "--repo", repo, *options]
        answer = self.ask({"words": words, "environment": {"HF_TOKEN": token, **variables}})
        assert answer["code"] == code, answer
        return " ".join(answer["output"].split())

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def worker(hub, tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    worker = Worker(hub, home)
    yield worker
    worker.close()
    said = Path(worker.log.name).read_text()
    assert TOKEN not in said and STRANGER not in said
    written = [path for path in home.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)


def test_published_in_one_commit_and_loaded_back(hub, worker, folder, original, tmp_path):
    output = worker.publish(folder)
    assert f"Published: {hub.address}/{NAME}" in output
    repo = hub.repos[NAME]
    assert not repo.private
    assert [summary for summary, _ in repo.commits.values()] == [
        "initial commit",
        "Publish a checkpoint patched by hf_rfattn",
    ]
    assert set(repo.files()) == SENT | {".gitattributes"}
    for name in SENT:
        assert repo.files()[name].content == (folder / name).read_bytes()
    assert repo.files()["model.safetensors"].lfs and not repo.files()["README.md"].lfs
    assert all(token is None for endpoint, _, _, token in hub.requests if endpoint == "put")  # storage is no Hub

    answer = worker.load(NAME)
    with torch.no_grad():
        logits = original[1](torch.arange(2, 42).reshape(2, 20)).logits
    assert torch.equal(torch.tensor(answer["logits"]), logits)
    assert hub.count("resolve") > 0


def test_a_second_time_sends_nothing_and_commits_nothing(hub, worker, folder):
    worker.publish(folder)
    before = dict(hub.repos[NAME].branches)
    hub.requests.clear()
    worker.publish(folder)
    assert hub.repos[NAME].branches == before
    assert hub.count("put") == hub.count("commit") == hub.count("create") == 0


def test_private_and_branch(hub, worker, folder):
    output = worker.publish(folder, "--private", "--revision", "wide/features")
    repo = hub.repos[NAME]
    assert repo.private and "(private)" in output and f"{NAME}/tree/wide/features" in output
    assert set(repo.files("main")) == {".gitattributes"} and set(repo.files("wide/features")) >= SENT
    assert worker.load(NAME, "wide/features", TOKEN)["logits"]


def test_weights_of_an_earlier_version_go_in_the_same_commit(hub, worker, folder):
    repo = hub.create(NAME)
    old = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
    kept = ("notes.txt", "onnx/model.safetensors", "adapter_model.safetensors")
    repo.commit("main", "old", repo.files() | {name: Blob(b"old", True) for name in old + kept})
    output = worker.publish(folder)
    assert f"Removing weights of an earlier version: {', '.join(old)}." in output
    assert set(repo.files()) == SENT | {".gitattributes", *kept} and len(repo.commits) == 3


def test_dry_run_contacts_nothing(hub, worker, folder):
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "optimizer.pt").write_bytes(b"pickle")
    (folder / ".env").write_text("HF_TOKEN=secret")
    output = worker.publish(folder, "--dry-run", token=None)
    assert "nothing was uploaded" in output and "KiB model.safetensors" in output
    assert "Left out: checkpoint-10/optimizer.pt" in output and ".env" not in output
    assert all(name in output for name in SENT)
    assert hub.requests == []


def test_an_interrupted_upload_goes_on_where_it_stopped(hub, worker, folder):
    hub.fail("commit", 503, times=1)
    output = worker.publish(folder, "--revision", "second", code=2)
    assert "Run again to continue" in output
    assert hub.count("put") == 1 and set(hub.repos[NAME].files("second")) == {".gitattributes"}
    worker.publish(folder, "--revision", "second")
    assert hub.count("put") == 1 and set(hub.repos[NAME].files("second")) >= SENT


@pytest.mark.skipif(Version(huggingface_hub.__version__) < Version("1.31"), reason="older clients try only once")
def test_passing_faults_are_ridden_out(hub, worker, folder):
    hub.fail("put", drop=True, times=2)
    hub.fail("verify", 503, times=1)
    worker.publish(folder)
    assert hub.count("put") == 3
    assert set(hub.repos[NAME].files()) >= SENT


FAULTS = {  # endpoint, how it fails, what the message holds
    "create: 403": ("create", {"status": 403}, "Use a token with write permission"),
    "create: answer lost": ("create", {"drop": True, "after": True}, "Publishing failed: "),
    "look: 5xx": ("info", {"status": 502}, "502"),
    "card refused": ("validate", {"status": 400}, "Invalid metadata in README.md"),
    "preupload: 403": ("preupload", {"status": 403}, "Use a token with write permission"),
    "batch: 5xx": ("batch", {"status": 504}, "504"),
    "storage: 5xx": ("put", {"status": 500}, "500"),
    "storage: connection lost": ("put", {"drop": True}, "Publishing failed: "),
    "storage: not verified": ("verify", {"status": 404}, "404"),
    "commit: 5xx": ("commit", {"status": 500}, "500"),
    "commit: changed meanwhile": ("commit", {"status": 412}, "412"),
    "commit: slow down": ("commit", {"status": 429}, "429"),
    "commit: answer lost": ("commit", {"drop": True, "after": True}, "Publishing failed: "),
}


@pytest.mark.parametrize("endpoint, how, message", FAULTS.values(), ids=FAULTS)
def test_faults(hub, worker, folder, endpoint, how, message):
    """One message that says what to do; the remote as it was; the next run succeeds; the token nowhere."""
    if endpoint != "create":
        hub.create(NAME)
    hub.fail(endpoint, message=f"the server repeats {TOKEN}", **how)
    output = worker.publish(folder, code=2)
    assert message in output and "uploaded files are not sent twice" in output
    assert "Traceback" not in output
    if NAME in hub.repos and not how.get("after"):
        assert set(hub.repos[NAME].files()) == {".gitattributes"}
    hub.faults.clear()
    worker.publish(folder)
    assert set(hub.repos[NAME].files()) >= SENT


def test_by_the_xet_protocol(hub, tmp_path, folder):
    """What the client speaks by default: one commit here too, and right messages, though hf_xet has its own errors."""
    if Version(importlib.metadata.version("hf-xet")) < Version("1.8"):
        pytest.skip("the Hub on loopback speaks what hf-xet speaks since 1.8")
    worker = Worker(hub, tmp_path, xet=True)
    try:
        for endpoint in ("xet_token", "xet_xorb"):
            hub.fail(endpoint, 403, message=f"the server repeats {TOKEN}")
            output = worker.publish(folder, code=2)
            assert "403" in output and "uploaded files are not sent twice" in output
            hub.faults.clear()
        assert set(hub.repos[NAME].files()) == {".gitattributes"}
        worker.publish(folder)
    finally:
        worker.close()
    files = hub.repos[NAME].files()
    assert set(files) >= SENT and len(hub.repos[NAME].commits) == 2
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert files["model.safetensors"].announced == weights
    assert hub.xorbs and not hub.storage and hub.count("put") == 0
    assert TOKEN not in Path(worker.log.name).read_text()


def test_no_token(hub, worker, folder):
    output = worker.publish(folder, token=None, code=2)
    assert "There is no token" in output and "hf auth login" in output
    assert hub.requests == []


def test_wrong_token(hub, worker, folder):
    wrong = "hf_" + "q" * 34
    output = worker.publish(folder, token=wrong, code=2)
    assert "run `hf auth login`" in output and wrong not in output
    assert not hub.repos


def test_somebody_elses_name(hub, worker, folder):
    """Readable or not, it is left alone."""
    for private in (False, True):
        repo = hub.create(NAME, private=private)
        before = dict(repo.commits)
        assert "Publishing failed: " in worker.publish(folder, token=STRANGER, code=2)
        assert repo.commits == before


def test_private_is_not_sent_to_a_public_repository(hub, worker, folder):
    repo = hub.create(NAME)
    assert "exists and is public" in worker.publish(folder, "--private", code=2)
    assert len(repo.commits) == 1


def test_offline(hub, tmp_path, folder):
    """Set before the client is imported, as users set it."""
    done = run_command(hub, tmp_path, folder, HF_HUB_OFFLINE="1")
    assert done.returncode == 2 and "HF_HUB_OFFLINE" in done.stderr and hub.requests == []
    assert TOKEN not in done.stdout + done.stderr


def test_network_gone(hub, tmp_path, folder):
    done = run_command(hub, tmp_path, folder, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2 and "Publishing failed: " in done.stderr and "Traceback" not in done.stderr
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.slow
def test_interrupted_by_the_user(hub, worker, tmp_path, folder):
    hub.fail("put", 503)
    process = start_command(hub, tmp_path, folder)
    deadline = time.monotonic() + 60
    while not hub.count("put") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Interrupted. Run the same command again to resume" in stderr and TOKEN not in stdout + stderr
    assert set(hub.repos[NAME].files()) == {".gitattributes"}
    hub.faults.clear()
    worker.publish(folder)


def start_command(hub, home, folder, **variables):
    # jobs in the background of a script inherit that Ctrl-C is ignored
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from hf_rfattn.cli import app; app()"
    )
    command = [sys.executable, "-c", code, "publish", str(folder), "--repo", NAME]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(hub, home) | {"HF_TOKEN": TOKEN} | variables,
    )  # fmt: skip


def run_command(hub, home, folder, **variables):
    process = start_command(hub, home, folder, **variables)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
