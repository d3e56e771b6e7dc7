"""Models in plain Equinox that read the checkpoints of transformers."""

from .._families import FAMILIES
from ..interop.files.model_config import UnsupportedConfigError
from .attention_backends import attention_backend
from .bert import Bert, BertConfig, BertForSequenceClassification
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .generation import Conversation, generate
from .loading import load, save
from .modern_bert import ModernBert, ModernBertConfig
from .pooling import Pooling, mean_pooled
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
    "Pooling",
    "UnsupportedConfigError",
    "attention_backend",
    "generate",
    "load",
    "mean_pooled",
    "resize_vocabulary",
    "save",
]
