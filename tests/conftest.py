"""Everything runs offline, on one thread a worker, on models made in `support`."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Some virtual machines announce AMX but kill a process that uses it; bf16 products then need another instruction set.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
import transformers

pytest.register_assert_rewrite("support")
pytest_plugins = ["support.fixtures"]
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
