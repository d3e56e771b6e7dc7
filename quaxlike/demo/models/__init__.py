"""Example models in plain Equinox, that read the checkpoints of transformers."""

from .bert import Bert, BertForSequenceClassification, mean_pooled
from .config import UnsupportedConfigError
from .gpt2 import GPT2
from .llama import Llama
from .loading import load_model

__all__ = [
    "GPT2",
    "Bert",
    "BertForSequenceClassification",
    "Llama",
    "UnsupportedConfigError",
    "load_model",
    "mean_pooled",
]
