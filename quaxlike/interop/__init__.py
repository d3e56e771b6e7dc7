"""Checkpoint formats that other libraries read and write."""

from typing import TYPE_CHECKING

from .._lazy import lazily
from .checkpoint import Checkpoint, load, open_checkpoint
from .files.errors import CheckpointError
from .saving import save
from .tokenizer import read_tokenizer

if TYPE_CHECKING:
    from . import bitsandbytes as bitsandbytes
    from . import peft as peft
    from . import safetensors as safetensors

__all__ = ["Checkpoint", "CheckpointError", "load", "open_checkpoint", "read_tokenizer", "save"]

__getattr__, __dir__ = lazily(__name__, ("bitsandbytes", "peft", "safetensors"), globals())
