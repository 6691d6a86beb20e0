"""Runs a recipe and writes down what each process had: `LAUNCHER recipe_ranks.py recipes/finetune_snli.py ...`

In the folder RECORD: gradients.pt, the whole gradients of the first step; rank-N.pt, the buffers of process N at the
end. With STOP_AT the run breaks off before that step, as if interrupted.

It also lets FSDP2 run on CPU processes. accelerate 1.15 takes the FSDP plugin for GPUs only; all that comes after
(preparing, sharding, clipping, gathering weights) runs on gloo as well, so that one condition is lifted and nothing
else.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
from training.run import Training

record = Path(os.environ.get("RECORD", "."))


def with_fsdp(original):
    def init(self, *args, fsdp_plugin=None, **kwargs):
        fresh = not AcceleratorState._shared_state
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fresh:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    return init


def with_gradients(original):
    def clip(self, parameters, *args, **kwargs):
        if not (record / "gradients.pt").exists():
            named = {name.removeprefix("module."): p.grad for name, p in self._models[0].named_parameters()}
            whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in named.items()}
            self.wait_for_everyone()
            if self.is_main_process:
                torch.save({name: g.clone() for name, g in whole.items()}, record / "gradients.pt")
            self.wait_for_everyone()
        return original(self, parameters, *args, **kwargs)

    return clip


def with_buffers(original):
    def run(self):
        original(self)
        named = {name.removeprefix("module."): b.clone() for name, b in self.model.named_buffers()}
        torch.save(named, record / f"rank-{self.accelerator.process_index}.pt")

    return run


def with_end(original):
    def step(self, batches):
        if self.progress.step == int(os.environ.get("STOP_AT", -1)):
            sys.exit(7)
        original(self, batches)

    return step


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        AcceleratorState.__init__ = with_fsdp(AcceleratorState.__init__)
    Accelerator.clip_grad_norm_ = with_gradients(Accelerator.clip_grad_norm_)
    Training.loop = with_buffers(Training.loop)
    Training._step = with_end(Training._step)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
