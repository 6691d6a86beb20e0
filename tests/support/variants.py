"""Every registered mechanism with its default options, and the options that change its mathematics.

A mechanism is tested the moment it is registered; a line here is needed only for further options.
"""

import pytest

from hf_rfattn import FavorConfig, mechanism_names

DEFAULTS = [(name, {}) for name in mechanism_names()]

OPTIONS = [
    ("favor+", {"projection": "hadamard", "num_features": 12}),
    ("favor+", {"projection": "iid", "antithetic": True}),
    ("favor+", {"variance": "optimal"}),
    ("favor+", {"kernel": "relu", "num_features": 40}),
    ("favor+", {"trainable": True, "num_features": 12}),
    ("favor+", {"trainable": True, "antithetic": True, "projection": "hadamard"}),
    ("hedgehog", {"num_features": 6}),
    ("hedgehog", {"num_features": 40}),
    ("rff", {"form": "cos", "projection": "hadamard"}),
    ("rff", {"kernel": "laplace"}),
    ("rff", {"normalize_qk": False}),
    ("rff", {"kernel": "cauchy", "num_features": 32}),
    ("linear", {"feature_map": "elu-"}),
    ("linear", {"feature_map": "tanh"}),
    ("band", {"bandwidth": 5}),
    ("band", {"bandwidth": 3, "global_tokens": 2}),
    ("band", {"bandwidth": 0, "global_tokens": 0}),
    ("fmm", {"bandwidth": 5}),
    ("fmm", {"bandwidth": 5, "normalizer": "separate", "global_tokens": 0}),
    ("fmm", {"bandwidth": 5, "normalizer": "separate", "far": ("elu", "elu-", "tanh")}),
    ("fmm", {"bandwidth": 70, "global_tokens": 0, "far": ("hedgehog", FavorConfig(num_features=9))}),
    ("fmm", {"bandwidth": 5, "global_tokens": 0, "far": (FavorConfig(trainable=True),)}),
    ("fmm", {"bandwidth": 3, "global_tokens": 2, "far": "elu"}),
    ("fmm", {"bandwidth": 3, "normalizer": "separate", "global_tokens": 2, "far": ("elu", "tanh")}),
    ("fmm", {"bandwidth": 3, "far": (FavorConfig(kernel="relu"),)}),
    ("multipole", {"exact_keys": 12, "block": 3, "tile": 8}),
    ("multipole", {"exact_keys": 16, "block": 4, "tile": 4, "order": "position", "global_tokens": 0}),
    ("multipole", {"exact_keys": 20, "block": 5, "tile": 12, "order": "content", "global_tokens": 2}),
]


def _id(variant: tuple) -> str:
    name, options = variant
    return "-".join([name, *(f"{k}={v}" for k, v in options.items())]).replace(" ", "")


def over(variants):
    return pytest.mark.parametrize("variant", variants, ids=_id)


every_mechanism = over(DEFAULTS)
every_variant = over(DEFAULTS + OPTIONS)
