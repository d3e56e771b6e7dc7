"""`--task classify` for words with labels, e.g. in named entity recognition."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...models import AbstractClassifier
from ..data import Batch, Example, Tokens
from ..rows import NO_LABEL, words_of
from .classes import AbstractClassification, number_of
from .task import cross_entropy


class WordClasses(AbstractClassification):
    """Token classification. Rows have the form `{"tokens": [...], "ner_tags": [...]}`.

    Words are joined by spaces. As in transformers' `run_ner.py`, only the first token of each word
    contributes to the loss.
    """

    help: ClassVar[str] = """\
  ...TokenClassification,
  ... --task classify {"tokens": [words], "ner_tags": [a label for each]}; "labels" or any "..._tags"
"""
    models: ClassVar[str] = "models that classify tokens"
    peft_type: ClassVar[str] = "TOKEN_CLS"

    @classmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        return isinstance(model, AbstractClassifier) and model.of_tokens

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        words, tags = words_of(fields)
        numbers = [tag if tag == NO_LABEL else number_of(tag, self.labels) for tag in tags]
        ids, firsts, was_cut = tokens.cut_words(words)
        labels = [NO_LABEL] * len(ids)
        for first, number in zip(firsts, numbers, strict=True):
            if first is not None:
                labels[first] = number
        learned = [label != NO_LABEL for label in labels]
        if was_cut and not any(learned) and any(number != NO_LABEL for number in numbers):
            return None
        return Example((ids,), learned, labels, was_cut)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        learned = batch.learned[:, 0]
        return jnp.sum(jnp.where(learned, cross_entropy(outputs, jnp.where(learned, batch.labels, 0)), 0))

    def weight(self, batch: Batch) -> float:
        return float(np.sum(batch.learned))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes the accuracy over words, along with the loss."""
        right = np.argmax(outputs, axis=-1) == batch.labels
        accuracy = float(np.sum(right & batch.learned[:, 0])) / self.weight(batch)
        return {"accuracy": accuracy, "loss": float(self.total(outputs, batch)) / self.weight(batch)}
