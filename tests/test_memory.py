"""Peak memory: neither features of a whole sequence nor scores of all pairs exist at once."""

import pytest
from support.memory import peaks

LONG = 16384
BASE = 8 * LONG * 4 * 32 * 4 // 1024  # KiB of q, k, v, their gradients, the output and its gradient


@pytest.mark.slow
def test_training_memory_does_not_hold_features():
    """Nine times the features: one tensor of the 512 more is twice BASE, and keeping them would keep at least four.

    What is seen is up to 1.7 BASE more: states of many blocks, their gradients, memory that is not given back.
    """
    kinds = [(name, causal) for name in ("favor+", "rff") for causal in (False, True)]
    cases = [(*kind, {"num_features": features}) for kind in kinds for features in (64, 576)]
    found = peaks(cases, heads=4, head_dim=32, length=LONG, training=True)
    for kind, few, many in zip(kinds, found[::2], found[1::2], strict=True):
        assert few < 3 * BASE, kind
        assert many - few < 4 * BASE, kind


@pytest.mark.slow
def test_training_memory_does_not_hold_scores():
    names = ("band", "fmm", "hedgehog")
    found = peaks([(name, True, {}) for name in names], heads=4, head_dim=32, length=LONG, training=True)
    assert max(found) < 4 * BASE, dict(zip(names, found, strict=True))


def test_near_field_runs_32768_tokens_in_little_memory():
    """A dense score matrix of one head alone would be 4 GB."""
    cases = [(name, causal, {"bandwidth": 32}) for name in ("band", "fmm") for causal in (False, True)]
    # scores of neighbouring tiles: 32768 · 3·32 · 2 heads · 4 bytes = 25 MB, and a few copies of that and of L·D
    for case, kibibytes in zip(cases, peaks(cases, heads=2, head_dim=16), strict=True):
        assert 0 < kibibytes < 400 * 1024, case
