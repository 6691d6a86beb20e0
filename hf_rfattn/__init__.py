"""Random-feature and fast-multipole attention for pretrained Hugging Face models.

Importing this package takes milliseconds: public names come from their modules when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .import_hook import follow_transformers

if TYPE_CHECKING:  # for type checkers and editors; the same names as in _HOMES
    from .conversion import Conversion as Conversion
    from .conversion import convert as convert
    from .hub.cards import write_card as write_card
    from .hub.publish import publish as publish
    from .integration import AttentionChoice as AttentionChoice
    from .integration import AttentionError as AttentionError
    from .integration import attention_error as attention_error
    from .integration import calibrate as calibrate
    from .integration import choose_attention as choose_attention
    from .integration import extend_positions as extend_positions
    from .integration import patch_model as patch_model
    from .integration import redraw as redraw
    from .integration import shard_sequence as shard_sequence
    from .integration import unpatch_model as unpatch_model
    from .integration.reading import longest_input as longest_input
    from .mechanisms import Mechanism as Mechanism
    from .mechanisms import MechanismConfig as MechanismConfig
    from .mechanisms import build_mechanism as build_mechanism
    from .mechanisms import mechanism_names as mechanism_names
    from .mechanisms import parse_attention as parse_attention
    from .mechanisms import register_mechanism as register_mechanism
    from .mechanisms import resolve_config as resolve_config
    from .mechanisms.average import AverageConfig as AverageConfig
    from .mechanisms.band import BandConfig as BandConfig
    from .mechanisms.favor import FavorConfig as FavorConfig
    from .mechanisms.fmm import FmmConfig as FmmConfig
    from .mechanisms.hedgehog import HedgehogConfig as HedgehogConfig
    from .mechanisms.linear import LinearConfig as LinearConfig
    from .mechanisms.multipole import MultipoleConfig as MultipoleConfig
    from .mechanisms.naming import attention_label as attention_label
    from .mechanisms.naming import mechanism_names_in as mechanism_names_in
    from .mechanisms.rff import RffConfig as RffConfig
    from .ops.backend import set_backend as set_backend

__version__ = "0.1.0"

_HOMES = {  # the module that each public name comes from
    "conversion": "Conversion convert",
    "hub.cards": "write_card",
    "hub.publish": "publish",
    "integration": "AttentionChoice AttentionError attention_error calibrate choose_attention extend_positions "
    "patch_model redraw shard_sequence unpatch_model",
    "integration.reading": "longest_input",
    "mechanisms": "Mechanism MechanismConfig build_mechanism mechanism_names parse_attention register_mechanism "
    "resolve_config",
    "mechanisms.average": "AverageConfig",
    "mechanisms.band": "BandConfig",
    "mechanisms.favor": "FavorConfig",
    "mechanisms.fmm": "FmmConfig",
    "mechanisms.hedgehog": "HedgehogConfig",
    "mechanisms.linear": "LinearConfig",
    "mechanisms.multipole": "MultipoleConfig",
    "mechanisms.naming": "attention_label mechanism_names_in",
    "mechanisms.rff": "RffConfig",
    "ops.backend": "set_backend",
}

if not TYPE_CHECKING:  # type checkers would take any name for a public one
    _HOME = {name: home for home, names in _HOMES.items() for name in names.split()}
    __all__ = sorted(_HOME)

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


follow_transformers()
