"""Runs a recipe under FSDP2 on CPU processes: `torchrun ... tests/fsdp_on_cpu.py recipes/finetune_snli.py --model ...`

accelerate 1.15 lets FSDP run on GPUs only: AcceleratorState takes the plugin for no other kind of process. All that
comes after (preparing, sharding, clipping, gathering weights) runs on gloo as well, so this lifts that one condition
and nothing else.
"""

import runpy
import sys
from pathlib import Path

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState

recipes = Path(__file__).parents[1] / "recipes"
sys.path.insert(0, str(recipes))
original = AcceleratorState.__init__


def with_fsdp(self, *args, fsdp_plugin=None, **kwargs):
    fresh = not AcceleratorState._shared_state
    original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fresh:
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin


AcceleratorState.__init__ = with_fsdp
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
