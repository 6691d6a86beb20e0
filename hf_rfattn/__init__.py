"""Random-feature and fast-multipole attention for pretrained Hugging Face models.

Importing this package takes milliseconds: public names come from their modules when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .import_hook import follow_transformers

if TYPE_CHECKING:
    from .conversion import Conversion, convert
    from .hub.cards import write_card
    from .hub.publish import publish
    from .integration import (
        AttentionChoice,
        AttentionError,
        attention_error,
        calibrate,
        choose_attention,
        extend_positions,
        patch_model,
        redraw,
        unpatch_model,
    )
    from .integration.reading import longest_input
    from .mechanisms import (
        Mechanism,
        MechanismConfig,
        build_mechanism,
        mechanism_names,
        parse_attention,
        register_mechanism,
        resolve_config,
    )
    from .mechanisms.average import AverageConfig
    from .mechanisms.band import BandConfig
    from .mechanisms.favor import FavorConfig
    from .mechanisms.fmm import FmmConfig
    from .mechanisms.hedgehog import HedgehogConfig
    from .mechanisms.linear import LinearConfig
    from .mechanisms.multipole import MultipoleConfig
    from .mechanisms.naming import attention_label, mechanism_names_in
    from .mechanisms.rff import RffConfig
    from .ops.backend import set_backend

__version__ = "0.1.0"

__all__ = [
    "AttentionChoice",
    "AttentionError",
    "AverageConfig",
    "BandConfig",
    "Conversion",
    "FavorConfig",
    "FmmConfig",
    "HedgehogConfig",
    "LinearConfig",
    "Mechanism",
    "MechanismConfig",
    "MultipoleConfig",
    "RffConfig",
    "attention_error",
    "attention_label",
    "build_mechanism",
    "calibrate",
    "choose_attention",
    "convert",
    "extend_positions",
    "longest_input",
    "mechanism_names",
    "mechanism_names_in",
    "parse_attention",
    "patch_model",
    "publish",
    "redraw",
    "register_mechanism",
    "resolve_config",
    "set_backend",
    "unpatch_model",
    "write_card",
]

# Where the public names live, the same as above for those who are not type checkers.
_HOMES = {
    "conversion": ["Conversion", "convert"],
    "hub.cards": ["write_card"],
    "hub.publish": ["publish"],
    "integration": [
        "AttentionChoice",
        "AttentionError",
        "attention_error",
        "calibrate",
        "choose_attention",
        "extend_positions",
        "patch_model",
        "redraw",
        "unpatch_model",
    ],
    "integration.reading": ["longest_input"],
    "mechanisms": [
        "Mechanism",
        "MechanismConfig",
        "build_mechanism",
        "mechanism_names",
        "register_mechanism",
        "parse_attention",
        "resolve_config",
    ],
    "mechanisms.average": ["AverageConfig"],
    "mechanisms.band": ["BandConfig"],
    "mechanisms.favor": ["FavorConfig"],
    "mechanisms.fmm": ["FmmConfig"],
    "mechanisms.hedgehog": ["HedgehogConfig"],
    "mechanisms.linear": ["LinearConfig"],
    "mechanisms.multipole": ["MultipoleConfig"],
    "mechanisms.naming": ["attention_label", "mechanism_names_in"],
    "mechanisms.rff": ["RffConfig"],
    "ops.backend": ["set_backend"],
}

if not TYPE_CHECKING:  # a type checker that saw it would take any name for a public one

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                globals()[name] = value = getattr(import_module(f"{__name__}.{home}"), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


follow_transformers()
