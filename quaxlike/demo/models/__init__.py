"""Example models in plain Equinox, that read the checkpoints of transformers."""

from .bert import Bert as Bert
from .bert import BertForSequenceClassification as BertForSequenceClassification
from .bert import mean_pooled as mean_pooled
from .config import UnsupportedConfigError as UnsupportedConfigError
from .gpt2 import GPT2 as GPT2
from .llama import Llama as Llama
from .loading import load_model as load_model
