"""Redraw schedules: optimizer steps are counted, and all forward passes that lead to one step see one draw."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from support.models import MODELS, hidden, ids, tiny_bert
from torch.nn.parallel import DistributedDataParallel

from hf_rfattn import FavorConfig, patch_model, redraw, unpatch_model
from hf_rfattn.features.maps import RandomFeatures

INTERVAL = 3
EXPECTED = [0, 0, 0, 1, 1, 1, 2, 2]  # the draw of each step
every_model = pytest.mark.parametrize("family", MODELS)


def maps(model):
    return [m for m in model.modules() if isinstance(m, RandomFeatures)]


def projections(model):
    return [m.projection.clone() for m in maps(model)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def scheduled(family="bert", interval=INTERVAL):
    torch.manual_seed(0)
    return patch_model(MODELS[family](), "favor+", redraw_interval=interval).train()


def loss(model):
    return hidden(model, input_ids=ids(2, 20), use_cache=False).square().mean()


def draws(model, train_step, steps=8):
    """The number of the draw at each step; all maps have the same."""
    seen = []
    for _ in range(steps):
        train_step()
        assert len({int(m.draws) for m in maps(model)}) == 1
        seen.append(int(maps(model)[0].draws))
    return seen


def trainer(model, passes=1, together=False, wrapped=None, optimizer=None, clear_first=False):
    """A training step of some forward passes, each with its backward pass or all with one."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    called = wrapped or model

    def train_step():
        before = None
        if clear_first:
            optimizer.zero_grad()
        total = 0.0
        for _ in range(passes):
            part = loss(called)
            now = projections(model)
            assert before is None or same(before, now), "redrawn within a step"
            before = now
            if together:
                total = total + part
            else:
                part.backward()
        if together:
            total.backward()
        optimizer.step()
        if not clear_first:
            optimizer.zero_grad()

    return train_step


@every_model
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_redraw_schedule(family, checkpointing):
    """Three optimizer steps a draw, however often checkpointing runs a layer; eval never redraws."""
    model = scheduled(family)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    assert draws(model, trainer(model)) == EXPECTED
    assert all(int(m.steps) == 2 for m in maps(model))
    twin = patch_model(MODELS[family](), "favor+", redraw_interval=INTERVAL)
    assert same(projections(redraw(redraw(twin))), projections(model)), "it depends on seed, layer and number alone"
    model.eval()
    before = projections(model)
    for _ in range(5):
        hidden(model, input_ids=ids(2, 20))
    assert same(projections(model), before)


def test_evaluation_between_steps_neither_redraws_nor_counts():
    model = scheduled()
    train_step, seen = trainer(model), []
    for _ in EXPECTED:
        train_step()
        before = projections(model)
        hidden(model.eval(), input_ids=ids(2, 20))
        assert same(projections(model), before)
        model.train()
        seen.append(int(maps(model)[0].draws))
    assert seen == EXPECTED


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("together", [False, True], ids=["accumulation", "one backward pass"])
@pytest.mark.parametrize("clear_first", [False, True])
def test_several_passes_a_step(passes, together, clear_first):
    model = scheduled()
    assert draws(model, trainer(model, passes, together, clear_first=clear_first)) == EXPECTED


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
        lambda p: torch.optim.LBFGS(p, lr=1e-3, max_iter=2),
    ],
    ids=["fused", "foreach", "single", "lbfgs"],
)
def test_every_kind_of_optimizer(make):
    model = scheduled()
    optimizer = make(model.parameters())

    def closure():
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    assert draws(model, lambda: optimizer.step(closure)) == EXPECTED


def test_a_frozen_model_goes_by_the_steps_of_what_is_trained_around_it():
    model, head = scheduled().requires_grad_(False), torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)

    def train_step():
        for _ in range(2):
            head(hidden(model, input_ids=ids(2, 20))).mean().backward()
        optimizer.step()

    assert draws(model, train_step) == EXPECTED


def test_other_models_do_not_count():
    model, other = scheduled(), scheduled()
    theirs = trainer(other)
    ours = trainer(model)
    assert draws(model, lambda: (theirs(), theirs(), ours())) == EXPECTED


def test_passes_without_a_step_count_once():
    """Measuring in training mode, or skipped steps of a gradient scaler."""
    model = scheduled()
    for _ in range(7):
        loss(model).backward()
    model.zero_grad()
    assert draws(model, trainer(model)) == EXPECTED


def test_distributed_training_with_accumulation(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = scheduled()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)

        def train_step():
            with wrapped.no_sync():
                loss(wrapped).backward()
            loss(wrapped).backward()
            optimizer.step()
            optimizer.zero_grad()

        assert draws(model, train_step) == EXPECTED
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("stop", range(1, 8))
def test_resuming_is_exact(stop):
    model = scheduled()
    first = draws(model, trainer(model), stop)
    again = scheduled()
    again.load_state_dict(model.state_dict())
    assert first + draws(again, trainer(again), 8 - stop) == EXPECTED
    assert same(projections(again), projections(redraw(redraw(scheduled()))))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_have_a_schedule_of_their_own(duplicate):
    model = scheduled()
    assert draws(model, trainer(model), 2) == EXPECTED[:2]
    twin = duplicate(model)
    assert draws(twin, trainer(twin), 6) == EXPECTED[2:]
    assert draws(model, trainer(model), 6) == EXPECTED[2:]


def test_redraw_schedule_of_a_far_field():
    model = patch_model(tiny_bert(), "fmm", far=(FavorConfig(redraw_interval=1),)).train()
    train_step, seen = trainer(model), []
    for _ in range(3):
        train_step()
        seen.append(projections(model))
    assert not any(same(a, b) for a, b in itertools.pairwise(seen))


def test_unpatching_ends_the_schedule():
    model = unpatch_model(scheduled())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_redraw_schedule_and_compile_do_not_mix_silently():
    model = patch_model(tiny_bert(num_hidden_layers=1), "favor+", redraw_interval=3).train()
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"redraw schedule cannot run inside torch\.compile"):
        torch.compile(model, fullgraph=True, backend="eager")(input_ids=ids(2, 20))


def test_redraw_schedule_and_replicas_do_not_mix_silently():
    """Each replica of nn.DataParallel would count, and draw, for itself."""
    replica = scheduled()._replicate_for_data_parallel()
    with pytest.raises(NotImplementedError, match=r"redraw schedule cannot run inside nn\.DataParallel"):
        replica(input_ids=ids(2, 20))
