"""Types and devices that benchmarks can be asked for, and whether this machine has them."""

import subprocess
import sys

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def check_dtype(name: str, device: str) -> None:
    """Raise for an unknown dtype, and for bfloat16 on a CPU where it would end this process (another one tries).

    Some virtual machines announce matrix instructions that they do not have.
    """
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not possible; choose one of {', '.join(DTYPES)}.")
    if name == "bfloat16" and torch.device(device).type == "cpu":
        finished = subprocess.run([sys.executable, "-c", _PRODUCT], capture_output=True, text=True)
        if finished.returncode:
            raise ValueError(
                f"Products in bfloat16 end the process on this machine (exit code {finished.returncode}). Choose "
                "another dtype, or set the environment variable ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 and try again."
            )


def check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} is not possible here. {error}") from error
