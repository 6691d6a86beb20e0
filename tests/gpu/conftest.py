"""Tests that need a GPU: `make test-gpu`. Elsewhere they are skipped."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parent.parts[-1:]:
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
