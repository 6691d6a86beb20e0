"""Attention in blocks of positions, near field and far fields of a block together: where there is a band, an order, or
features with signs. Positive features without a band need less: see `two_softmaxes`, and `causal`, which keeps to the
tiles of this file.

Training keeps the inputs and outputs of a block and computes the rest again in backward, so memory is O(B·H·(L·D +
M·D)) whatever the number of features; and a block is small enough to stay near a CPU.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .banded_attention import attend_band
from .blocks import FarField, Rows, block_length, no_keys, summarise
from .inputs import Inputs
from .linear_attention import TILE, Features, State, attend_tiles, read_state, running_states
from .partial import Partial, merge
from .recompute import recompute
from .scratch import scratch
from .tiles import into_tiles, pairs, queries_from_tiles, queries_into_tiles, with_halo

Finish = Callable[[list[Partial], slice], Tensor]


def attend_in_blocks(
    inputs: Inputs,
    finish: Finish,
    *,
    bandwidth: int | None = None,
    far: Sequence[FarField] = (),
    apart: bool = False,
    far_mask: Tensor | None = None,
    extra: Partial | None = None,
    states: Sequence[State] | None = None,
    held: Sequence[Tensor] = (),
) -> tuple[Tensor, list[State]]:
    """Attention `[B, H, Lq, D]`, and the states of the far fields after the last key (if causal and not `apart`).

    The near field, if `bandwidth` is given, has exact scores within that distance, and `extra` besides. Far fields see
    all keys, or with `apart` those outside the band and only those of `far_mask`, if given. `finish(parts, rows)` makes
    one output of the near field (if any) and the far fields in this order, for some rows. `states` are those of earlier
    keys, if causal. `held` are all parameters and buffers read on the way.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    B, H, L, D = q.shape
    ordered = inputs.causal or inputs.segments is not None or apart  # far fields must tell keys by their place
    size, left = _tiling(L, bandwidth)
    right = 0 if inputs.causal else left
    width = max(
        [D, (left + 1 + right) * size if ordered or bandwidth is not None else 0, *(f.num_features for f in far)]
    )
    # A block keeps its halo within the next one, and running states (one a block) no larger than the values.
    block = block_length(L, B * H * width, max(left * size, width if ordered else 1), size, q.device)
    tiling = Tiling(inputs, size, left, right, bandwidth, apart, far_mask)
    queries = q.split(block, dim=2)
    needs_keys = bandwidth is not None or (bool(far) and ordered)
    keys, values = (x.split(block, dim=2) if needs_keys else () for x in (k, v))
    extras = (
        list(zip(*(x.split(block, dim=2) for x in extra), strict=True)) if extra is not None else [()] * len(queries)
    )

    suffixes: list[list[State]] = [[] for _ in queries]
    one_tile = ordered and not inputs.causal and size >= L  # nothing lies beyond it
    if not ordered:
        states = [summarise(inputs, f, held) for f in far]
    elif one_tile:
        states = []
    else:
        if states is None:
            states = [no_keys(inputs, f) for f in far]
        if not inputs.causal:
            suffixes = _suffixes(inputs, tiling, far, keys, values, held)
    outs = Rows(q.shape[:3], v.shape[3], q)
    carries = list(states)
    for number, x in enumerate(queries):
        rows = slice(number * block, number * block + x.shape[2])
        near = [with_halo(p, number, left * size, right * size, size) for p in (keys, values)] if needs_keys else []

        def attend(x: Tensor, *rest: Tensor, rows: slice = rows, number: int = number) -> tuple[Tensor, ...]:
            x = y = u = x.to(inputs.dtype)  # where no keys are needed, nothing looks at them
            if needs_keys:
                y, u, rest = rest[0].to(inputs.dtype), inputs.value(rest[1]), rest[2:]
            before, after, given = _unflatten(rest, 0 if one_tile else len(far), bool(suffixes[number]))
            parts: list[Partial] = []
            carried: list[Tensor] = []
            if bandwidth is not None:
                band = tiling.near(inputs.scaled(x), inputs.scaled(y), u, rows)
                parts.append(merge(band, Partial(*given)) if given else band)
            for i, f in enumerate(far):
                if ordered:
                    around = () if one_tile else (before[i], after[i] if after else None)
                    part, carry = tiling.far(f, x, y, u, rows, *around)
                    parts.append(part)
                    carried += carry
                else:
                    parts.append(read_state(f.queries(x, inputs.root), before[i]))
            return finish(parts, rows).to(q.dtype), *carried

        flat = [t for state in (*carries, *suffixes[number]) for t in state]
        with scratch(x):
            out, *new = recompute(attend, x, *near, *flat, *extras[number], held=held)
            outs.put(out, rows)
        if new:
            carries = [State(*new[i : i + 3]) for i in range(0, len(new), 3)]
    return outs.joined(), carries


def _tiling(length: int, bandwidth: int | None) -> tuple[int, int]:
    """Positions a tile, and tiles to each side that a band reaches into. Small tiles waste little of a narrow band."""
    size = min(TILE if bandwidth is None or bandwidth > TILE // 2 else TILE // 2, length)
    return size, min(-(-(bandwidth or 0) // size), -(-length // size) - 1)


def _unflatten(tensors: tuple[Tensor, ...], count: int, both: bool) -> tuple[list[State], list[State], tuple]:
    """States before, states after, and the rest, from the tensors that `recompute` hands over."""
    states = [State(*tensors[3 * i : 3 * i + 3]) for i in range(count * (1 + both))]
    return states[:count], states[count:], tensors[3 * len(states) :]


def _suffixes(
    inputs: Inputs,
    tiling: "Tiling",
    far: Sequence[FarField],
    keys: tuple[Tensor, ...],
    values: tuple[Tensor, ...],
    held: Sequence[Tensor],
) -> list[list[State]]:
    """For each block, the states of all keys after it and its halo."""
    carries = [no_keys(inputs, f) for f in far]
    suffixes = []
    start = inputs.k.shape[2]
    halo = tiling.right * tiling.size
    for number in range(len(keys))[::-1]:
        suffixes.append(carries)
        if number == 0:
            break
        start -= keys[number].shape[2]
        rows = slice(start, start + keys[number].shape[2])
        y, u = (with_halo(p, number, 0, halo, tiling.size) for p in (keys, values))

        def add(y: Tensor, u: Tensor, *rest: Tensor, rows: slice = rows) -> tuple[Tensor, ...]:
            y, u = y.to(inputs.dtype), inputs.value(u)
            states, _, _ = _unflatten(rest, len(far), False)
            return tuple(t for f, s in zip(far, states, strict=True) for t in tiling.after(f, y, u, rows, s))

        with scratch(y):
            new = recompute(add, y, u, *(t for state in carries for t in state), held=held)
        carries = [State(*new[3 * i : 3 * i + 3]) for i in range(len(far))]
    return suffixes[::-1]


def _tiles(x: Tensor, start: int, stop: int) -> Tensor:
    """A part of dimension 2; all of it as it is, since the gradient of a slice begins as a tensor of zeros."""
    return x if stop - start == x.shape[2] else x[:, :, start:stop]


class Tiling:
    """Tiles of a block of rows and of the keys around it, with their masks.

    Keys come with a halo of `left` and `right` tiles for the band; far fields see their own tile pair by pair (and, if
    they stay apart from the band, `lag` tiles to each side), and all beyond through running states.
    """

    def __init__(
        self,
        inputs: Inputs,
        size: int,
        left: int,
        right: int,
        bandwidth: int | None,
        apart: bool,
        far_mask: Tensor | None,
    ):
        self.size, self.left, self.right, self.lag = size, left, right, left if apart else 0
        self.causal, self.bandwidth, self.apart, self.root = inputs.causal, bandwidth, apart, inputs.root
        self.kv_heads, self.device = inputs.k.shape[1], inputs.q.device
        self.length = inputs.k.shape[2]
        self.padding = (left * size, right * size + -self.length % size)  # of the whole sequence
        self.near_mask, self.far_mask = (
            None if mask is None else F.pad(mask, self.padding)
            for mask in (inputs.key_mask, inputs.key_mask if far_mask is None else far_mask)
        )
        self.segments = None
        if inputs.segments is not None:
            at = torch.arange(-self.padding[0], self.length + self.padding[1], device=self.device)
            self.segments = inputs.segments[:, at.clamp(0, self.length - 1)]

    def near(self, x: Tensor, y: Tensor, v: Tensor, rows: slice) -> Partial:
        """The band: queries `[B, H, rows, D]`, keys and values with their halo."""
        allowed = self.pairs(rows, self.visible(rows, self.near_mask), self.left, self.right, within=self.bandwidth)
        keys, values = into_tiles(y, self.size), into_tiles(v, self.size)
        return self._from_tiles(attend_band(self.queries(x), keys, values, allowed, self.left, self.right), x)

    def far(
        self,
        far: FarField,
        x: Tensor,
        y: Tensor,
        v: Tensor,
        rows: slice,
        before: State | None = None,
        after: State | None = None,
    ) -> tuple[Partial, State | tuple[()]]:
        """A far field where order matters; and the state to carry on to the next block, if there is one before."""
        left, right = self.lag, 0 if self.causal else self.lag
        around = self.left - left, self.right - right  # tiles of the halo that are the band's alone
        y, v = self._trim(y, *around), self._trim(v, *around)
        visible = self.visible(rows, self.far_mask)
        visible = None if visible is None else self._trim(visible, *around)
        k = far.keys(y, self.root).map(lambda z: into_tiles(z, self.size))
        v = into_tiles(v, self.size)
        if visible is not None:
            k = k.only(into_tiles(visible, self.size))
        q = far.queries(x, self.root).map(self.queries)
        tiles = v.shape[2] - left - right

        beyond = []
        carry: State | tuple[()] = ()
        if before is not None:  # the tiles that the running state takes in while it passes
            entering, ended, mine = self.borders(k.map(lambda z: _tiles(z, 0, tiles)), rows, -left, False)
            states, carry = running_states(entering, _tiles(v, 0, tiles), before, ended)
            beyond.append((states, mine))
        if after is not None:
            last = left + right, tiles + left + right
            entering, ended, mine = self.borders(k.map(lambda z: _tiles(z, *last)), rows, right, True)
            beyond.append((running_states(entering, _tiles(v, *last), after, ended, backward=True)[0], mine))
        allowed = self.pairs(rows, visible, left, right, outside=self.bandwidth if self.apart else None)
        return self._from_tiles(attend_tiles(q, k, v, allowed, left, right, beyond), x), carry

    def after(self, far: FarField, y: Tensor, v: Tensor, rows: slice, state: State) -> State:
        """The state of keys after a block, from the one of those after the next."""
        right = self.lag
        y, v = (self._trim(z, 0, self.right - right) for z in (y, v))
        visible = self.visible(rows, self.far_mask)
        visible = None if visible is None else self._trim(visible, self.left, self.right - right)
        k = far.keys(y, self.root).map(lambda z: into_tiles(z, self.size))
        v = into_tiles(v, self.size)
        if visible is not None:
            k = k.only(into_tiles(visible, self.size))
        entering, ended, _ = self.borders(k.map(lambda z: z[:, :, right:]), rows, right, True)
        return running_states(entering, v[:, :, right:], state, ended, backward=True)[1]

    def queries(self, x: Tensor, value: float = 0.0) -> Tensor:
        """What queries have, in tiles, the last one filled up."""
        return queries_into_tiles(self.filled(x, value), self.size, self.kv_heads)

    def filled(self, x: Tensor, value: float = 0.0) -> Tensor:
        """Up to whole tiles."""
        missing = -x.shape[2] % self.size
        return F.pad(x, (0, 0, 0, missing), value=value) if missing else x

    def _from_tiles(self, part: Partial, x: Tensor) -> Partial:
        return Partial(*(queries_from_tiles(z, x.shape[1], x.shape[2]) for z in part))

    def _window(self, whole: Tensor, rows: slice, before: int = 0, after: int = 0) -> Tensor:
        """`[B, 1, L, 1]`: what the padded sequence holds for the tiles of some rows, with whole tiles around them."""
        count = -(-(rows.stop - rows.start) // self.size) + before + after
        start = rows.start + self.padding[0] - before * self.size
        return whole[:, None, start : start + count * self.size, None]

    def visible(self, rows: slice, whole: Tensor | None) -> Tensor | None:
        """Which keys of the block and its halo exist, by a mask of the padded sequence; None if all of them do."""
        if whole is None:
            start, stop = rows.start - self.left * self.size, -(-rows.stop // self.size) * self.size
            if start >= 0 and stop + self.right * self.size <= self.length:
                return None
            whole = F.pad(torch.ones(1, self.length, dtype=torch.bool, device=self.device), self.padding)
        return self._window(whole, rows, self.left, self.right)

    def _trim(self, x: Tensor, before: int, after: int) -> Tensor:
        """Without so many tiles of the halo."""
        return _tiles(x, before * self.size, x.shape[2] - after * self.size)

    def pairs(self, rows: slice, visible: Tensor | None, left: int, right: int, **band: int | None) -> Tensor:
        segments = None if self.segments is None else self._window(self.segments, rows, left, right)
        return pairs(
            self.size,
            left,
            right,
            self.causal,
            visible=None if visible is None else into_tiles(visible, self.size),
            segments=None if segments is None else into_tiles(segments, self.size),
            device=self.device,
            **band,
        )

    def borders(
        self, k: Features, rows: slice, shift: int, backward: bool
    ) -> tuple[Features, Tensor | None, Tensor | None]:
        """Where segments end: keys that leave their tile (others hidden), tiles that begin with an empty state, and
        queries that belong to the segment of the state before their tile.

        What leaves a tile belongs to the segment of its last position (its first, if `backward`).
        """
        if self.segments is None:
            return k, None, None
        own = into_tiles(self._window(self.segments, rows), self.size)
        start = rows.start + self.padding[0] + shift * self.size
        tiles = own.shape[2]
        inside = into_tiles(self.segments[:, None, start : start + tiles * self.size, None], self.size)
        edges = torch.arange(tiles + 1, device=self.device) * self.size + start - (0 if backward else 1)
        edges = edges.clamp(0, self.segments.shape[1] - 1)  # beyond the ends every state is empty
        owners = self.segments[:, None, edges, None, None]
        entering, previous = (owners[:, :, :-1], owners[:, :, 1:])[:: 1 if backward else -1]
        return k.only(inside == entering), entering != previous, own == previous
