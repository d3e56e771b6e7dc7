"""Contrastive learning of sentence embeddings."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...folders.companions import modules_of
from ...models import Bert, Decoder, ModernBert, Pooling
from ..data import Batch, Example, Tokens
from ..rows import text_of
from ..settings import DataSettings, TrainSettings
from .task import AbstractTask, cross_entropy


class Pairs(AbstractTask):
    """Sentence embeddings from `{"anchor": ..., "positive": ...}` pairs. (You can use any other names.)

    Each anchor is trained to be closer to its own positive than to all other positives in the batch.

    Henderson et al., Efficient Natural Language Response Suggestion (2017), as in sentence-transformers.
    """

    pooling: Pooling = Pooling()
    """How to pool a text's tokens. The resulting vectors are compared by cosine similarity."""

    help: ClassVar[str] = """\
  encoders            {"anchor": ..., "positive": ...}: two texts that belong together; for decoders with
                      sentence-transformers' modules.json, too
"""
    models: ClassVar[str] = "models that embed texts"
    peft_type: ClassVar[str] = "FEATURE_EXTRACTION"
    needs_name: ClassVar[bool] = False
    least_batch: ClassVar[int] = 2
    scale: ClassVar[float] = 20.0

    @classmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        pooled = isinstance(model, Decoder) and bool(modules_of(folder))
        return pooled or isinstance(model, Bert | ModernBert)

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "Pairs":
        return cls(Pooling.of(train.model))

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example:
        if fields.keys() == {"text", "label"}:
            raise ValueError("a text and its label are what --task classify learns; a pair has other names")
        if len(fields) != 2:
            raise ValueError(f"expected two texts that belong together; found {', '.join(fields) or 'none'}")
        anchor, positive = (tokens.cut(text_of(fields, name)) for name in fields)
        return Example((anchor[0], positive[0]), was_cut=anchor[1] or positive[1])

    def unused(self, model: PyTree) -> tuple[str, ...]:
        return ("pooler.dense",) if isinstance(model, Bert) else ()

    def output(self, model: PyTree, example: Batch) -> Float[Array, "texts hidden"]:
        pool = Pooling(self.pooling.modes)
        vectors = model.hidden if isinstance(model, Decoder) else model

        def embed(ids: Any, seen: Any) -> Any:
            return pool(vectors(ids, seen).astype(jnp.float32), seen)

        return jax.vmap(embed)(example.ids, example.seen)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        anchors, positives = outputs[:, 0], outputs[:, 1]
        logits = self.scale * anchors @ positives.T
        return jnp.sum(cross_entropy(logits, jnp.arange(len(logits))))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes how often the right positive ranks first, along with the mean reciprocal rank."""
        similarity = outputs[:, 0] @ outputs[:, 1].T
        ranks = np.sum(similarity >= np.diagonal(similarity)[:, None], axis=1)
        return {"accuracy": float(np.mean(ranks == 1)), "mrr": float(np.mean(1 / ranks))}
