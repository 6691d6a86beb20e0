"""Lets transformers load this checkpoint with `trust_remote_code=True`. The code itself is in the package hf-rfattn.

Where `import hf_rfattn` runs before `from_pretrained`, this file is not used.
"""

from typing import Any

from transformers import AutoConfig

import hf_rfattn  # noqa: F401  # restores the attention that config.json describes


class PatchedConfig:
    """What `auto_map` in config.json names: the class that transformers itself has for this config."""

    @staticmethod
    def register_for_auto_class() -> None:
        """Called by transformers for classes that are saved with their code; this one is not."""

    @staticmethod
    def from_pretrained(folder: str, **kwargs: Any) -> Any:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, **kwargs)
