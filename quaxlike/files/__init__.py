"""Saves models with Values as safetensors files, and loads them."""

from .errors import CheckpointError
from .safetensors import load, load_adapters, save, save_adapters

__all__ = ["CheckpointError", "load", "load_adapters", "save", "save_adapters"]
