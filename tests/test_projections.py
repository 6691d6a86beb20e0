"""How projections are drawn: what tests of feature maps do not see."""

import pytest
import torch

from hf_rfattn.features import draw_projection, hadamard_rotation
from hf_rfattn.features.projections import seeded_generator


@pytest.mark.parametrize("kind", ["iid", "orthogonal", "hadamard"])
def test_draws_do_not_depend_on_the_number_of_threads(kind):
    before = torch.get_num_threads()
    try:
        draws = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            draws.append(draw_projection(kind, 3, 100, 48, seeded_generator(0)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*draws)


def test_a_batch_of_rotations_is_what_one_after_the_other_would_be():
    one_by_one = seeded_generator(5)
    expected = torch.stack([hadamard_rotation(16, 3, one_by_one) for _ in range(4)])
    assert torch.equal(hadamard_rotation(16, 3, seeded_generator(5), (4,)), expected)


def test_threads_are_restored_after_an_error(monkeypatch):
    def broken(gaussian):
        raise RuntimeError("no LAPACK")

    monkeypatch.setattr(torch.linalg, "qr", broken)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="no LAPACK"):
            draw_projection("orthogonal", 1, 8, 8, seeded_generator(0))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
