"""The public API. Type checkers read this stub, and `__init__.py` reads it to import names on demand."""

from .conversion import Conversion as Conversion
from .conversion import convert as convert
from .conversion import keep_exact_heads as keep_exact_heads
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
from .mechanisms.exact_heads import ExactHeadsConfig as ExactHeadsConfig
from .mechanisms.favor import FavorConfig as FavorConfig
from .mechanisms.fmm import FmmConfig as FmmConfig
from .mechanisms.hedgehog import HedgehogConfig as HedgehogConfig
from .mechanisms.linear import LinearConfig as LinearConfig
from .mechanisms.multipole import MultipoleConfig as MultipoleConfig
from .mechanisms.naming import attention_label as attention_label
from .mechanisms.naming import mechanism_names_in as mechanism_names_in
from .mechanisms.rff import RffConfig as RffConfig
from .mechanisms.taylor import TaylorConfig as TaylorConfig
from .ops.backend import set_backend as set_backend

__version__: str
