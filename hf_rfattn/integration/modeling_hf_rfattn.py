"""Lets transformers load this checkpoint with `trust_remote_code=True`. The code is in the package hf-rfattn.

This file is not needed if `import hf_rfattn` runs before `from_pretrained`.
"""

from typing import Any

from transformers import AutoConfig

import hf_rfattn  # noqa: F401  # restores the attention that config.json describes


class PatchedConfig:
    """Named by `auto_map` in config.json; loads the config with transformers' own class."""

    @staticmethod
    def register_for_auto_class() -> None:
        """transformers calls this for classes that it saves with their code, which this one does not need."""

    @staticmethod
    def from_pretrained(folder: str, **kwargs: Any) -> Any:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **kwargs)
