"""Multipole attention over a sharded sequence: gathers block summaries and fetches the exact blocks.

Blocks and tiles order tokens by content, so tokens are first redistributed in that order (`Deal`): each process gets
whole blocks of keys and whole tiles of queries. It gathers the summaries of all blocks, chooses blocks as a single
process would, fetches the chosen ones (`fetch_blocks`), and returns its outputs to the processes of their queries. Each
token is sent a fixed number of times; the size of the summaries is proportional to length / block size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import recompute
from .linear import compute_dtype
from .multipole import Blocks, attend_to_blocks, choose, into_blocks, into_query_tiles, out_of_query_tiles, slabs
from .multipole_causal import masked_attention, summarise_blocks
from .multipole_choice import CausalSizes, Order, Sizes, by_position, choose_for_each, inverse, orders, radius_of
from .sharded import Exchange, Part
from .tiles import block_size


def part_of_multipole_attention(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sizes, part: Part, *, order: Order, scale: float
) -> Tensor:
    """`multipole_attention` of the queries of a part to all keys."""
    heads, dtype = k.shape[1], compute_dtype(q)
    x, y, u = (z.to(dtype) for z in (q, k, v))
    seen = _seen(part, q)
    y_order, x_order = orders(x, y, seen, seen, sizes, order, scale, part)
    keys, queries, count = Deal(y_order, sizes.block, part), Deal(x_order, sizes.tile, part), seen.sum(2)
    x, both = queries.there(x), keys.there(torch.cat([y, u], -1))
    tiles = into_query_tiles(x, sizes.tile, heads)
    counted = into_query_tiles((queries.places() < count)[:, None, :, None].expand(*x.shape[:3], 1), sizes.tile, heads)
    y_seen = into_blocks((keys.places() < count)[:, None, :, None].expand(*both.shape[:3], 1), sizes.block)[..., 0]
    stored = into_blocks(both, sizes.block)  # [N, B, c, D + Dv]
    y, u = stored.split([y.shape[3], u.shape[3]], -1)
    mine = Blocks.of(y, u, y_seen)
    square = (mine.y.detach().square().sum((2, 3)) / mine.keys.clamp(min=1)).unsqueeze(2)
    summaries = part.whole(torch.cat([mine.mean_y, mine.mean_u, mine.keys.unsqueeze(2), square], -1), 1)
    mean_y, mean_u, number, square = summaries.split([y.shape[3], u.shape[3], 1, 1], -1)
    number = number.squeeze(2).detach()
    radius = radius_of(square.squeeze(2).detach(), mean_y.detach()).masked_fill_(number == 0, -torch.inf)
    chosen = choose(tiles.detach(), counted, mean_y.detach(), radius, sizes, scale)
    need = torch.zeros_like(number, dtype=torch.bool).scatter(1, chosen.flatten(1), True)
    store, held, slot = fetch_blocks(stored, need, part)
    place = held.unsqueeze(2) * sizes.block + torch.arange(sizes.block, device=q.device)
    exists = place < count.repeat_interleave(heads, 0).unsqueeze(2)
    near_y, near_u = store.masked_fill(~exists.unsqueeze(3), 0).split([y.shape[3], u.shape[3]], -1)
    blocks = near_y, near_u, exists, number, mean_y, mean_u, slot
    rows = []
    for n, columns in slabs(tiles, number.shape[1], sizes):
        some = Blocks(*(z[n] for z in blocks))
        parts = [recompute(attend_to_blocks, tiles[n, t], some, chosen[n, t], scale)[0] for t in columns]
        rows.append(torch.cat(parts, 1))
    out = out_of_query_tiles(torch.cat(rows), q.shape[1], heads, x.shape[2])
    return queries.back(out).to(q.dtype)


def part_of_causal_multipole_attention(
    q: Tensor, k: Tensor, v: Tensor, sizes: CausalSizes, part: Part, *, scale: float
) -> Tensor:
    """`causal_multipole_attention` of the queries of a part.

    Each query chooses its own blocks. Together, the queries of a part choose most of the blocks before it, so more is
    fetched than for bidirectional attention; the computation is still divided evenly.
    """
    heads, dtype = k.shape[1], compute_dtype(q)
    seen = _seen(part, q)
    deal, count = Deal(by_position(seen, len(q), heads), sizes.block, part), seen.sum(2)
    both = deal.there(torch.cat([k, v], -1).to(dtype))  # [B, K, room, D + Dv]
    exists = (deal.places() < count)[:, None, :, None]
    keys, values = both.split([k.shape[3], v.shape[3]], -1)
    summaries = summarise_blocks(keys, values, exists, sizes.block)
    summaries = part.whole(torch.cat(summaries, -1), 2).split([k.shape[3], v.shape[3], 1], -1)  # [B, K, N, ...]
    x = q.to(dtype).unflatten(1, (heads, -1))  # [B, K, G, L, D]
    rank = part.own(seen.long().cumsum(2) - 1, 2)[:, 0]  # [B, L]

    def some_queries(width: int) -> list[tuple[Tensor, Tensor]]:
        size = block_size(q, width)
        rows = [(x[:, :, :, at : at + size], rank[:, at : at + size]) for at in range(0, part.length, size)]
        return [(z.flatten(2, 3), r[:, None].repeat(1, 1, z.shape[2])) for z, r in rows]

    need = torch.zeros(*summaries[2].shape[:3], dtype=torch.bool, device=q.device)
    with torch.no_grad():
        for queries, ranks in some_queries(need.shape[2]):
            scaled = queries * scale
            scores = scaled @ (summaries[0] / sizes.block).mT
            exact = choose_for_each(scaled, ranks, scores, summaries[2].squeeze(3), sizes)[0]
            need.scatter_(2, exact.flatten(2), True)
    store, held, _ = fetch_blocks(into_blocks(both, sizes.block), need.flatten(0, 1), part)
    keys, values = store.flatten(1, 2).unflatten(0, (-1, heads)).split([k.shape[3], v.shape[3]], -1)
    held = held.unflatten(0, (-1, heads))
    out = [
        recompute(masked_attention, queries, ranks, keys, values, *summaries, sizes, scale, held)
        .unflatten(2, (x.shape[2], -1))
        for queries, ranks in some_queries(keys.shape[2])
    ]  # fmt: skip
    return torch.cat(out, 3).flatten(1, 2).to(q.dtype)


class Deal:
    """Redistributes the tokens of a sharded sequence in another order. Each process gets the same number of tokens, a
    multiple of `unit`.

    `order` `[B, H, N · length]`: the positions of tokens in the new order, the same on every process.
    """

    def __init__(self, order: Tensor, unit: int, part: Part):
        self.part, (B, H, total) = part, order.shape
        self.room = -(-total // (part.size * unit)) * unit
        to = (part.own(inverse(order), 2) // self.room).flatten()
        self.leaving = to.argsort(stable=True)  # sorted by process, then sequence, head and position
        self.given = to.bincount(minlength=part.size).tolist()
        token = F.pad(order, (0, part.size * self.room - total), value=-1)
        token = token.narrow(2, part.rank * self.room, self.room).reshape(B * H, -1)
        come = token.div(part.length, rounding_mode="floor")  # source process; -1 for an empty slot
        row = torch.arange(B * H, device=order.device).unsqueeze(1)
        arriving = ((come * B * H + row) * part.length + token % part.length).flatten().argsort()
        self.arriving = arriving[int((come < 0).sum()) :]
        self.taken = come[come >= 0].bincount(minlength=part.size).tolist()

    def places(self) -> Tensor:
        """Indices in the new order of the tokens on this process, `[1, room]`."""
        return self.part.rank * self.room + torch.arange(self.room, device=self.leaving.device)[None]

    def there(self, x: Tensor) -> Tensor:
        """`[B, H, length, E]` → `[B, H, room, E]`, zero in empty slots."""
        return self._moved(x, self.leaving, self.given, self.arriving, self.taken, self.room)

    def back(self, x: Tensor) -> Tensor:
        """`[B, H, room, E]` → `[B, H, length, E]`."""
        return self._moved(x, self.arriving, self.taken, self.leaving, self.given, self.part.length)

    def _moved(self, x, leaving, given, arriving, taken, length: int) -> Tensor:
        B, H, _, E = x.shape
        found = Exchange.apply(x.reshape(-1, E).index_select(0, leaving), given, taken, self.part)
        return found.new_zeros(B * H * length, E).index_copy(0, arriving, found).view(B, H, length, E)


def fetch_blocks(blocks: Tensor, need: Tensor, part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Fetch the blocks that this process needs, `[N, S, c, E]`. Also returns their indices `[N, S]`, with the number of
    blocks for empty slots, and the slot of each block, `[N, all blocks]`.

    `blocks` `[N, B, c, E]` of this process; `need` `[N, all blocks]`.
    """
    N, B = blocks.shape[:2]
    wanted = part.gather(need.to(torch.uint8)).bool()[:, :, part.rank * B : (part.rank + 1) * B].flatten(1)
    rows = wanted.nonzero()[:, 1]  # sorted by process, then row and index
    source, row, number = need.view(N, part.size, B).transpose(0, 1).nonzero().unbind(1)
    given, taken = wanted.sum(1).tolist(), source.bincount(minlength=part.size).tolist()
    found = Exchange.apply(blocks.flatten(0, 1).index_select(0, rows), given, taken, part)
    number, slot = source * B + number, need.cumsum(1) - 1
    room = int(slot.max()) + 1
    at = row * room + slot[row, number]
    store = found.new_zeros(N * room, *blocks.shape[2:]).index_copy(0, at, found)
    held = need.new_full((N * room,), need.shape[1], dtype=torch.long).index_copy(0, at, number)
    return store.unflatten(0, (N, room)), held.view(N, room), slot


def _seen(part: Part, like: Tensor) -> Tensor:
    """`[B, 1, N · length]`, False for padding."""
    if part.key_mask is not None:
        return part.key_mask[:, None]
    return torch.ones(len(like), 1, part.size * part.length, dtype=torch.bool, device=like.device)
