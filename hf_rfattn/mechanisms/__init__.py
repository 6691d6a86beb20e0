"""Attention mechanisms, one file each. Importing this package registers all of them."""

import importlib
import pkgutil

from .base import LinearMechanism, Mechanism
from .config import MechanismConfig, describe_options, option
from .registry import build_mechanism, mechanism_names, parse_attention, register_mechanism, resolve_config

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
