"""Other libraries of Performer attention, measured beside ours with as many features and the same draw of ω.

performer-pytorch and pytorch-fast-transformers live in an environment of their own that also holds this package, so
that all run in one process in turn: `make peers` makes it.

- Both have one ω for all heads; ours has one a head. For the comparison with the definition, ours takes one too.
- The features of fast-transformers come in ± pairs: φ has M entries of M/2 rows ω, so it projects half as much as the
  others. Its definition is `favor+` with `antithetic=True`. Its layout is `[B, L, H, D]`, and it gets that.
- Nothing is drawn anew while it is timed: fast-transformers is in eval mode with `deterministic_eval`.
- Epsilons are as they come: 1e-4 on every feature in performer-pytorch, 1e-6 on the denominator in fast-transformers.
  They move the output off the definition, more for larger queries and keys: hence `TOLERANCE`.
- performer-pytorch's causal attention needs a CUDA kernel and has a fallback "for reader's reference" without it; that
  is not measured. fast-transformers' causal attention is its compiled kernel for CPUs.
"""

import importlib.metadata
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..mechanisms import Mechanism, build_mechanism
from .contenders import Contender

PACKAGES = ("performer-pytorch", "pytorch-fast-transformers")
PERFORMER, FAST_TRANSFORMERS = "performer-pytorch", "fast-transformers"
NAMES = [PERFORMER, FAST_TRANSFORMERS]
TOLERANCE = 1e-2


def check_peers() -> None:
    """Raise unless they are installed."""
    missing = []
    for package in PACKAGES:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        raise ImportError(
            f"--peers measures {' and '.join(PACKAGES)}, and this environment has no {' and no '.join(missing)}. "
            "`make peers` makes one that has both; then `make bench-peers`, or this command with "
            ".venv-peers/bin/hf-rfattn."
        )


def peers(num_heads: int, head_dim: int, num_features: int, causal: bool, seed: int = 0) -> list[Contender]:
    """All that can do this."""
    found = [] if causal else [_performer(num_heads, head_dim, num_features, seed)]
    if num_features % 2 == 0:
        found.append(_fast_transformers(num_heads, head_dim, num_features, causal, seed))
    return found


@torch.no_grad()
def _one_projection(mechanism: Mechanism) -> Tensor:
    """Give all heads of a `favor+` the ω of the first, `[rows, D]`."""
    projection: Tensor = mechanism.get_buffer("feature_map.projection")
    projection.copy_(projection[:1].clone())
    return projection[0]


def _definition(num_heads: int, head_dim: int, **options: Any) -> Mechanism:
    return build_mechanism("favor+", num_heads=num_heads, head_dim=head_dim, **options).eval()


def _performer(num_heads: int, head_dim: int, num_features: int, seed: int) -> Contender:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses names that torch has since moved
        from performer_pytorch import FastAttention

        peer = FastAttention(dim_heads=head_dim, nb_features=num_features, causal=False).eval()
    definition = _definition(num_heads, head_dim, num_features=num_features, seed=seed)
    peer.projection_matrix.copy_(_one_projection(definition))
    return Contender("peer", PERFORMER, num_features, peer, definition.attention_weights, tolerance=TOLERANCE)


def _fast_transformers(num_heads: int, head_dim: int, num_features: int, causal: bool, seed: int) -> Contender:
    from fast_transformers.attention import CausalLinearAttention, LinearAttention
    from fast_transformers.feature_maps import Favor
    from fast_transformers.masking import LengthMask, TriangularCausalMask

    feature_map = Favor.factory(n_dims=num_features, stabilize=True, deterministic_eval=True)
    peer = (CausalLinearAttention if causal else LinearAttention)(head_dim, feature_map).eval()
    definition = _definition(num_heads, head_dim, num_features=num_features, antithetic=True, seed=seed)
    peer.feature_map.omega.copy_(_one_projection(definition).T)
    masks: dict[tuple[int, int], tuple[Any, Any]] = {}  # they remember what they computed: made once

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length = q.shape[:2]
        if (batch, length) not in masks:
            all_keys = LengthMask(torch.full((batch,), length), max_len=length)
            masks[batch, length] = TriangularCausalMask(length) if causal else all_keys, all_keys
        pairs, keys = masks[batch, length]
        return peer(q, k, v, pairs, keys, keys)

    weights = partial(definition.attention_weights, causal=causal)
    return Contender("peer", FAST_TRANSFORMERS, num_features, attend, weights, length_first=True, tolerance=TOLERANCE)
