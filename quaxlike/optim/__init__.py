"""Tools for optax: quantised optimiser states, and learning rates for adapters."""

from .lora_plus import lora_plus
from .quantize_state import QuantizedState, quantize_state

__all__ = ["QuantizedState", "lora_plus", "quantize_state"]
