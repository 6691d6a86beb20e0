"""Linear-chain Markov random fields; see `linear_chain`."""

from .linear_chain import LinearChainMRF

__all__ = ["LinearChainMRF"]
