"""Language models in plain Equinox, compatible with checkpoints from transformers."""

from .attention_backends import attention_backend
from .bert import Bert, BertConfig, BertForSequenceClassification, BertForTokenClassification
from .classifier import AbstractClassifier
from .decoder import MIXERS, AbstractDecoder, Decoder
from .decoder_classifiers import DecoderForSequenceClassification, DecoderForTokenClassification
from .decoder_config import DecoderConfig
from .mixer import AbstractMemory, AbstractMixer
from .modern_bert import (
    ModernBert,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    ModernBertForTokenClassification,
)
from .new_head import with_classifier
from .pooling import Pooling, mean_pooled

__all__ = [
    "MIXERS",
    "AbstractClassifier",
    "AbstractDecoder",
    "AbstractMemory",
    "AbstractMixer",
    "Bert",
    "BertConfig",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "Decoder",
    "DecoderConfig",
    "DecoderForSequenceClassification",
    "DecoderForTokenClassification",
    "ModernBert",
    "ModernBertConfig",
    "ModernBertForSequenceClassification",
    "ModernBertForTokenClassification",
    "Pooling",
    "attention_backend",
    "mean_pooled",
    "with_classifier",
]
