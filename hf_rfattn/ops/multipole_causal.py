"""Causal multipole attention: each query chooses its own exact blocks, for a whole sequence or token by token.

The exact blocks of a query are the first ones, its own, some directly before it, and the best of the others
(`multipole_choice`); the rest are approximated by their means. The choice depends only on the query and its past, so
outputs do not depend on how tokens are split into calls.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backend, fused
from .autograd import recompute
from .linear import State, compute_dtype
from .multipole_choice import CausalSizes, choose_for_each
from .softmax import SOME, attend, exp_of_difference, merge, softmax_of_scores
from .tiles import block_size, traced

TOGETHER = 64  # number of queries that read the same keys at once, if memory allows
GATHER = 4  # for at most this many queries, gather the keys of chosen blocks; for more, score all keys and mask


@dataclass
class Context(State):
    """Generation state: all keys and values so far, without padding, and a summary of each block.

    The last block receives padding and is never read. Tensors grow with the number of tokens, or are allocated for a
    fixed number. The number of keys is never read from the device, which would synchronize a GPU.
    """

    keys: Tensor  # [B, Hkv, S, D]
    values: Tensor  # [B, Hkv, S, Dv]
    sum_keys: Tensor  # [B, Hkv, S / block, D]
    sum_values: Tensor  # [B, Hkv, S / block, Dv]
    radius: Tensor  # [B, Hkv, S / block, 1], see `radius_of`
    count: Tensor  # [B, 1], number of keys without padding
    tokens: Tensor | None  # [B, 0, N], no elements: N tokens so far, with padding; None if the size is fixed

    @staticmethod
    def new(
        batch: int,
        heads: int,
        head_dim: int,
        value_dim: int,
        length: int,
        block: int,
        like: Tensor,
        fixed: bool = False,
    ) -> "Context":
        """Allocate room for `length` tokens, or more later unless `fixed`, with the dtype and device of `like`."""
        number = -(-length // block) + 1
        keys, values = (like.new_zeros(batch, heads, number * block, size) for size in (head_dim, value_dim))
        sum_keys, sum_values, radius = (
            like.new_zeros(batch, heads, number, size, dtype=compute_dtype(like)) for size in (head_dim, value_dim, 1)
        )
        count = torch.zeros(batch, 1, dtype=torch.long, device=like.device)
        tokens = None if fixed else like.new_empty(batch, 0, 0)
        return Context(keys, values, sum_keys, sum_values, radius, count, tokens)

    @property
    def block(self) -> int:
        return self.keys.shape[2] // max(self.radius.shape[2], 1)

    def rewind(self, length: int) -> None:
        """Keep only the first `length` tokens, which must not be padding."""
        self.count.fill_(length)
        if self.tokens is not None:
            self.tokens = self.tokens.new_empty(len(self.tokens), 0, length)

    def reset(self) -> None:
        super().reset()
        self.rewind(0)

    def with_room(self, new: int) -> "Context":
        """Return a context with room for `new` more tokens; if it has to grow, by at least half."""
        block, number = self.block, self.radius.shape[2]
        need = 0 if self.tokens is None else -(-(self.tokens.shape[2] + new) // block) + 1
        if need <= number:
            return self
        more = max(need, number + number // 2) - number

        def grown(x: Tensor) -> Tensor:
            size = x.shape[2] // number
            return F.pad(x[:, :, :-size], (0, 0, 0, (more + 1) * size))

        kept = ("count", "tokens")
        with torch.inference_mode(False):
            return Context(**{name: x if name in kept else grown(x) for name, x in vars(self).items()})

    def extended(self, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple["Context", Tensor]:
        """Add new tokens. Returns the context and, `[B, L]`, the index of the last key that each new token sees, -1 if
        it sees none.

        Writes in place unless gradients are enabled.
        """
        B, K, L, _ = k.shape
        context = self.with_room(L)
        block, number = context.block, context.radius.shape[2]
        new = torch.ones(1, L, dtype=torch.long, device=k.device) if visible is None else visible.long()
        rank = context.count + new.cumsum(1) - 1
        slot = rank if visible is None else torch.where(visible, rank, number * block - 1)
        slot = slot[:, None, :, None]

        def put(into: Tensor, new: Tensor, at: Tensor) -> Tensor:
            at, new = at.expand(B, K, at.shape[2], into.shape[3]), new.to(into.dtype)
            return into.scatter(2, at, new) if torch.is_grad_enabled() else into.scatter_(2, at, new)

        keys, values = put(context.keys, k, slot), put(context.values, v, slot)
        # blocks that may contain new tokens, padded with the last block
        changed = context.count // block + torch.arange((L + block - 2) // block + 1, device=k.device)
        changed = changed.clamp(max=number - 1).expand(B, -1)[:, None, :, None]  # [B, 1, n, 1]
        block_keys, block_values = (
            x.unflatten(2, (-1, block))
            .gather(2, changed.unsqueeze(-1).expand(B, K, -1, block, x.shape[3]))
            .flatten(2, 3)
            for x in (keys, values)
        )
        exists = (changed * block + torch.arange(block, device=k.device)).flatten(2) <= rank[:, -1:, None]
        summaries = summarise_blocks(block_keys, block_values, exists.unsqueeze(-1), block)
        fields = context.sum_keys, context.sum_values, context.radius
        sum_keys, sum_values, radius = (put(x, new, changed) for x, new in zip(fields, summaries, strict=True))
        count = rank[:, -1:] + 1
        if context.tokens is None:
            torch._assert_async((count <= (number - 1) * block).all(), "The static cache has no room for more tokens.")
        if not torch.is_grad_enabled():
            count = context.count.copy_(count)
        tokens = None if context.tokens is None else k.new_empty(B, 0, context.tokens.shape[2] + L)
        return Context(keys, values, sum_keys, sum_values, radius, count, tokens), rank


def summarise_blocks(keys: Tensor, values: Tensor, exists: Tensor, block: int) -> list[Tensor]:
    """Sums of keys and values, and radius (root mean square distance to the mean key) of each block. `exists`
    `[B, 1, S, 1]`: False for padding.
    """
    exists = exists.unflatten(2, (-1, block))
    y, u = (x.to(compute_dtype(x)).unflatten(2, (-1, block)).masked_fill(~exists, 0) for x in (keys, values))
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

    Queries `[B, H, L, D]`, keys and values `[B, Hkv, L, D]`; `key_mask` `[B, L]`: True for keys that are not padding,
    which alone are grouped in blocks. Several queries at once (prefill) score all keys, in O(L · all keys · D) like
    softmax. A generation step costs O((all keys / block + exact keys) · D) and does not synchronize a GPU.
    """
    B, _, L, D = q.shape
    K = k.shape[1]
    if context is None:
        context = Context.new(B, K, D, v.shape[3], L, sizes.block, k)
    context, rank = context.extended(k, v, key_mask)
    x = q.unflatten(1, (K, -1))  # [B, K, G, L, D]
    number, width, out, step = context.radius.shape[2], context.keys.shape[2], [], K
    form = _gathered
    if L > GATHER:
        this = partial(causal_multipole_attention, sizes=sizes, scale=scale)
        if q.device.type in backend.DEVICES and backend.fused("causal multipole", this, (q, k, v)):
            form, width = _by_fused_kernels, 2 * number
        else:
            form = masked_attention
            if not traced():  # few enough key heads at a time that TOGETHER queries fit into a block
                step = min(max(K * block_size(q, width) // min(TOGETHER, L), 1), K)
    for heads in (slice(head, head + step) for head in range(0, K, step)):
        parts = []
        size = block_size(x[:, heads].flatten(1, 2), width)
        for start in [0] if traced() else range(0, L, size):  # a loop would specialise a compiled graph to a length
            rows = slice(start, start + size)
            last = _blocks_seen(context, rank, rows, sizes.block)
            parts.append(_slab(form, x[:, heads, :, rows], rank[:, rows], context, heads, last, sizes, scale))
        out.append(torch.cat(parts, dim=3))
    return torch.cat(out, dim=1).flatten(1, 2).to(q.dtype), context


def _blocks_seen(context: Context, rank: Tensor, rows: slice, block: int) -> int:
    """The largest number of blocks that any query of these rows sees."""
    length, number = rank.shape[1], context.radius.shape[2]
    if traced() or (context.tokens is None and length <= GATHER):
        return number
    if context.tokens is None:
        seen = int(rank[:, rows].max()) + 1
    else:
        seen = context.tokens.shape[2] - max(length - rows.stop, 0)
    return min(max(-(-seen // block), 1), number)


def _slab(form, x, rank: Tensor, context: Context, heads: slice, number: int, sizes: CausalSizes, scale) -> Tensor:
    """Attention of queries `[B, K, G, L, D]` to the first `number` blocks of some heads."""
    summaries = (z[:, heads, :number] for z in (context.sum_keys, context.sum_values, context.radius))
    keys, values = context.keys[:, heads], context.values[:, heads]
    if form is not _gathered:
        keys, values = (z[:, :, : number * sizes.block] for z in (keys, values))
    rank = rank.unsqueeze(1).expand(-1, x.shape[2], -1).reshape(x.shape[0], 1, -1)
    out = recompute(form, x.flatten(2, 3), rank, keys, values, *summaries, sizes, scale)
    return out.unflatten(2, x.shape[2:4])


def masked_attention(
    x, rank, keys, values, sum_keys, sum_values, radius, sizes: CausalSizes, scale: float, held: Tensor | None = None
) -> Tensor:
    """Score all keys and mask those that are not exact. `held` `[B, K, S]`: indices, in ascending order, of the S
    blocks whose keys are given; None if all are.
    """
    dtype, c = compute_dtype(x), sizes.block
    x = x.to(dtype) * scale
    scores = x @ (sum_keys / c).mT
    blocks, far = choose_for_each(x.detach(), rank, scores.detach(), radius.squeeze(3), sizes)
    bias = torch.full_like(far, -torch.inf).scatter_(3, blocks, 0.0)
    place = torch.arange(keys.shape[2], device=x.device)
    if held is not None:
        bias = bias.gather(3, held.clamp(max=far.shape[3] - 1).unsqueeze(2).expand(-1, -1, x.shape[2], -1))
        place = (held.unsqueeze(-1) * c + torch.arange(c, device=x.device)).flatten(2).unsqueeze(2)
    bias = bias.unsqueeze(-1).expand(-1, -1, -1, -1, c).flatten(3)
    bias = bias.masked_fill(place > rank.unsqueeze(-1), -torch.inf)
    near = attend(x, keys.to(dtype), values.to(dtype), bias)
    return merge(near, softmax_of_scores(scores + far, sum_values / c))[0]


def _by_fused_kernels(x, rank, keys, values, sum_keys, sum_values, radius, sizes: CausalSizes, scale: float) -> Tensor:
    """`masked_attention` by fused kernels. Only the scores with block means, which the choice needs, are in memory, and
    key blocks that none of 128 queries has chosen are skipped.
    """
    dtype, c = compute_dtype(x), sizes.block
    means, mean_values = sum_keys / c, sum_values / c
    chooser = x.detach().to(dtype) * scale
    _, far = choose_for_each(chooser, rank, chooser @ means.detach().mT, radius.squeeze(3), sizes)
    number, last = torch.arange(far.shape[3], device=x.device), rank[:, 0]
    near = (far == -torch.inf) & (number * c <= rank.unsqueeze(-1))

    def visible(b, h, i, j):
        return near[b, h, i, j // c] & (j <= last[b, i])

    mask = fused.block_mask_of_pairs(near, c, visible)
    parts = [
        fused.attend(x, keys.to(x.dtype), values.to(x.dtype), scale=scale, mask=mask),
        fused.attend(x, means.to(x.dtype), mean_values.to(x.dtype), scale=scale, tile_bias=far),
    ]
    return merge(*((out.to(dtype), lse) for out, lse in parts))[0]


def _gathered(x, rank, keys, values, sum_keys, sum_values, radius, sizes: CausalSizes, scale: float) -> Tensor:
    """Read only the exact keys and the sums. A copy of all means would cost more than the rest of a step."""
    dtype, (B, K, R, _), c = compute_dtype(x), x.shape, sizes.block
    x = x.to(dtype) * scale
    scores = (sum_keys @ x.mT).mT / c  # twice as fast as x @ sum_keys.mT for few queries
    blocks, far = choose_for_each(x.detach(), rank, scores.detach(), radius.squeeze(3), sizes)
    start = torch.arange(B * K, device=x.device).view(B, K, 1, 1) * (keys.shape[2] // c)
    rows = (blocks + start).flatten()

    def take(z: Tensor) -> Tensor:
        taken = z.reshape(-1, c * z.shape[3]).index_select(0, rows)
        return taken.view(B, K, R, -1, z.shape[3]).to(dtype)  # [B, K, R, t · c, D]

    slot = (blocks.unsqueeze(-1) * c + torch.arange(c, device=x.device)).flatten(3)
    near = (take(keys) @ x.unsqueeze(-1)).squeeze(-1).masked_fill(slot > rank.unsqueeze(-1), -torch.inf)
    scores = torch.cat([near, scores + far], dim=3)
    weights = exp_of_difference(scores, scores.detach().amax(-1, keepdim=True))
    of_keys, of_means = weights.split([near.shape[3], far.shape[3]], dim=3)
    out = (of_keys.unsqueeze(3) @ take(values)).squeeze(3) + of_means @ sum_values / c
    return out / weights.sum(-1, keepdim=True).clamp(min=SOME)
