"""Peak memory of calls, each in a process of its own."""

import json
import os
import subprocess
import sys

# Forks of one process that has imported everything: a start then takes no time, and each measures itself alone.
_MEASURE = """
import json, multiprocessing, resource, sys
import torch
from hf_rfattn import build_mechanism

def step(case, length):
    q, k, v = (torch.randn(1, case["heads"], length, case["head_dim"], requires_grad=case["training"]) for _ in "qkv")
    with torch.set_grad_enabled(case["training"]):
        out = mechanism(q, k, v, causal=case["causal"])
    if case["training"]:
        out.square().mean().backward()
    assert torch.isfinite(out).all()

def measure(case):
    global mechanism
    torch.set_num_threads(1)
    mechanism = build_mechanism(case["name"], num_heads=case["heads"], head_dim=case["head_dim"], **case["options"])
    step(case, 256)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(case, case["length"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(measure, json.loads(sys.argv[1]), chunksize=1)))
"""


def peaks(cases, *, heads, head_dim, length=32768, training=False):
    """KiB by which one call on so many tokens raises the peak memory, for each (mechanism, causal, options)."""
    shared = {"heads": heads, "head_dim": head_dim, "length": length, "training": training}
    asked = [{"name": name, "causal": causal, "options": options, **shared} for name, causal, options in cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _MEASURE, json.dumps(asked)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
