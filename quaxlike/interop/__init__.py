"""File formats: checkpoints that other libraries write and read."""

from typing import TYPE_CHECKING

from .._lazy import lazily
from .errors import CheckpointError

if TYPE_CHECKING:
    from . import bitsandbytes as bitsandbytes
    from . import peft as peft
    from . import safetensors as safetensors

__all__ = ["CheckpointError"]

__getattr__, __dir__ = lazily(__name__, ("bitsandbytes", "peft", "safetensors"), globals())
