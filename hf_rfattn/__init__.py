"""Random-feature and fast-multipole attention for pretrained Hugging Face models."""

from .hub.publish import publish
from .integration import AttentionError, attention_error, calibrate, patch_model, redraw, unpatch_model
from .mechanisms import Mechanism, MechanismConfig, build_mechanism, mechanism_names, register_mechanism
from .mechanisms.average import AverageConfig
from .mechanisms.band import BandConfig
from .mechanisms.favor import FavorConfig
from .mechanisms.fmm import FmmConfig
from .mechanisms.hedgehog import HedgehogConfig
from .mechanisms.linear import LinearConfig
from .mechanisms.rff import RffConfig

__version__ = "0.1.0.dev0"

__all__ = [
    "AttentionError",
    "AverageConfig",
    "BandConfig",
    "FavorConfig",
    "FmmConfig",
    "HedgehogConfig",
    "LinearConfig",
    "Mechanism",
    "MechanismConfig",
    "RffConfig",
    "attention_error",
    "build_mechanism",
    "calibrate",
    "mechanism_names",
    "patch_model",
    "publish",
    "redraw",
    "register_mechanism",
    "unpatch_model",
]
