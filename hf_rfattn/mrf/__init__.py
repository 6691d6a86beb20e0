"""Linear-chain Markov random fields; see `linear_chain`."""

from .linear_chain import Fit, LinearChainMRF

__all__ = ["Fit", "LinearChainMRF"]
