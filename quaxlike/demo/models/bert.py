"""Older names of what `quaxlike.models` has."""

from ...models import Bert, BertConfig, BertForSequenceClassification, mean_pooled

__all__ = ["Bert", "BertConfig", "BertForSequenceClassification", "mean_pooled"]
