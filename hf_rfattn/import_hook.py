"""Import hook: `import hf_rfattn` makes patched checkpoints loadable without importing torch or transformers.

`hf_rfattn.integration` extends transformers so that it loads patched checkpoints, and `hf_rfattn.integration.adapters`
extends PEFT so that it loads their adapters. The hook imports each of them right after the library it extends, no
matter who imports that library.

Importing both eagerly would be slow: `import hf_rfattn` takes 0.01 s of CPU time with the hook, 5.5 s with the models
of transformers and 7.0 s with PEFT as well, and `hf-rfattn --help` would take as long. The hook adds less than 0.1 s
to the import of either library (fastest of four runs, torch 2.13, transformers 5.22, PEFT 0.21).
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
    """Import each of our modules as soon as the library it extends is imported; at once if it already is."""
    sys.meta_path.insert(0, _Follower())
    for leader, follower in FOLLOWS.items():
        if leader in sys.modules:
            import_module(follower)


class _Follower(MetaPathFinder):
    """Finds the modules in `FOLLOWS` as Python itself does, and imports ours after them."""

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
