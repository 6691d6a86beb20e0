"""One sequence over several processes gives what one process gives: outputs, losses, gradients, training."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers
from support.attention import build, draw_qkv
from support.models import lively, tiny_bert, tiny_gpt2, tiny_llama
from support.ranks import Ranks
from support.variants import every_mechanism, every_variant
from torch.nn.parallel import DistributedDataParallel

import hf_rfattn
from hf_rfattn.ops.sharded import Part


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    group = Ranks(request.param)
    yield group
    group.close()


@pytest.fixture(scope="module")
def two():
    group = Ranks(2)
    yield group
    group.close()


@every_variant
@pytest.mark.parametrize("length", [1, 37])
def test_mechanisms(ranks, variant, length):
    ranks(parts_equal_the_whole, variant, length)


def parts_equal_the_whole(variant, length):
    """Attention and gradients of a part are those of its rows, with and without masks; the last part is all padding."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * length
    torch.manual_seed(0)
    mechanism = build(variant, heads=4, kv_heads=2)
    q, k, v = draw_qkv(total, heads=4, kv_heads=2)
    key_mask = torch.rand(2, total) > 0.4
    key_mask[:, -length:] = False
    segments = (torch.rand(2, total) > 0.9).long().cumsum(1)
    weight = torch.randn(2, 4, total, v.shape[-1], dtype=v.dtype)

    def own(x):
        return x.narrow(2, rank * length, length)

    for causal, mask, numbers in [
        (False, None, None), (False, key_mask, None), (False, key_mask, segments),
        (True, None, None), (True, key_mask, None), (True, None, segments), (True, key_mask, segments),
    ]:  # fmt: skip
        if numbers is not None and not causal and not mechanism.gathers_sequence():
            continue
        part = Part(dist.group.WORLD, rank, size, length, mask, numbers)
        results = []
        for cut in (lambda x: x, own):
            mechanism.zero_grad()
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            masks = {"part": part} if results else {"key_mask": mask, "segments": numbers}
            out = mechanism(*map(cut, inputs), causal=causal, **masks)
            (out * cut(weight)).sum().backward()
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in (*inputs, *mechanism.parameters())]
            for gradient in found if results else []:
                dist.all_reduce(gradient)  # each process knows what its own rows contribute
            results.append([out if results else own(out), *found])
        for whole, mine in zip(*results, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-7, atol=1e-7)


def masked_lm(**changes):
    return _with_head(transformers.BertForMaskedLM, tiny_bert(**changes))


def classifier(**changes):
    return _with_head(transformers.BertForSequenceClassification, tiny_bert(num_labels=3, **changes))


def _with_head(cls, body):
    return cls(body.config).eval()


MODELS = {"bert": masked_lm, "gpt2": tiny_gpt2, "llama": tiny_llama, "classifier": classifier}
# Small enough for tiny sequences to be divided.
OPTIONS = {"band": {"bandwidth": 7}, "fmm": {"bandwidth": 7}, "multipole": {"exact_keys": 16, "block": 4, "tile": 8}}


def patched(kind, name, **options):
    torch.manual_seed(0)
    return hf_rfattn.patch_model(lively(MODELS[kind]()), name, **OPTIONS.get(name, {}) | options)


def shard(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some mechanisms gather the sequence
        return hf_rfattn.shard_sequence(model, dist.group.WORLD, **options)


def batch_for(kind, length, padding=None):
    """Two sequences; the second is padded, so much that whole parts are padding."""
    torch.manual_seed(1)
    ids = torch.randint(1, 50, (2, length))
    labels = ids.clone() if kind != "classifier" else torch.tensor([0, 2])
    batch = {"input_ids": ids, "labels": labels}
    if padding:
        mask = torch.ones_like(ids)
        short = slice(None, -length // 4) if padding == "left" else slice(length // 4, None)
        mask[1, short] = 0
        batch["attention_mask"] = mask
        if kind != "classifier":
            labels[mask == 0] = -100
    return batch


def same_training(kind, name, batch, options=None, steps=3, checkpointing=False, gather=None):
    """Loss, logits, gradients and weights after some steps of a sharded model, beside those of one process."""
    whole = patched(kind, name, **options or {}).train()
    single = copy.deepcopy(whole)
    sharded = DistributedDataParallel(shard(whole, gather=gather))
    if checkpointing:
        whole.gradient_checkpointing_enable()
    results = []
    for model in (single, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            out = model(**batch)
            out.loss.backward()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            found += [out.loss.detach(), *gradients]
            optimizer.step()
        results.append((found, out.logits))
    for alone, mine in zip(results[0][0], results[1][0], strict=True):
        close(mine, alone)
    alone, mine = results[0][1], results[1][1]
    if mine.shape != alone.shape:
        start = dist.get_rank() * mine.shape[1]
        alone = alone[:, start : start + mine.shape[1]]
        mine = mine[:, : alone.shape[1]]
    close(mine, alone)


def close(mine, alone):
    """To 1e-5 of the largest number."""
    torch.testing.assert_close(mine, alone, rtol=0, atol=1e-5 * max(1.0, float(alone.abs().max())))


@every_mechanism
@pytest.mark.parametrize("kind", MODELS)
def test_models(ranks, kind, variant):
    """Odd lengths, padding on either side, parts that are all padding."""
    for length, padding in ((37, None), (38, "right"), (41, "left")):
        ranks(same_training, kind, variant[0], batch_for(kind, length, padding))
