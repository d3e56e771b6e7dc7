"""Older names for `quaxlike.models`."""

from ...models import Bert, BertConfig, BertForSequenceClassification, mean_pooled

__all__ = ["Bert", "BertConfig", "BertForSequenceClassification", "mean_pooled"]
