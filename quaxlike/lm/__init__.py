"""Language models: loading checkpoints from other programs, decoders, generation and fine-tuning.

This is the only part of quaxlike specific to text. Nothing else in quaxlike imports it.
"""

from typing import TYPE_CHECKING

from .._lazy import lazily
from ..files import CheckpointError
from .checkpoints.checkpoint import Checkpoint, open_checkpoint, read
from .checkpoints.saving import write
from .families import FAMILIES
from .folders.model_config import UnsupportedConfigError
from .generate import Conversation, generate
from .loading import load, save
from .models.vocabulary import resize_vocabulary
from .sharding import expert_parallel, tensor_parallel
from .tokenizer import read_tokenizer

if TYPE_CHECKING:
    from . import bitsandbytes as bitsandbytes
    from . import chat as chat
    from . import models as models
    from . import peft as peft

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "CheckpointError",
    "Conversation",
    "UnsupportedConfigError",
    "expert_parallel",
    "generate",
    "load",
    "open_checkpoint",
    "read",
    "read_tokenizer",
    "resize_vocabulary",
    "save",
    "tensor_parallel",
    "write",
]

__getattr__, __dir__ = lazily(__name__, ("bitsandbytes", "chat", "models", "peft"), globals())
