"""Patched checkpoints load once this package is imported, though neither torch nor transformers is imported for that.

`hf_rfattn.integration` teaches transformers to load them, and `hf_rfattn.integration.adapters` teaches PEFT to load
their adapters. Both need the code that they teach, so they are imported right after it, whoever imports it first.

Why not import both at once: `import hf_rfattn` takes 0.01 s of processor time. It would take 5.5 s with the models of
transformers, and 7.0 s with PEFT, which most programs do not use; so would `hf-rfattn --help`. The hook adds less than
0.1 s to the import of either (least of four runs, torch 2.13, transformers 5.22, PEFT 0.21).
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FOLLOWS = {
    "transformers.modeling_utils": "hf_rfattn.integration",
    "peft.peft_model": "hf_rfattn.integration.adapters",
}


def follow_transformers() -> None:
    """Import our modules: now if the code that they follow is there, or else as soon as it is."""
    sys.meta_path.insert(0, _Follower())
    for leader, follower in FOLLOWS.items():
        if leader in sys.modules:
            import_module(follower)


class _Follower(MetaPathFinder):
    """Finds the leading modules, as Python itself does, and lets the import of ours follow them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in FOLLOWS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_follow(module: ModuleType) -> None:
            execute(module)
            import_module(FOLLOWS[fullname])

        spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec
