"""Safetensors files for models that contain Values."""

from .errors import CheckpointError
from .safetensors import load, load_adapters, save, save_adapters

__all__ = ["CheckpointError", "load", "load_adapters", "save", "save_adapters"]
