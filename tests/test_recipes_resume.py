"""Killed at any moment, a run that is resumed ends with the weights of one that never was, bit for bit."""

import os
import random
import subprocess
import time

import psutil
import pytest
import torch
from safetensors.torch import load_file
from support import sample
from support.recipes import ROOT, command, environment, make_bert
from training.session import whole_folder

SNLI = ROOT / "recipes" / "finetune_snli.py"
# dropout throws dice, favor+ redraws, best models come and go: all of it must be where it was
OPTIONS = [
    "--data", sample.folder("snli"), "--attention", "favor+", "--redraw-every", 5, "--max-train-samples", 300,
    "--max-eval-samples", 65, "--max-steps", 12, "--batch-size", 16, "--evaluate-every", 4, "--keep", "best",
    "--learning-rate", 1e-3, "--save-every", 2,
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_bert(tmp_path_factory.mktemp("bert"), hidden_dropout_prob=0.1)


def weights(output):
    return load_file(output / "model" / "model.safetensors")


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def listing(output):
    try:
        return set(os.listdir(output / "state"))
    except FileNotFoundError:
        return set()


def kill_after(run, output, changes, delay):
    """Kill it once its states have changed so often, and a moment later; False if it ended by itself before.

    Without a delay: kill it in the midst of writing the next state.
    """
    seen, polls = [listing(output)], 0
    while len(seen) <= changes or (not delay and not any(name.startswith("partial") for name in seen[-1])):
        polls += 1
        if polls % 20 == 0 and not run.alive():
            return False
        if listing(output) != seen[-1]:
            seen.append(listing(output))
    time.sleep(delay)
    run.kill()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_at_any_moment(zygote, model, tmp_path, processes):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    zygote.start(SNLI, "--model", model, *OPTIONS, "--output", whole, processes=processes).wait(check=True)
    dice = random.Random(processes)
    moments = [(0, 0.05), (2, 0.0)]  # before there is any state; while one is written
    moments += [(dice.randint(3, 12), dice.choice([0.0, dice.uniform(0, 0.1)])) for _ in range(30)]
    found = []
    for changes, delay in moments:
        run = zygote.start(SNLI, "--model", model, *OPTIONS, "--output", torn, "--resume", processes=processes)
        if not kill_after(run, torn, changes, delay):
            assert run.wait() == [0] * processes, run.log.read_text()
            break
        found.append(listing(torn))
    assert (torn / "result.json").exists()
    assert len(found) >= 2  # kills, more on a slow machine
    assert any(name.startswith("partial") for names in found for name in names)  # one of them while a state was written
    assert not (torn / "state").exists()
    assert same(weights(whole), weights(torn))


@pytest.mark.slow
def test_torchrun_killed(zygote, model, tmp_path):
    """Two processes started by torchrun, as a user starts them, all of them killed at once."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    zygote.start(SNLI, "--model", model, *OPTIONS, "--output", whole, processes=2).wait(check=True)
    line = command("finetune_snli.py", "--model", model, *OPTIONS, "--output", torn, processes=2)
    variables = {**environment(), "ACCELERATE_USE_CPU": "true"}
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(line, env=variables, stdout=log, stderr=log, start_new_session=True)
        while not any(name.startswith("step") for name in listing(torn)):
            assert launcher.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.01)
        started = [psutil.Process(launcher.pid), *psutil.Process(launcher.pid).children(recursive=True)]
        for process in started:  # torchrun puts its processes into sessions of their own
            process.kill()
        psutil.wait_procs(started)
        launcher.wait()
    assert not (torn / "result.json").exists()
    zygote.start(SNLI, "--model", model, *OPTIONS, "--output", torn, "--resume", processes=2).wait(check=True)
    assert same(weights(whole), weights(torn))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    """What an interrupted attempt left behind does not get in, and what was there before stays until all is written."""
    target = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt), whole_folder(target) as partial:
        partial.mkdir()
        (partial / "half").write_text("1")
        raise KeyboardInterrupt
    assert not target.exists()
    for name in ("first", "second"):
        with whole_folder(target) as partial:
            partial.mkdir()
            (partial / name).write_text("2")
            assert not target.exists() or [path.name for path in target.iterdir()] == ["first"]
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        assert [path.name for path in target.iterdir()] == [name]
