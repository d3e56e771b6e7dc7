"""Optimisers: the states of optax's transformations in few bits."""

from .quantize_state import QuantizedState, quantize_state

__all__ = ["QuantizedState", "quantize_state"]
