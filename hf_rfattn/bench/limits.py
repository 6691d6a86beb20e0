"""The limit of linear attention: its matrix products alone, as plain `torch.bmm` on tensors that are there already.

No exponential, no maximum, no sum, no normaliser, no copy. For queries and keys x, y of D coordinates, projected to R
rows, with features φ of length M and values of D:

- forward, bidirectional: x Ωᵀ and y Ωᵀ (L·D·R each), S = φ(y)ᵀ v and φ(x) S (L·M·D each);
- forward, causal: the same, S a tile of C tokens at a time, and within tiles A = φ(x) φ(y)ᵀ (L·C·M) and A v (L·C·D).
  C is that of `linear_multiply_adds`;
- backward: two products of the same size for each of these, one towards each factor, but for projections that learn
  nothing, which need only that towards x or y. Products that an implementation computes again in backward, to save
  memory, are *not* in the limit: it belongs to one that keeps everything.

What else positive features cannot do without is run alone too, to tell what bounds them: `other_parts`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..mechanisms import Mechanism
from ..mechanisms.base import LinearMechanism
from ..ops import TILE, linear_multiply_adds


class Product(NamedTuple):
    """So many products of matrices `[rows, inner]` and `[inner, columns]`."""

    number: int
    rows: int
    inner: int
    columns: int

    @property
    def multiply_adds(self) -> int:
        return self.number * self.rows * self.inner * self.columns

    @property
    def gradients(self) -> "tuple[Product, Product]":
        """The products that give the gradients of both factors."""
        number, rows, inner, columns = self
        return Product(number, rows, columns, inner), Product(number, inner, rows, columns)


def matrix_products(
    mechanism: Mechanism, batch: int, length: int, *, causal: bool, training: bool
) -> list[Product] | None:
    """All products of one attention over `length` tokens; None for a mechanism that is not linear attention alone.

    >>> from hf_rfattn import build_mechanism
    >>> favor = build_mechanism("favor+", num_heads=2, head_dim=8, num_features=16)
    >>> matrix_products(favor, 1, 100, causal=False, training=False)[0]
    Product(number=2, rows=100, inner=8, columns=16)
    """
    if not isinstance(mechanism, LinearMechanism):
        return None
    features, dim = mechanism.feature_map.num_features, mechanism.head_dim
    projected = mechanism.feature_map.multiply_adds() // dim
    heads = batch * mechanism.num_heads
    projections = [Product(heads, length, dim, projected)] * 2 if projected else []
    if causal:
        pairs = linear_multiply_adds(length, features, dim, True) - linear_multiply_adds(length, features, dim, False)
        tile = max(1, pairs // (length * (features + dim)))
        tiles = heads * -(-length // tile)
        others = [
            Product(tiles, features, tile, dim),
            Product(tiles, tile, features, dim),
            Product(tiles, tile, features, tile),
            Product(tiles, tile, tile, dim),
        ]
    else:
        others = [Product(heads, features, length, dim), Product(heads, length, features, dim)]
    products = [*projections, *others]
    if training:
        learned = any(parameter.ndim > 1 for parameter in mechanism.feature_map.parameters())
        products += [gradient for product in projections for gradient in product.gradients[: 2 if learned else 1]]
        products += [gradient for product in others for gradient in product.gradients]
    return products


def run_products(
    products: Sequence[Product], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Callable[[], None]:
    """What computes them, on tensors that are made now. Products of one shape share theirs."""
    generator = torch.Generator(device).manual_seed(0)
    operands: dict[tuple[int, ...], Tensor] = {}
    results: dict[tuple[int, ...], Tensor] = {}
    calls = []
    for number, rows, inner, columns in products:
        left, right, out = (number, rows, inner), (number, inner, columns), (number, rows, columns)
        for shape in (left, right):
            if shape not in operands:
                operands[shape] = torch.randn(shape, generator=generator, device=device).to(dtype)
        results.setdefault(out, torch.empty(out, dtype=dtype, device=device))
        calls.append((operands[left], operands[right], results[out]))

    @torch.no_grad()
    def run() -> None:
        for left, right, out in calls:
            torch.bmm(left, right, out=out)

    return run


def other_parts(
    mechanism: Mechanism, tensors: Sequence[Tensor], *, causal: bool, training: bool
) -> dict[str, Callable[[], None]]:
    """What one attention over q, k, v of positive features does besides products, each alone.

    Its exponentials, those of backward included, near the processor; its results, in memory that is fetched anew each
    time; and all of its calls, on a single token. What remains are passes over features: sums, maxima, factors.
    """
    q, k, v = tensors
    B, H, L, _ = q.shape
    features = mechanism.num_features or 0
    count = (4 * features + min(TILE, L) if causal else 2 * features) * B * H * L * (2 if training else 1)
    logs = -torch.rand(min(count, 2**20), dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    powers = torch.empty_like(logs)
    results = [q, q, k, v] if training else [q]
    token = [x[:, :, :1].clone().requires_grad_(training) for x in (q, k, v)]

    def exponentials() -> None:
        for start in range(0, count, len(logs)):
            torch.exp2(logs[: count - start], out=powers[: count - start])

    def fresh_memory() -> None:
        for each in results:
            torch.empty_like(each).zero_()

    def calls() -> None:
        with torch.set_grad_enabled(training):
            out = mechanism(*token, causal=causal)
        if training:
            out.sum().backward()

    return {"exponentials": exponentials, "fresh memory": fresh_memory, "calls": calls}
