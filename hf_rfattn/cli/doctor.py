"""`hf-rfattn doctor`: information for bug reports."""

import json
import platform
import warnings
from typing import Annotated, Any

import typer

from .command_line import errors_without_traceback, progress_bar

PACKAGES = ("hf-rfattn", "torch", "transformers", "triton", "fla-core", "accelerate")
LENGTH, HEAD_DIM = 200, 64


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, devices and GPU kernels, for bug reports.

    On each GPU, also compares the fused kernels with the torch implementation.
    """
    with errors_without_traceback(), progress_bar("checking devices and kernels"):
        found = report()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found["versions"].items():
        typer.echo(f"{name:<14}{value or 'not installed'}")
    typer.echo(f"{'backend':<14}{found['backend']} (HF_RFATTN_BACKEND or hf_rfattn.set_backend)")
    typer.echo("\nFused kernels in this installation:")
    for operator, problem in found["operators"].items():
        typer.echo(f"  {operator:<18}{problem or 'available'}")
    if not found["devices"]:
        typer.echo("\nNo GPU is visible to torch; everything runs on the CPU.")
    for device in found["devices"]:
        typer.echo(f"\n{device['device']}: {device['name']}, {device['memory_gb']} GB, {device['architecture']}")
        for call in device["calls"]:
            typer.echo(f"  {call['attention']:<12}{call['form']:<15}{call['dtype']:<10}{call['kernels']}")
    typer.echo("\nPlease include this in bug reports.")


def report() -> dict[str, Any]:
    """Collect versions, devices and kernels."""
    import torch

    from ..ops import backend
    from ..results.documents import versions

    return {
        "versions": versions(*PACKAGES) | {"cuda": torch.version.cuda, "rocm": torch.version.hip},
        "platform": platform.platform(),
        "backend": backend.get_backend(),
        "operators": {operator: backend.missing(operator) for operator in backend.OPERATORS},
        "devices": [_of_device(torch.device("cuda", number)) for number in range(torch.cuda.device_count())],
    }


def _of_device(device: Any) -> dict[str, Any]:
    import torch

    known = torch.cuda.get_device_properties(device)
    return {
        "device": str(device),
        "name": known.name,
        "memory_gb": round(known.total_memory / 1e9),
        "architecture": getattr(known, "gcnArchName", f"compute capability {known.major}.{known.minor}"),
        "calls": calls(device),
    }


def calls(device: Any) -> list[dict[str, str]]:
    """Call each mechanism on a device, in each form and dtype, and return which kernels were used."""
    import torch

    from ..mechanisms import build_mechanism, mechanism_names
    from ..ops import backend

    found = []
    for name in mechanism_names():
        for dtype in (torch.float32, torch.bfloat16):
            mechanism = build_mechanism(name, num_heads=4, num_kv_heads=2, head_dim=HEAD_DIM).to(device)
            q, k, v = (torch.randn(2, heads, LENGTH, HEAD_DIM, device=device, dtype=dtype) for heads in (4, 2, 2))
            for causal in (False, True):
                backend.decisions.clear()
                try:
                    with warnings.catch_warnings(), torch.no_grad():
                        warnings.simplefilter("ignore")  # failed checks are reported below
                        mechanism(q, k, v, causal=causal)
                    kernels = [f"{operator}: {problem or 'fused'}" for operator, problem in backend.decisions.items()]
                except Exception as error:
                    kernels = [f"failed: {type(error).__name__}: {error}"]
                form = "causal" if causal else "bidirectional"
                text = "; ".join(kernels) or "torch"
                found.append({"attention": name, "form": form, "dtype": str(dtype)[6:], "kernels": text})
    return found
