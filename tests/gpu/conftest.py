"""Tests that need a GPU: `make test-gpu`. Elsewhere they are skipped."""

import pytest
import torch
from support.gpus import FAKE, pass_for_a_gpu

from hf_rfattn.ops import backend


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available() or FAKE:
        return
    for item in items:
        if "gpu" in item.path.parent.parts[-1:]:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    if FAKE:
        pass_for_a_gpu(monkeypatch)
    yield
    backend.set_backend("auto")
