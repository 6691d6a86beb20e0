"""Multipole attention: exact for the keys that matter, block means for the rest; close to softmax without training.

out_i = (Σ_{j chosen} exp(x_iᵀy_j) v_j + Σ_{b not chosen} n_b exp(x_iᵀȳ_b) v̄_b) / (the same without values), over blocks
b of n_b keys with mean key ȳ_b and mean value v̄_b. A tile of queries, or each query if causal, chooses the blocks with
the largest likely score x_iᵀȳ_b + 3 ‖x_i‖ r_b / √D, where r_b is the root mean square distance of the keys to ȳ_b.
This is the fast multipole method with distance measured by content. Greengard and Rokhlin (1987), "A fast algorithm for
particle simulations".

Causal attention keeps all keys and values, as softmax does, and their sums over each block. Generating a token reads
only the sums and the exact keys. Prefill (several tokens at once) scores all keys, which is slower than softmax at all
measured lengths, up to 16,384 tokens.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..ops import softmax_attention, with_global_rows
from ..ops.multipole import multipole_attention
from ..ops.multipole_causal import Context, causal_multipole_attention
from ..ops.multipole_choice import SUBTILES, CausalSizes, Sizes
from ..ops.naive import causal_multipole_weights, multipole_weights
from ..ops.sharded import Part, part_with_global_rows
from ..ops.sharded_multipole import part_of_causal_multipole_attention, part_of_multipole_attention
from ..ops.tiles import traced
from .base import Mechanism
from .config import MechanismConfig, check_at_least, option
from .registry import register_mechanism

# (longest input, keys per block, queries per tile), chosen by measured error and speed.
BY_LENGTH = ((512, 8, 16), (4096, 16, 32))
LONGER = (32, 64)
CAUSAL_BLOCK = 8
LOCAL = 8  # 1/8 of the exact keys of a causal query are the keys directly before it


def block_and_tile(length: int) -> tuple[int, int]:
    """Default (keys per block, queries per tile) of bidirectional attention over `length` tokens."""
    return next(((block, tile) for longest, block, tile in BY_LENGTH if length <= longest), LONGER)


@dataclass(frozen=True)
class MultipoleConfig(MechanismConfig):
    """Options of "multipole"."""

    exact_keys: int = option(128, "Number of exact keys per query. Inputs up to this length use softmax attention.")
    block: int | None = option(None, "Number of keys per block. Default: chosen by sequence length, 8 if causal.")
    tile: int | None = option(
        None, "Number of queries that choose blocks together, a multiple of 4. Default: by length. Unused if causal."
    )
    global_tokens: int = option(1, "Number of global tokens at the start of a sequence, as in Longformer.")
    order: Literal["auto", "position", "content"] = option(
        "auto",
        "Order of tokens in blocks and tiles; auto chooses it for each head by its q and k. Unused if causal.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(self, 1, "exact_keys", "block")
        check_at_least(self, 4, "tile")
        check_at_least(self, 0, "global_tokens")
        if self.tile is not None and self.tile % 4:
            raise ValueError(f"tile must be a multiple of 4, not {self.tile}.")
        largest = max(c for _, c, _ in BY_LENGTH) if self.block is None else self.block
        if self.exact_keys < largest * (2 + -(-self.global_tokens // largest)):
            raise ValueError(
                f"exact_keys={self.exact_keys} is too small: it must cover two blocks of {largest} keys and the blocks "
                f"of global_tokens={self.global_tokens}. Choose more exact_keys or a smaller block."
            )


class MultipoleAttention(Mechanism):
    config: MultipoleConfig
    holds_all_keys = True

    def attend(self, q, k, v, *, scale, key_mask, causal, segments):
        if k.shape[2] <= self.config.exact_keys:
            masks = {"key_mask": key_mask, "causal": causal, "segments": segments}
            return softmax_attention(q, k, v, scale=scale, **masks)
        if causal and segments is not None:
            return self._attend_unpacked(q, k, v, scale, key_mask, segments, causal=True)
        if causal:
            return causal_multipole_attention(q, k, v, self._causal_sizes(), scale=scale, key_mask=key_mask)[0]
        return self._attend_to_all(q, k, v, scale, key_mask)

    def attend_part(self, q, k, v, part, *, scale, causal):
        total = part.size * part.length
        if total <= self.config.exact_keys or part.segments is not None:
            return super().attend_part(q, k, v, part, scale=scale, causal=causal)
        if causal:
            return part_of_causal_multipole_attention(q, k, v, self._causal_sizes(), part, scale=scale)
        return self._attend_to_all(q, k, v, scale, part.key_mask, part)

    def _attend_to_all(self, q, k, v, scale: float, key_mask: Tensor | None, part: Part | None = None) -> Tensor:
        """Bidirectional attention. Rows are grouped by length, so that padding does not change the sizes they get."""
        if key_mask is None or traced() or None not in (self.config.block, self.config.tile):
            length = k.shape[2] if part is None else part.size * part.length
            return self._attend_with_sizes(q, k, v, scale, key_mask, part, self._sizes(length))
        out, count = q.new_zeros(*q.shape[:3], v.shape[3]), key_mask.sum(1)
        kinds = torch.bucketize(count, torch.tensor([length for length, *_ in BY_LENGTH], device=q.device))
        for kind in kinds.unique().tolist():
            rows = (kinds == kind).nonzero().flatten()
            x, y, u = (z.index_select(0, rows) for z in (q, k, v))
            sizes = self._sizes(int(count[rows].max()))
            out = out.index_copy(0, rows, self._attend_with_sizes(x, y, u, scale, key_mask[rows], part, sizes))
        return out

    def _attend_with_sizes(self, q, k, v, scale, key_mask, part: Part | None, sizes: Sizes) -> Tensor:
        count, options = self.config.global_tokens, {"order": self.config.order, "scale": scale}
        if part is not None:
            part = replace(part, key_mask=key_mask)
            out = part_of_multipole_attention(q, k, v, sizes, part, **options)
            return part_with_global_rows(out, q, k, v, count, part, scale=scale, last=False) if count else out
        out = multipole_attention(q, k, v, sizes, key_mask=key_mask, **options)
        if not count or q.shape[2] != k.shape[2]:
            return out
        return with_global_rows(out, q, k, v, count, scale=scale, key_mask=key_mask, last=False)

    def _sizes(self, length: int) -> Sizes:
        """Sizes for a sequence of `length` keys."""
        config = self.config
        block, tile = block_and_tile(length)
        block, tile = config.block or block, config.tile or tile
        return Sizes(block, tile, -(-config.exact_keys // block), -(-config.global_tokens // block))

    def _causal_sizes(self) -> CausalSizes:
        config = self.config
        block = config.block or CAUSAL_BLOCK
        first, exact = -(-config.global_tokens // block), -(-config.exact_keys // block)
        local = max(exact // LOCAL, 1)
        return CausalSizes(block, max(exact - first - local, 1), local, first)

    def new_state(self, batch, value_dim, dtype, device, length=0):
        like = torch.empty((), dtype=dtype, device=device)
        block = self._causal_sizes().block
        return Context.new(batch, self.num_kv_heads, self.head_dim, value_dim, length, block, like, fixed=length > 0)

    def attend_after(self, q, k, v, state, *, scale, key_mask):
        return causal_multipole_attention(q, k, v, self._causal_sizes(), scale=scale, key_mask=key_mask, context=state)

    def dense_weights(self, x, y, key_mask, causal, segments):
        seen = torch.ones_like(y[:, 0, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        if segments is None:
            return torch.stack([self._dense(*one, causal) for one in zip(x, y, seen, strict=True)])
        weights = x.new_zeros(*x.shape[:3], y.shape[2])
        for row, numbers in enumerate(segments):
            for number in numbers.unique():
                at = (numbers == number).nonzero().flatten()
                weights[row, :, at[:, None], at] = self._dense(x[row][:, at], y[row][:, at], seen[row, at], causal)
        return weights

    def _dense(self, x: Tensor, y: Tensor, seen: Tensor, causal: bool) -> Tensor:
        """Dense weights of one sequence."""
        if not causal:
            sizes = self._sizes(int(seen.sum()))
            return multipole_weights(x, y, sizes, self.config.order, seen, self.config.global_tokens)
        ahead = y.shape[1] - x.shape[1]
        if ahead:
            x = torch.cat([x.new_zeros(x.shape[0], ahead, x.shape[2]), x], dim=1)
        return causal_multipole_weights(x, y, self._causal_sizes(), seen)[:, ahead:]

    def multiply_adds(self, length, causal):
        config = self.config
        if length <= config.exact_keys:
            return length * (length + 1 if causal else 2 * length) * self.head_dim
        if causal:
            sizes = self._causal_sizes()
            far = length // sizes.block
            return 2 * length * (config.exact_keys + sizes.block + far) * self.head_dim
        tiled = self._sizes(length)
        blocks = -(-length // tiled.block)
        votes = 2 * SUBTILES * -(-length // tiled.tile) * blocks
        return (2 * length * (config.exact_keys + blocks + config.global_tokens) + votes) * self.head_dim


register_mechanism("multipole", MultipoleConfig, MultipoleAttention)
