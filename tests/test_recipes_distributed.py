"""Several processes give what one gives: DDP, FSDP2, two machines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from support import sample
from support.recipes import ROOT, environment, make_bert, make_gpt2
from support.zygote import free_port

SNLI = ROOT / "recipes" / "finetune_snli.py"
LANGUAGE = ROOT / "recipes" / "finetune_lm.py"
RANKS = ROOT / "tests" / "support" / "recipe_ranks.py"
CONFIGS = ROOT / "recipes" / "accelerate"
OPTIONS = [
    "--data", sample.folder("snli"), "--max-train-samples", 100, "--max-eval-samples", 37, "--eval-batch-size", 8,
    "--max-steps", 8, "--batch-size", 16, "--learning-rate", 1e-3, "--evaluate-every", 4, "--warmup", 0,
]  # fmt: skip
TEXT = ["--data", sample.folder("wikitext")]
FAVOR = ["--attention", "favor+", "--redraw-every", 3]


@pytest.fixture(scope="module")
def single(zygote, bert, tmp_path_factory):
    """The run on one process that the others are compared with."""
    output = tmp_path_factory.mktemp("single")
    start(zygote, output, SNLI, "--model", bert, *OPTIONS, *FAVOR).wait(check=True)
    return output


def start(zygote, output, *arguments, processes=1, **environment):
    record = {"RECORD": str(output), **environment}
    return zygote.start(RANKS, *arguments, "--output", output / "run", processes=processes, environment=record)


def weights(output):
    return load_file(output / "run" / "model" / "model.safetensors")


def result(output):
    return json.loads((output / "run" / "result.json").read_text())


def close(first, second):
    assert first.keys() == second.keys() and first
    for name in first:
        torch.testing.assert_close(first[name], second[name], rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def agree(output, single, processes=2):
    """Gradients, weights and metrics of one process; projections, their draws and other buffers alike on every rank."""
    assert result(output)["processes"] == processes
    close(torch.load(output / "gradients.pt"), torch.load(single / "gradients.pt"))
    close(weights(output), weights(single))
    values = [entry["metrics"]["accuracy"]["value"] for entry in result(output)["history"]]
    assert values == [entry["metrics"]["accuracy"]["value"] for entry in result(single)["history"]]
    assert result(output)["metrics"]["accuracy"]["n"] == 37  # not 40, though two processes see full batches
    ranks = [torch.load(output / f"rank-{rank}.pt") for rank in range(processes)]
    alone = torch.load(single / "rank-0.pt")
    assert {int(value) for name, value in alone.items() if name.endswith("draws")} == {2}
    for buffers in ranks:
        assert buffers.keys() == alone.keys() and all(torch.equal(buffers[name], alone[name]) for name in alone)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [1, 2])
def test_ddp(zygote, bert, single, tmp_path, passes):
    start(
        zygote, tmp_path, SNLI, "--model", bert, *OPTIONS, *FAVOR, "--accumulate", passes, processes=2
    ).wait(check=True)  # fmt: skip
    agree(tmp_path, single)
    assert result(tmp_path)["distributed"] == "MULTI_CPU"
    assert (
        result(tmp_path)["dataset"] == result(single)["dataset"]
        and result(tmp_path)["budget"] == result(single)["budget"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["hedgehog", "fmm"])
def test_ddp_with_parameters_of_mechanisms(zygote, bert, tmp_path, attention):
    for processes in (1, 2):
        output = tmp_path / str(processes)
        output.mkdir()
        start(
            zygote, output, SNLI, "--model", bert, *OPTIONS[:-6], "--max-steps", 3, "--attention", attention,
            processes=processes,
        ).wait(check=True)  # fmt: skip
    close(torch.load(tmp_path / "2" / "gradients.pt"), torch.load(tmp_path / "1" / "gradients.pt"))
    close(weights(tmp_path / "2"), weights(tmp_path / "1"))


@pytest.mark.slow
def test_sequence_parallel(zygote, bert, single, tmp_path):
    """Each process holds half of every sequence; a state goes on with another division."""
    line = [SNLI, "--model", bert, *OPTIONS, *FAVOR, "--save-every", 2]
    assert start(zygote, tmp_path, *line, "--sequence-parallel", 2, processes=2, STOP_AT="5").wait() == [7, 7]
    start(zygote, tmp_path, *line, "--sequence-parallel", 2, "--resume", processes=2).wait(check=True)
    agree(tmp_path, single)
    assert result(tmp_path)["options"]["sequence_parallel"] == 2
    assert result(tmp_path)["attention_error"]["after"]["overall"]
    assert start(zygote, tmp_path, *line, "--sequence-parallel", 2, "--overwrite").wait() == [2]  # one process


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [1, 2])
def test_language_on_two_processes(zygote, tmp_path, sequence_parallel):
    """Tied weights, perplexity of uneven windows."""
    scratch = ["--model", make_gpt2(tmp_path / "gpt2"), "--from-scratch", "--max-length", 32]
    for processes in (1, 2):
        output = tmp_path / str(processes)
        output.mkdir()
        parts = ["--sequence-parallel", min(processes, sequence_parallel)]
        start(zygote, output, LANGUAGE, *scratch, *OPTIONS, *TEXT, *FAVOR, *parts, processes=processes).wait(check=True)
    close(weights(tmp_path / "2"), weights(tmp_path / "1"))
    one, two = (result(tmp_path / name)["metrics"]["perplexity"] for name in ("1", "2"))
    assert one["n"] == two["n"] and one["value"] == pytest.approx(two["value"], rel=1e-4)


def fsdp_variables():
    """What `accelerate launch` makes of the config file."""
    config = load_config_from_file(str(CONFIGS / "fsdp2.yaml")).fsdp_config
    return {"ACCELERATE_USE_FSDP": "true", **{key.upper(): str(value) for key, value in config.items()}}


@pytest.mark.slow
def test_fsdp2(bert, single, tmp_path):
    """By its config file, in shards on two CPU processes."""
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / "fsdp2.yaml"]
    launch += ["--num_processes", 2, "--mixed_precision", "no", "--main_process_port", free_port(), RANKS, SNLI]
    command = [*launch, "--model", bert, *OPTIONS, *FAVOR, "--save-every", 3, "--output", tmp_path / "run"]
    variables = {**environment(), "RECORD": str(tmp_path)}
    done = subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    agree(tmp_path, single)
    assert result(tmp_path)["distributed"] == "FSDP"
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"] and "rfattn" in config


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_shards_resume(zygote, tmp_path, family):
    """A state of FSDP2 continues to the weights of one plain process. GPT-2 ties two of its weights."""
    model = {"bert": make_bert, "gpt2": make_gpt2}[family](tmp_path / "model")
    line = [SNLI, *OPTIONS] if family == "bert" else [LANGUAGE, *OPTIONS, *TEXT, "--max-length", 32]
    line += ["--model", model, *FAVOR]
    (tmp_path / "alone").mkdir()
    start(zygote, tmp_path / "alone", *line).wait(check=True)
    line += ["--save-every", 2]
    shards = {"processes": 2, **fsdp_variables()}
    assert set(start(zygote, tmp_path, *line, STOP_AT="5", **shards).wait()) == {7}
    start(zygote, tmp_path, *line, "--resume", **shards).wait(check=True)
    close(weights(tmp_path), weights(tmp_path / "alone"))
    assert result(tmp_path)["history"][-1]["step"] == 8


@pytest.mark.slow
def test_two_machines(bert, single, tmp_path):
    """The config file for two machines, started by two launchers on loopback, one process each."""
    port = free_port()
    nodes = []
    for rank in range(2):
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / "two_nodes.yaml"]
        launch += ["--machine_rank", rank, "--num_processes", 2, "--main_process_port", port, "--mixed_precision", "no"]
        arguments = [RANKS, SNLI, "--model", bert, *OPTIONS, *FAVOR, "--output", tmp_path / "run"]
        log = (tmp_path / f"node-{rank}.log").open("w+")
        command = list(map(str, [*launch, *arguments]))
        variables = {**environment(), "RECORD": str(tmp_path)}
        nodes.append((subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT), log))
    for process, log in nodes:
        assert process.wait(timeout=170) == 0, Path(log.name).read_text()[-3000:]
        log.close()
    agree(tmp_path, single)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_config_files(path):
    """accelerate reads them, and they are for what their names say."""
    config = load_config_from_file(str(path))
    expected = {
        "cpu": ("NO", 1), "gpu_1": ("NO", 1), "gpu_2": ("MULTI_GPU", 2), "gpu_4": ("MULTI_GPU", 4),
        "gpu_8": ("MULTI_GPU", 8), "fsdp2": ("FSDP", 8), "deepspeed_zero2": ("DEEPSPEED", 8),
        "deepspeed_zero3": ("DEEPSPEED", 8), "two_nodes": ("MULTI_GPU", 16),
    }  # fmt: skip
    assert (str(config.distributed_type).rpartition(".")[2], config.num_processes) == expected[path.stem]
    assert config.use_cpu == (path.stem == "cpu") and config.num_machines == (2 if path.stem == "two_nodes" else 1)
    if path.stem == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if path.stem.startswith("deepspeed"):
        assert config.deepspeed_config["zero_stage"] == int(path.stem[-1])
