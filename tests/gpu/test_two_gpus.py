"""Two processes on two GPUs give what one gives: the tests of `test_recipes_distributed.py`, `test_conversion.py` and
`test_sharding.py`, which run on gloo, on NCCL.
"""

import copy
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from support import sample
from support.attention import build, draw_qkv
from support.gpus import DEVICE, FAKE, PROCESSES
from support.models import tiny_bert
from support.recipes import ROOT, environment, make_bert
from support.variants import DEFAULTS
from support.zygote import free_port
from torch import distributed

from hf_rfattn import convert
from hf_rfattn.ops.sharded import Part

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2 and not FAKE, reason="needs two GPUs")

CONFIGS = ROOT / "recipes" / "accelerate"
OPTIONS = [
    "--data", sample.folder("snli"), "--max-train-samples", 100, "--max-eval-samples", 37, "--eval-batch-size", 8,
    "--max-steps", 8, "--batch-size", 16, "--learning-rate", 1e-3, "--evaluate-every", 4, "--warmup", 0,
]  # fmt: skip


def launch(config, processes, model, attention, output):
    output.mkdir()
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", CONFIGS / config,
        "--num_processes", processes, "--mixed_precision", "no", "--main_process_port", free_port(),
        ROOT / "tests" / "support" / "recipe_ranks.py", ROOT / "recipes" / "finetune_snli.py",
        "--model", model, *OPTIONS, "--attention", attention, "--output", output / "run",
    ]  # fmt: skip
    variables = {**environment(), "RECORD": str(output)}
    done = subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return output


def close(first, second):
    assert first.keys() == second.keys() and first
    for name in first:
        torch.testing.assert_close(first[name].cpu(), second[name].cpu(), rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(FAKE, reason="accelerate's configs are those of GPUs")
@pytest.mark.parametrize("config", ["gpu_2.yaml", "fsdp2.yaml"])
@pytest.mark.parametrize("attention", ["favor+", "hedgehog", "fmm"])
def test_training(tmp_path, config, attention):
    model = make_bert(tmp_path / "model")
    one = launch("gpu_1.yaml", 1, model, attention, tmp_path / "one")
    two = launch(config, 2, model, attention, tmp_path / "two")
    close(torch.load(two / "gradients.pt"), torch.load(one / "gradients.pt"))
    close(*(load_file(folder / "run" / "model" / "model.safetensors") for folder in (two, one)))
    assert json.loads((two / "run" / "result.json").read_text())["processes"] == 2
    close(torch.load(two / "rank-1.pt"), torch.load(two / "rank-0.pt"))


def batches_of(count):
    made = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(5, 50, (4, 24), generator=made)} for _ in range(count)]


def learnt(model):
    return {name: value.detach().cpu() for name, value in model.named_parameters() if ".rf." in name}


def join(rank, folder):
    """A process of two; its device."""
    if not FAKE:
        torch.cuda.set_device(rank)
    distributed.init_process_group(PROCESSES, init_method=f"file://{folder}/store", rank=rank, world_size=2)
    return torch.device("cpu") if FAKE else torch.device("cuda", rank)


def convert_a_share(rank, folder, model, batches):
    device = join(rank, folder)
    model = model.to(device)
    shares = [{name: value[rank::2].to(device) for name, value in batch.items()} for batch in batches]
    convert(model, "hedgehog", shares, steps=5, progress=False)
    torch.save(learnt(model), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def test_attention_transfer(tmp_path):
    model, batches = tiny_bert(), batches_of(4)
    alone = copy.deepcopy(model).to(DEVICE)
    shares = [{name: value.to(DEVICE) for name, value in batch.items()} for batch in batches]
    convert(alone, "hedgehog", shares, steps=5, progress=False)
    torch.multiprocessing.spawn(convert_a_share, (str(tmp_path), model, batches), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    for name, value in learnt(alone).items():
        torch.testing.assert_close(first[name], value, rtol=0, atol=1e-2)


def attend_to_a_part(rank, folder, length=37):
    """Outputs and gradients of one part of a sequence are those of its rows."""
    device = join(rank, folder)

    def own(x):
        return x.narrow(2, rank * length, length)

    for variant in DEFAULTS:
        torch.manual_seed(0)
        mechanism = build(variant, kv_heads=2).to(device)
        inputs = [x.to(device).requires_grad_() for x in draw_qkv(2 * length, kv_heads=2)]
        weight = torch.randn(2, 4, 2 * length, 8, dtype=torch.float64).to(device)
        leaves = [*inputs, *mechanism.parameters()]
        for causal in (False, True):
            whole = mechanism(*inputs, causal=causal)
            expected = torch.autograd.grad((whole * weight).sum(), leaves, materialize_grads=True, allow_unused=True)
            part = Part(distributed.group.WORLD, rank, 2, length, None, None)
            mine = mechanism(*map(own, inputs), causal=causal, part=part)
            found = torch.autograd.grad((mine * own(weight)).sum(), leaves, materialize_grads=True, allow_unused=True)
            torch.testing.assert_close(mine, own(whole), rtol=1e-6, atol=1e-6)
            for a, b in zip(found, expected, strict=True):
                distributed.all_reduce(a)
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    distributed.destroy_process_group()


def test_sharded_sequences(tmp_path):
    torch.multiprocessing.spawn(attend_to_a_part, (str(tmp_path),), nprocs=2)
