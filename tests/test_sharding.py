"""One sequence over several processes gives what one process gives: outputs, losses, gradients, training."""

import pytest
import torch
import torch.distributed as dist
from support.attention import build, draw_qkv
from support.ranks import Ranks
from support.variants import every_variant

from hf_rfattn.ops.sharded import Part


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    group = Ranks(request.param)
    yield group
    group.close()


@every_variant
@pytest.mark.parametrize("length", [1, 5, 37])
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
    for causal, mask, numbers in [
        (False, None, None), (False, key_mask, None), (False, key_mask, segments),
        (True, None, None), (True, key_mask, None), (True, None, segments), (True, key_mask, segments),
    ]:  # fmt: skip
        if numbers is not None and not causal and not mechanism.gathers_sequence():
            continue
        part = Part(dist.group.WORLD, rank, size, length, mask, numbers)
        results = []
        for cut in (lambda x: x, lambda x: part.own(x, 2)):
            mechanism.zero_grad()
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            masks = {"part": part} if results else {"key_mask": mask, "segments": numbers}
            out = mechanism(*map(cut, inputs), causal=causal, **masks)
            (out * cut(weight)).sum().backward()
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in (*inputs, *mechanism.parameters())]
            for gradient in found if results else []:
                dist.all_reduce(gradient)  # each process knows what its own rows contribute
            results.append([out if results else part.own(out, 2), *found])
        for whole, mine in zip(*results, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-7, atol=1e-7)
