"""Older names for `quaxlike.models`."""

from ...models import (
    Bert,
    BertForSequenceClassification,
    UnsupportedConfigError,
    mean_pooled,
)
from ...models import (
    Decoder as GPT2,
)
from ...models import (
    Decoder as Llama,
)
from ...models import (
    load as load_model,
)

__all__ = [
    "GPT2",
    "Bert",
    "BertForSequenceClassification",
    "Llama",
    "UnsupportedConfigError",
    "load_model",
    "mean_pooled",
]
