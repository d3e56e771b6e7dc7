"""Models in plain Equinox that read the checkpoints of transformers."""

from ..interop.model_config import UnsupportedConfigError
from .bert import Bert, BertConfig, BertForSequenceClassification, mean_pooled
from .decoder import Decoder
from .families import FAMILIES, DecoderConfig
from .generation import Conversation, generate
from .loading import load, save
from .modern_bert import ModernBert, ModernBertConfig
from .vocabulary import resize_vocabulary

__all__ = [
    "FAMILIES",
    "Bert",
    "BertConfig",
    "BertForSequenceClassification",
    "Conversation",
    "Decoder",
    "DecoderConfig",
    "ModernBert",
    "ModernBertConfig",
    "UnsupportedConfigError",
    "generate",
    "load",
    "mean_pooled",
    "resize_vocabulary",
    "save",
]
