"""Patched checkpoints load once this package is imported, though neither torch nor transformers is imported for that.

`hf_rfattn.integration` teaches transformers to load them. It needs the modeling code of transformers, which takes
seconds to import; so it is imported right after that code, whoever asks for it first.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODELING = "transformers.modeling_utils"
INTEGRATION = "hf_rfattn.integration"


def follow_transformers() -> None:
    """Import our integration: now if transformers' modeling code is there, or else as soon as it is."""
    if MODELING in sys.modules:
        import_module(INTEGRATION)
    else:
        sys.meta_path.insert(0, _Follower())


class _Follower(MetaPathFinder):
    """Finds one module, as the other finders do, and lets the import of ours follow it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != MODELING:
            return None
        others = (f for f in sys.meta_path if hasattr(f, "find_spec") and not isinstance(f, _Follower))
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_follow(module: ModuleType) -> None:
            execute(module)
            import_module(INTEGRATION)

        spec.loader.exec_module = execute_and_follow  # type: ignore[method-assign]
        return spec
