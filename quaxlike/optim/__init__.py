"""Extensions to Optax, namely quantised optimiser states and separate learning rates for adapters."""

from .lora_plus import lora_plus
from .quantize_state import QuantizedState, quantize_state

__all__ = ["QuantizedState", "lora_plus", "quantize_state"]
