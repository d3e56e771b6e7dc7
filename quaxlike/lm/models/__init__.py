"""Models in plain Equinox, for checkpoints of transformers."""

from .attention_backends import attention_backend
from .bert import Bert, BertConfig, BertForSequenceClassification
from .decoder import Decoder
from .decoder_config import DecoderConfig
from .modern_bert import ModernBert, ModernBertConfig
from .pooling import Pooling, mean_pooled

__all__ = [
    "Bert",
    "BertConfig",
    "BertForSequenceClassification",
    "Decoder",
    "DecoderConfig",
    "ModernBert",
    "ModernBertConfig",
    "Pooling",
    "attention_backend",
    "mean_pooled",
]
