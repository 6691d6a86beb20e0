"""Weight averaging (SWA, EMA): weights are averaged, random draws are not."""

import pytest
import torch
from support.models import hidden, tiny_bert
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hf_rfattn import patch_model, redraw

BATCH = {"input_ids": torch.arange(1, 25).view(2, 12)}


def moved(model):
    """As an optimizer step would move it."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def projections(model):
    return [value for name, value in model.named_buffers() if name.endswith(".projection")]


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.9)])
@pytest.mark.parametrize("mechanism", ["favor+", "rff"])
def test_redrawn_projections_are_copied(mechanism, average):
    """The averaged model is the model with averaged weights and its present draw."""
    model = patch_model(tiny_bert(), mechanism)
    averaged = AveragedModel(model, multi_avg_fn=average)
    for _ in range(3):
        moved(model)
        redraw(model)
        averaged.update_parameters(model)
    assert all(map(torch.equal, projections(averaged), projections(model)))
    names = [name for name, _ in model.named_buffers() if name.endswith("draws")]
    assert names and all(int(averaged.module.get_buffer(name)) == 3 for name in names)
    parameters = {name.removeprefix("module."): p for name, p in averaged.named_parameters()}
    with torch.no_grad():
        expected = hidden(averaged, **BATCH)
        model.load_state_dict(parameters, strict=False)
        torch.testing.assert_close(hidden(model, **BATCH), expected)
