"""Causal multipole attention: each query chooses its exact blocks itself, at once or token by token.

A query sees exactly the first blocks, its own block, some blocks before it, and of the others those that rank highest
(`multipole_choice`); the rest count as their means. The choice depends on the query and its past alone, so however
tokens are cut into calls, the outputs are the same.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import recompute
from .linear import State, compute_dtype
from .multipole_choice import CausalSizes, choose_for_each
from .softmax import attend, merge, softmax_of_scores
from .tiles import block_size, traced

TOGETHER = 64  # queries that read the same keys at once, where memory allows
GATHER = 4  # up to so many queries, the keys of chosen blocks are gathered; for more, all keys are scored and masked


@dataclass
class Context(State):
    """Keys and values so far, those that exist one behind the other, and a summary of each block.

    The last block takes what does not exist, and is never read. Tensors grow with the number of tokens.
    """

    keys: Tensor  # [B, Hkv, S, D]
    values: Tensor  # [B, Hkv, S, Dv]
    sum_keys: Tensor  # [B, Hkv, S / block, D]
    sum_values: Tensor  # [B, Hkv, S / block, Dv]
    radius: Tensor  # [B, Hkv, S / block, 1], see `radius_of`
    count: Tensor  # [B, 1]

    @staticmethod
    def new(batch: int, heads: int, head_dim: int, value_dim: int, length: int, block: int, like: Tensor) -> "Context":
        """Room for `length` tokens, `like` a tensor in dtype and device."""
        number = -(-length // block) + 1
        keys, values = (like.new_zeros(batch, heads, number * block, size) for size in (head_dim, value_dim))
        sum_keys, sum_values, radius = (
            like.new_zeros(batch, heads, number, size, dtype=compute_dtype(like)) for size in (head_dim, value_dim, 1)
        )
        count = torch.zeros(batch, 1, dtype=torch.long, device=like.device)
        return Context(keys, values, sum_keys, sum_values, radius, count)

    @property
    def block(self) -> int:
        return self.keys.shape[2] // max(self.radius.shape[2], 1)

    @torch.inference_mode(False)
    def with_room(self, new: int) -> "Context":
        """The same with room for so many more tokens, and half as many again when it has to grow."""
        block, number = self.block, self.radius.shape[2]
        need = -(-(int(self.count.max()) + new) // block) + 1
        if need <= number:
            return self
        more = max(need, number + number // 2) - number

        def grown(x: Tensor) -> Tensor:
            size = x.shape[2] // number
            return F.pad(x[:, :, :-size], (0, 0, 0, (more + 1) * size))

        return Context(**{name: x if name == "count" else grown(x) for name, x in vars(self).items()})

    def extended(self, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple["Context", Tensor]:
        """With new tokens; and how many keys before it each of these sees: `[B, L]`, -1 if not even its own.

        Written into its own tensors, unless gradients are wanted.
        """
        B, K, L, _ = k.shape
        context = self if traced() else self.with_room(L)
        block, number = context.block, context.radius.shape[2]
        new = torch.ones(1, L, dtype=torch.long, device=k.device) if visible is None else visible.long()
        rank = context.count + new.cumsum(1) - 1
        slot = rank if visible is None else torch.where(visible, rank, number * block - 1)
        slot = slot[:, None, :, None]

        def put(into: Tensor, new: Tensor, at: Tensor) -> Tensor:
            at, new = at.expand(B, K, at.shape[2], into.shape[3]), new.to(into.dtype)
            return into.scatter(2, at, new) if torch.is_grad_enabled() else into.scatter_(2, at, new)

        keys, values = put(context.keys, k, slot), put(context.values, v, slot)
        # the blocks that new tokens may be in, the last one again where there are fewer
        changed = context.count // block + torch.arange((L + block - 2) // block + 1, device=k.device)  # [B, n]
        changed = changed.clamp(max=number - 1)
        exists = changed.unsqueeze(2) * block + torch.arange(block, device=k.device) <= rank[:, -1:, None]
        at = changed[:, None, :, None, None]
        block_keys, block_values = (
            x.unflatten(2, (-1, block)).gather(2, at.expand(B, K, -1, block, x.shape[3])) for x in (keys, values)
        )
        summaries = _summaries(block_keys, block_values, exists[:, None, :, :, None])
        fields = context.sum_keys, context.sum_values, context.radius
        sum_keys, sum_values, radius = (put(x, new, at[..., 0]) for x, new in zip(fields, summaries, strict=True))
        count = rank[:, -1:] + 1
        if not torch.is_grad_enabled():
            count = context.count.copy_(count)
        return Context(keys, values, sum_keys, sum_values, radius, count), rank


def _summaries(keys: Tensor, values: Tensor, exists: Tensor) -> list[Tensor]:
    """Sums of keys and of values, and radius (root mean square distance to the mean key) of blocks `[B, Hkv, n, block,
    D]`; `exists` `[B, 1, n, block, 1]`.
    """
    y, u = (x.to(compute_dtype(x)).masked_fill(~exists, 0) for x in (keys, values))
    size, sum_keys = exists.sum(3).clamp(min=1), y.sum(3)
    distances = (y - (sum_keys / size).unsqueeze(3)).detach().masked_fill_(~exists, 0).square().sum((3, 4))
    return [sum_keys, u.sum(3), (distances / size.squeeze(3)).sqrt().unsqueeze(3)]


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
    number, width, out = context.radius.shape[2], context.keys.shape[2], []
    step = K  # as many key heads at a time as let enough queries read their keys at once
    if not traced() and L > GATHER:
        step = min(max(K * block_size(q, width) // min(TOGETHER, L), 1), K)
    for heads in (slice(head, head + step) for head in range(0, K, step)):
        parts = []
        size = block_size(x[:, heads].flatten(1, 2), width)
        for start in [0] if traced() else range(0, L, size):  # counting would tie a compiled program to a length
            rows = slice(start, start + size)
            last = number if traced() else min(int(rank[:, rows].max()) // sizes.block + 1, number)
            parts.append(_slab(x[:, heads, :, rows], rank[:, rows], context, heads, max(last, 1), sizes, scale))
        out.append(torch.cat(parts, dim=3))
    return torch.cat(out, dim=1).flatten(1, 2).to(q.dtype), context


def _slab(x: Tensor, rank: Tensor, context: Context, heads: slice, number: int, sizes: CausalSizes, scale) -> Tensor:
    """Attention of some queries `[B, K, G, L, D]` to the first `number` blocks of some heads."""
    summaries = (z[:, heads, :number] for z in (context.sum_keys, context.sum_values, context.radius))
    gather, keys, values = x.shape[3] <= GATHER, context.keys[:, heads], context.values[:, heads]
    if not gather:
        keys, values = (z[:, :, : number * sizes.block] for z in (keys, values))
    rank = rank.unsqueeze(1).expand(-1, x.shape[2], -1).reshape(x.shape[0], 1, -1)
    out = recompute(_attend, x.flatten(2, 3), rank, keys, values, *summaries, sizes, scale, gather)
    return out.unflatten(2, x.shape[2:4])


def _attend(x, rank, keys, values, sum_keys, sum_values, radius, sizes: CausalSizes, scale, gather: bool) -> Tensor:
    """Attention to exact keys, gathered for each query or with all others hidden, and to the means of blocks."""
    dtype, (B, K, R, _), c = compute_dtype(x), x.shape, sizes.block
    x = x.to(dtype) * scale
    scores = (sum_keys @ x.mT).mT / c  # the other way round this takes twice as long for few queries
    blocks, far = choose_for_each(x.detach(), rank, scores.detach(), radius.squeeze(3), sizes)
    if gather:
        start = torch.arange(B * K, device=x.device).view(B, K, 1, 1) * (keys.shape[2] // c)
        rows = (blocks + start).flatten()
        y, u = (  # [B, K, R, t · c, D]
            z.reshape(-1, c * z.shape[3]).index_select(0, rows).view(B, K, R, -1, z.shape[3]).to(dtype)
            for z in (keys, values)
        )
        slot = (blocks.unsqueeze(-1) * c + torch.arange(c, device=x.device)).flatten(3)
        near = (y @ x.unsqueeze(-1)).squeeze(-1).masked_fill(slot > rank.unsqueeze(-1), -torch.inf)
        out, lse = (z.squeeze(3) for z in softmax_of_scores(near.unsqueeze(3), u))
    else:
        bias = torch.full_like(far, -torch.inf).scatter_(3, blocks, 0.0)
        bias = bias.unsqueeze(-1).expand(-1, -1, -1, -1, c).flatten(3)
        bias = bias.masked_fill(torch.arange(keys.shape[2], device=x.device) > rank.unsqueeze(-1), -torch.inf)
        out, lse = attend(x, keys.to(dtype), values.to(dtype), bias)
    # sums instead of means: a copy of all means would cost more than the rest of a step
    far_out, far_lse = softmax_of_scores(scores + far, sum_values)
    return merge((out, lse), (far_out / c, far_lse))[0]
