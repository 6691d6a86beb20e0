"""Causal multipole attention: each query chooses its exact blocks itself, at once or token by token.

A query sees exactly the first blocks, its own and some blocks before it, and of the blocks between those that its bound
ranks highest (`multipole_choice`); the others count as their means. The choice depends on the query and its past alone,
so however tokens are cut into calls, the outputs are the same.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import recompute
from .linear import State, compute_dtype
from .multipole_choice import CausalSizes, Choice, choose_for_each
from .softmax import attend, merge
from .tiles import block_size, traced

GATHER = 4  # up to so many queries, the keys of chosen blocks are gathered; for more, all keys are scored and masked


@dataclass
class Context(State):
    """Keys and values so far, those that exist one behind the other, and a summary of each block.

    The last block takes what does not exist, and is never read. Tensors grow with the number of tokens.
    """

    keys: Tensor  # [B, Hkv, S, D]
    values: Tensor  # [B, Hkv, S, Dv]
    low: Tensor  # [B, Hkv, S / block, D], least coordinates of the keys
    high: Tensor
    sum_keys: Tensor
    sum_values: Tensor  # [B, Hkv, S / block, Dv]
    count: Tensor  # [B, 1]
    empty: ClassVar[dict[str, float]] = {"low": math.inf, "high": -math.inf}

    @staticmethod
    def new(batch: int, heads: int, head_dim: int, value_dim: int, length: int, block: int, like: Tensor) -> "Context":
        """Room for `length` tokens, `like` a tensor in dtype and device."""
        number = -(-length // block) + 1
        total = compute_dtype(like)
        return Context(
            like.new_zeros(batch, heads, number * block, head_dim),
            like.new_zeros(batch, heads, number * block, value_dim),
            like.new_full((batch, heads, number, head_dim), math.inf),
            like.new_full((batch, heads, number, head_dim), -math.inf),
            like.new_zeros(batch, heads, number, head_dim, dtype=total),
            like.new_zeros(batch, heads, number, value_dim, dtype=total),
            torch.zeros(batch, 1, dtype=torch.long, device=like.device),
        )

    @property
    def block(self) -> int:
        return self.keys.shape[2] // max(self.low.shape[2], 1)

    def copy_(self, other: State) -> None:
        """Take the values of another context, and its tensors where they have grown."""
        with torch.no_grad():
            for name, mine in vars(self).items():
                theirs = getattr(other, name)
                if mine.shape != theirs.shape:
                    setattr(self, name, theirs.detach())
                elif mine is not theirs:
                    mine.copy_(theirs)

    @torch.inference_mode(False)
    def with_room(self, new: int) -> "Context":
        """The same with room for so many more tokens, and half as many again when it has to grow."""
        block, number = self.block, self.low.shape[2]
        need = -(-(int(self.count.max()) + new) // block) + 1
        if need <= number:
            return self
        more = max(need, number + number // 2) - number

        def grown(name: str, x: Tensor) -> Tensor:
            size = x.shape[2] // number
            return F.pad(x[:, :, :-size], (0, 0, 0, (more + 1) * size), value=self.empty.get(name, 0.0))

        return Context(**{name: x if name == "count" else grown(name, x) for name, x in vars(self).items()})

    def extended(self, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple["Context", Tensor]:
        """With new tokens; and how many keys before it each of these sees: `[B, L]`, -1 if not even its own.

        Written into its own tensors, unless gradients are wanted.
        """
        B, K, L, _ = k.shape
        context = self if traced() else self.with_room(L)
        block, number = context.block, context.low.shape[2]
        if visible is None:
            visible = torch.ones(B, L, dtype=torch.bool, device=k.device)
        rank = context.count + visible.long().cumsum(1) - 1
        slot = torch.where(visible, rank, number * block - 1)[:, None, :, None]

        def put(into: Tensor, new: Tensor, at: Tensor) -> Tensor:
            at, new = at.expand(B, K, at.shape[2], into.shape[3]), new.to(into.dtype)
            return into.scatter(2, at, new) if torch.is_grad_enabled() else into.scatter_(2, at, new)

        keys, values = put(context.keys, k, slot), put(context.values, v, slot)
        if L == 1:
            at = slot // block

            def old(x: Tensor) -> Tensor:
                return x.gather(2, at.expand(B, K, 1, x.shape[3]))

            summaries = [
                put(context.low, torch.minimum(old(context.low), k.detach()), at),
                put(context.high, torch.maximum(old(context.high), k.detach()), at),
                put(context.sum_keys, old(context.sum_keys) + k, at),
                put(context.sum_values, old(context.sum_values) + v, at),
            ]
        else:
            total = context.count + visible.long().sum(1, keepdim=True)
            exists = (torch.arange(number * block, device=k.device) < total)[:, None, :, None]
            exists = exists & (torch.arange(number * block, device=k.device) < (number - 1) * block)[:, None]
            summaries = _summaries(keys, values, exists, block)
            if not torch.is_grad_enabled():
                fields = context.low, context.high, context.sum_keys, context.sum_values
                summaries = [mine.copy_(new) for mine, new in zip(fields, summaries, strict=True)]
        count = context.count + visible.long().sum(1, keepdim=True)
        if not torch.is_grad_enabled():
            count = context.count.copy_(count)
        low, high, sum_keys, sum_values = summaries
        return Context(keys, values, low, high, sum_keys, sum_values, count), rank


def _summaries(keys: Tensor, values: Tensor, exists: Tensor, block: int) -> list[Tensor]:
    """Least and largest keys, sums of keys and of values of each block; `exists` `[B, 1, S, 1]`."""
    exists = exists.unflatten(2, (-1, block))
    y, u = (x.unflatten(2, (-1, block)) for x in (keys, values))
    low, high = (y.detach().masked_fill(~exists, edge) for edge in (math.inf, -math.inf))
    sums = (x.to(compute_dtype(x)).masked_fill(~exists, 0).sum(3) for x in (y, u))
    return [low.amin(3), high.amax(3), *sums]


def causal_multipole_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: CausalSizes,
    *,
    scale: float = 1.0,
    key_mask: Tensor | None = None,
    context: Context | None = None,
) -> tuple[Tensor, Context]:
    """Attention `[B, H, L, Dv]` of new tokens after those in `context`, and the new context.

    Queries `[B, H, L, D]`, keys and values `[B, Hkv, L, D]`; `key_mask` `[B, L]`: True for keys that exist. Blocks
    count these. Some queries at once score all keys, in O(L · all keys · D) like softmax; a step costs
    O((all keys / block + exact keys) · D).
    """
    B, _, L, D = q.shape
    K = k.shape[1]
    if context is None:
        context = Context.new(B, K, D, v.shape[3], L, sizes.block, k)
    context, rank = context.extended(k, v, key_mask)
    x = q.unflatten(1, (K, -1))  # [B, K, G, L, D]
    parts = []
    size, number = block_size(q, context.keys.shape[2]), context.low.shape[2]
    for start in [0] if traced() else range(0, L, size):  # counting would tie a compiled program to a length
        rows = slice(start, start + size)
        last = number if traced() else min(int(rank[:, rows].max()) // sizes.block + 1, number)
        parts.append(_slab(x[:, :, :, rows], rank[:, rows], context, max(last, 1), sizes, scale))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=3)
    return out.flatten(1, 2).to(q.dtype), context


def _slab(x: Tensor, rank: Tensor, context: Context, number: int, sizes: CausalSizes, scale: float) -> Tensor:
    """Attention of some queries `[B, K, G, L, D]` to the first `number` blocks."""
    summaries = (z[:, :, :number] for z in (context.low, context.high, context.sum_keys, context.sum_values))
    form, keys, values = _gathered, context.keys, context.values
    if x.shape[3] > GATHER:
        form, keys, values = _masked, *(z[:, :, : number * sizes.block] for z in (keys, values))
    out = recompute(form, x.flatten(2, 3), rank.repeat(1, x.shape[2])[:, None], keys, values, *summaries, sizes, scale)
    return out.unflatten(2, x.shape[2:4])


def _far(x: Tensor, sum_keys: Tensor, sum_values: Tensor, choice: Choice, block: int) -> tuple[Tensor, Tensor]:
    """The part of block means, from sums: a copy of all means would cost more than the rest of a step."""
    out, lse = attend(x, sum_keys.to(x.dtype), sum_values.to(x.dtype), choice.far, 1 / block)
    return out / block, lse


def _masked(x, rank, keys, values, low, high, sum_keys, sum_values, sizes: CausalSizes, scale: float) -> Tensor:
    """All keys are scored; those that are not exact are hidden."""
    dtype = compute_dtype(x)
    x = x.to(dtype) * scale
    choice = choose_for_each(x.detach(), rank, low, high, sizes)
    number = torch.arange(low.shape[2], device=x.device)
    always = (number < sizes.first) | (number >= choice.own - sizes.local)
    exact = (torch.zeros_like(choice.far, dtype=torch.bool).scatter_(3, choice.chosen, True) & choice.between) | always
    exact = exact.repeat_interleave(sizes.block, 3) & (
        torch.arange(keys.shape[2], device=x.device) <= rank.unsqueeze(-1)
    )
    bias = torch.zeros_like(exact, dtype=dtype).masked_fill_(~exact, -torch.inf)
    near = attend(x, keys.to(dtype), values.to(dtype), bias)
    return merge(near, _far(x, sum_keys, sum_values, choice, sizes.block))[0]


def _gathered(x, rank, keys, values, low, high, sum_keys, sum_values, sizes: CausalSizes, scale: float) -> Tensor:
    """Only exact keys are read."""
    dtype, (B, K, R, _) = compute_dtype(x), x.shape
    x = x.to(dtype) * scale
    choice = choose_for_each(x.detach(), rank, low, high, sizes)
    device = x.device
    first = torch.arange(sizes.first, device=device).expand(B, K, R, -1)
    local = (choice.own - torch.arange(sizes.local + 1, device=device)).expand(B, K, R, -1)
    picked = torch.cat([first, choice.chosen, local], dim=3)  # [B, K, R, m]
    valid = torch.cat(
        [
            first < choice.own - sizes.local,
            choice.between.expand(B, K, R, -1).gather(3, choice.chosen),
            local >= 0,
        ],
        dim=3,
    )
    slot = picked.clamp(min=0, max=low.shape[2] - 1).unsqueeze(-1) * sizes.block + torch.arange(
        sizes.block, device=device
    )
    exact = (valid.unsqueeze(-1) & (slot <= rank[..., None, None])).flatten(3)  # [B, K, R, m · c]
    start = torch.arange(B * K, device=device).view(B, K, 1, 1) * keys.shape[2]
    rows = (slot.flatten(3) + start).flatten()

    def take(z: Tensor) -> Tensor:
        return z.reshape(-1, z.shape[3]).index_select(0, rows).view(B * K, R, -1, z.shape[3]).to(dtype)

    bias = torch.zeros_like(exact, dtype=dtype).masked_fill_(~exact, -torch.inf).view(B * K, R, 1, -1)
    near = attend(x.reshape(B * K, R, 1, -1), take(keys), take(values), bias)
    near = near[0].view(B, K, R, -1), near[1].view(B, K, R, 1)
    return merge(near, _far(x, sum_keys, sum_values, choice, sizes.block))[0]
