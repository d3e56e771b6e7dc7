"""Any model with Values to a file of safetensors and back."""

from .errors import CheckpointError
from .safetensors import load, load_adapters, save, save_adapters

__all__ = ["CheckpointError", "load", "load_adapters", "save", "save_adapters"]
