"""Models in plain Equinox that read the checkpoints of transformers."""

from .attention_backends import attention_backend
from .bert import Bert, BertConfig, BertForSequenceClassification
from .decoder import MIXERS, Decoder
from .decoder_config import DecoderConfig
from .mixer import AbstractMemory, AbstractMixer
from .modern_bert import ModernBert, ModernBertConfig
from .pooling import Pooling, mean_pooled

__all__ = [
    "MIXERS",
    "AbstractMemory",
    "AbstractMixer",
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
