"""Attention over a sequence that is sharded across processes.

The sums of linear attention are a few thousand numbers per head, whatever the sequence length, so each layer needs one
small exchange: all sums are gathered, and a query reads those of all parts (bidirectional) or of the parts before its
own (causal). A band needs the keys of neighbouring parts (`Part.around`).

The gradients of collectives are their adjoints: they differentiate the sum of the outputs of all processes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .banded import attend_to_chosen, banded_attention, beyond_band
from .causal import causal_linear_attention
from .linear import FeatureFunction, Sums, compute_dtype, summarise
from .linear import read as read_sums
from .masks import global_keys, positions_of
from .softmax import attend, merge


@dataclass(frozen=True)
class Part:
    """A process's part of a sharded sequence: `length` contiguous positions, the same number on every process.

    Masks cover the whole sequence and are the same on every process.
    """

    group: Any  # dist.ProcessGroup
    rank: int
    size: int  # number of processes, N
    length: int
    key_mask: Tensor | None = None  # [B, N · length], True for keys that are not padding
    segments: Tensor | None = None  # [B, N · length], indices of packed sequences

    @property
    def start(self) -> int:
        """First position of this part."""
        return self.rank * self.length

    def of(self, causal: bool) -> "Part":
        """This part without `segments` unless causal, since only causal attention uses packing."""
        return self if causal or self.segments is None else replace(self, segments=None)

    def without_global(self, count: int, causal: bool, like: Tensor) -> "Part":
        """This part with its global keys masked out."""
        chosen = Globals.of(self, count, causal, like).chosen
        return replace(self, key_mask=~chosen if self.key_mask is None else self.key_mask & ~chosen)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Slice of a tensor with all positions that belongs to this part."""
        return x.narrow(dim, self.start, self.length)

    def gather(self, x: Tensor) -> Tensor:
        """Gather a tensor from all processes, `[N, ...]`."""
        return _Gather.apply(x, self)

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Gather and concatenate all parts."""
        return torch.cat(self.gather(x).unbind(), dim)

    def around(self, x: Tensor, before: int, after: int) -> Tensor:
        """Extend this part of x `[B, H, L, E]` by up to `before` and `after` neighbouring positions.

        The neighbours may be on several processes. Each process sends only what others need.
        """

        def count(distance: int) -> int:  # positions needed from the process at this (signed) distance
            width = before if distance < 0 else after
            return min(max(width - (abs(distance) - 1) * self.length, 0), self.length) if distance else 0

        given = [count(self.rank - other) for other in range(self.size)]
        taken = [count(other - self.rank) for other in range(self.size)]
        pieces = [
            x[:, :, self.length - number :] if other > self.rank else x[:, :, :number]
            for other, number in enumerate(given)
        ]
        found = Exchange.apply(torch.cat(pieces, 2).movedim(2, 0), given, taken, self).movedim(0, 2)
        left = sum(taken[: self.rank])
        return torch.cat([found[:, :, :left], x, found[:, :, left:]], 2)

    def fetch(self, x: Tensor, index: Tensor) -> Tensor:
        """Fetch the tokens `[B, H, S, E]` of x that this process requests, zero for empty requests.

        `index` `[B, N, S]`: positions in the whole sequence that each process requests, -1 for none.
        """
        local = (index - self.start).flatten(1)
        here = (local >= 0) & (local < self.length) & (index >= 0).flatten(1)
        at = local.clamp(0, self.length - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        found = x.gather(2, at).masked_fill(~here[:, None, :, None], 0).unflatten(2, index.shape[1:])
        ones = [1] * self.size
        return Exchange.apply(found.movedim(2, 0), ones, ones, self).sum(0)

    def gather_sums(self, sums: Sums) -> list[Sums]:
        """Gather the sums of all processes in one exchange."""
        features = sums.outer.shape[-2]
        scale = sums.log_scale.detach()
        packed = torch.cat([sums.outer, sums.total, scale.mT.expand(-1, -1, features, 1)], -1)
        return [
            Sums(x[..., -1:].mT.detach()[..., : scale.shape[-1]], x[..., :-2], x[..., -2:-1])
            for x in self.gather(packed)
        ]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part) -> Tensor:
        ctx.part = part
        found = x.new_empty(part.size, *x.shape)
        _collective(part, lambda: dist.all_gather(list(found.unbind()), x.contiguous(), group=part.group))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        _collective(ctx.part, lambda: dist.all_to_all_single(found, gradient.contiguous(), group=ctx.part.group))
        return found.sum(0), None


class Exchange(torch.autograd.Function):
    """All-to-all exchange of rows `[L, ...]`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: list[int], taken: list[int], part: Part) -> Tensor:
        ctx.given, ctx.taken, ctx.part = given, taken, part
        found = x.new_empty(sum(taken), *x.shape[1:])
        _collective(part, lambda: dist.all_to_all_single(found, x.contiguous(), taken, given, group=part.group))
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Exchange.apply(gradient, ctx.taken, ctx.given, ctx.part), None, None, None


def _collective(part: Part, call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:
        raise RuntimeError(
            f"Process {part.rank} of {part.size} that share a sequence lost the others: one of them has ended, ran a "
            "different number of forward or backward passes, or exceeded the timeout of the process group. See their "
            f"logs. ({error})"
        ) from error


def part_of_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, phi_q: FeatureFunction, phi_k: FeatureFunction, part: Part
) -> Tensor:
    """`linear_attention` of the queries of a part to all keys."""
    mask = None if part.key_mask is None else part.own(part.key_mask, 1)
    sums = part.gather_sums(summarise(k, v, phi_k, mask))
    return read_sums(q, reduce(Sums.plus, sums), phi_q)


def part_of_causal_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    phi_q: FeatureFunction,
    phi_k: FeatureFunction,
    part: Part,
    lag: int = 0,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """`causal_linear_attention` of the queries of a part, and its log d, over all keys at least `lag` positions before
    each query, or after it with `reverse`.
    """
    total = part.size * part.length
    mask, segments = part.key_mask, part.segments
    if lag:  # shift the keys
        lag = min(lag, total)
        k, v = _lagged(torch.cat([k, v], -1), lag, part, reverse).split([k.shape[-1], v.shape[-1]], -1)
        mask = torch.ones(q.shape[0], total, dtype=torch.bool, device=q.device) if mask is None else mask
        mask = F.pad(mask[:, lag:], (0, lag)) if reverse else F.pad(mask[:, : total - lag], (lag, 0))
        if segments is not None:
            segments = torch.cat([segments[:, :1].expand(-1, lag), segments[:, : total - lag]], dim=1)
    mask = None if mask is None else part.own(mask, 1)
    pair = None
    if part.segments is not None and segments is not None:
        pair = part.own(part.segments, 1), part.own(segments, 1)
    if reverse:
        q, k, v = (x.flip(2) for x in (q, k, v))
        mask = None if mask is None else mask.flip(1)

    visible = mask
    if pair is not None:  # keys of the sequence that may continue in the next part
        last = pair[1] == pair[1][:, -1:]
        visible = last if mask is None else last & mask
    sums = part.gather_sums(summarise(k, v, phi_k, visible))
    for other, theirs in enumerate(sums):
        seen = torch.tensor([other > part.rank if reverse else other < part.rank], device=q.device)
        if segments is not None:
            seen = seen & (segments[:, (other + 1) * part.length - 1] == segments[:, part.start])
        theirs.log_scale = theirs.log_scale.masked_fill(~seen[:, None, None, None], -torch.inf)
    before = reduce(Sums.plus, sums)
    out, log_d, _ = causal_linear_attention(q, k, v, phi_q, phi_k, mask, pair, before)
    return (out.flip(2), log_d.flip(2)) if reverse else (out, log_d)


def _lagged(x: Tensor, lag: int, part: Part, reverse: bool) -> Tensor:
    """This part of x `[B, H, L, E]` shifted by `lag` positions, with zeros from outside of the sequence."""
    if reverse:
        x = part.around(x, 0, lag)
        return F.pad(x, (0, 0, 0, lag + part.length - x.shape[2]))[:, :, lag:]
    x = part.around(x, lag, 0)
    return F.pad(x, (0, 0, lag + part.length - x.shape[2], 0))[:, :, : part.length]


def part_of_banded_attention(
    q: Tensor, k: Tensor, v: Tensor, bandwidth: int, part: Part, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`banded_attention` of the queries of a part, and its log-sum-exp."""
    first = max(part.start - bandwidth, 0)
    last = min(part.start + part.length + (0 if causal else bandwidth), part.size * part.length)
    both = part.around(torch.cat([k, v], -1), bandwidth, 0 if causal else bandwidth)
    k, v = both.split([k.shape[-1], v.shape[-1]], -1)
    ahead = part.start - first
    q = F.pad(q, (0, 0, ahead, last - part.start - part.length))  # keeps queries and keys aligned
    masks = (None if x is None else x[:, first:last] for x in (part.key_mask, part.segments))
    key_mask, segments = masks
    found = banded_attention(q, k, v, bandwidth, scale=scale, key_mask=key_mask, causal=causal, segments=segments)
    out, lse = (x[:, :, ahead : ahead + part.length] for x in found)
    return out, lse


class Globals(NamedTuple):
    """The global keys of a sequence (`masks.global_keys`), as a part needs them."""

    chosen: Tensor  # [B, N · length]
    asked: Tensor  # [B, N, S], positions seen by the first query of each part
    own: Tensor  # [B, length or 1, S], positions seen by each query of this part

    @staticmethod
    def of(part: Part, count: int, causal: bool, like: Tensor) -> "Globals":
        total = part.size * part.length
        chosen = global_keys(total, count, part.key_mask, causal, part.segments, like.device)
        chosen = chosen.expand(like.shape[0], total)
        index = positions_of(chosen, count if causal else 2 * count, part.segments)
        if part.segments is None:
            return Globals(chosen, index.expand(-1, part.size, -1), index)
        return Globals(chosen, index[:, :: part.length], part.own(index, 1))


def part_of_global_attention(
    q: Tensor, k: Tensor, v: Tensor, count: int, bandwidth: int, part: Part, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """`global_attention` of the queries of a part, and its log-sum-exp."""
    found = Globals.of(part, count, causal, q)
    fetched = part.fetch(torch.cat([k, v], -1), found.asked)
    positions = part.start + torch.arange(part.length, device=q.device)
    present = beyond_band(positions, found.own, bandwidth, causal)
    slots = torch.arange(found.own.shape[2], device=q.device).expand_as(found.own)
    if part.segments is None:
        index, both = slots, fetched
    else:  # the global keys of sequences that begin in this part are local
        local = found.own - part.start
        here = (local >= 0) & (local < part.length)
        index = torch.where(here, local + slots.shape[2], slots)
        both = torch.cat([fetched, torch.cat([k, v], -1)], 2)
    k, v = both.split([k.shape[-1], v.shape[-1]], -1)
    return attend_to_chosen(q, k, v, index, present, scale)


def part_with_global_rows(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, count: int, part: Part, *, scale: float, last: bool = True
) -> Tensor:
    """`with_global_rows` of a part: each process attends to its own keys, and the results are merged."""
    found, dtype = Globals.of(part, count, not last, q), compute_dtype(q)
    x = part.fetch(q, found.asked).to(dtype)
    mask = None if part.key_mask is None else part.own(part.key_mask, 1)
    bias = None if mask is None else torch.where(mask[:, None, None], 0.0, -torch.inf)
    row, lse = attend(x, k.to(dtype), v.to(dtype), bias, scale)
    parts = part.gather(torch.cat([row, lse], -1))
    rows = merge(*((each[..., :-1], each[..., -1:]) for each in parts))[0].to(out.dtype)
    local = found.own[:, 0] - part.start
    here = (local >= 0) & (local < part.length) & (found.own[:, 0] >= 0)
    rows = rows.masked_fill(~here[:, None, :, None], 0)
    at = local.clamp(0, part.length - 1)[:, None, :, None].expand_as(rows)
    chosen = part.own(found.chosen, 1)[:, None, :, None]
    return out.masked_fill(chosen, 0).scatter_add(2, at, rows)
