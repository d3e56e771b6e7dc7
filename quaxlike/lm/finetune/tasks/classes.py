"""Classification of texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...models import BertForSequenceClassification
from ..data import Batch, Example, Tokens
from ..rows import check_entries, text_of
from ..settings import DataSettings, TrainSettings
from .task import AbstractTask, cross_entropy


class Classes(AbstractTask):
    """Classification of `{"text": ..., "label": ...}`. Labels are counted from 0."""

    n_classes: int

    help: ClassVar[str] = """\
  ...Classification   {"text": ..., "label": 0}
"""
    models: ClassVar[str] = "models that classify texts"
    peft_type: ClassVar[str] = "SEQ_CLS"
    trained_in_full: ClassVar[tuple[str, ...]] = ("classifier",)

    @classmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        return isinstance(model, BertForSequenceClassification)

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "Classes":
        return cls(model.classifier.weight.shape[0])

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example:
        label = fields.get("label")
        if type(label) is not int or not 0 <= label < self.n_classes:
            most = self.n_classes - 1
            raise ValueError(f"'label' must be a whole number from 0 to {most}; found {label!r}")
        check_entries(fields, ("text", "label"))
        ids, was_cut = tokens.cut(text_of(fields, "text"))
        return Example((ids,), label=label, was_cut=was_cut)

    def layers(self, model: PyTree) -> Any:
        return model.bert.encoder.layer

    def output(self, model: PyTree, example: Batch) -> Float[Array, " classes"]:
        return model(example.ids[0], example.seen[0]).astype(jnp.float32)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(cross_entropy(outputs, batch.labels))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"accuracy": float(np.mean(np.argmax(outputs, axis=-1) == batch.labels)), "loss": loss}
