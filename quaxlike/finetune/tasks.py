"""Tasks, one for each kind of model: data, loss and metrics."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from ..models import Bert, BertForSequenceClassification, Decoder, mean_pooled
from .data import Batch, Example, Tokens, text_of
from .settings import FinetuneError


class AbstractTask(eqx.Module):
    """A loss over batches, as a sum of what examples contribute, and what is measured on held-out data."""

    peft_type: ClassVar[str]
    """PEFT's name of the task."""
    trained_in_full: ClassVar[tuple[str, ...]] = ()
    """Parts of the model that are trained beside the adapters."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Parts of the model that do nothing here, and so get no adapter."""
    least_batch: ClassVar[int] = 1

    @abc.abstractmethod
    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        """A line of data as an example; None if the limit on tokens leaves nothing to learn."""

    @abc.abstractmethod
    def output(self, model: PyTree, example: Batch) -> PyTree:
        """The model's output for one example (a batch without its first axis)."""

    @abc.abstractmethod
    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        """The loss, summed over a batch."""

    @abc.abstractmethod
    def weight(self, batch: Batch) -> float:
        """How many terms that sum has: tokens or examples."""

    @abc.abstractmethod
    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """The metrics of the outputs for all held-out examples; `batch` holds those examples."""


class NextToken(AbstractTask):
    """Causal language modelling: `{"text": ...}`, or `{"prompt": ..., "completion": ...}`, of which the
    completion alone is learned."""

    peft_type: ClassVar[str] = "CAUSAL_LM"

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        if "prompt" in fields:
            ids = tokens.whole(text_of(fields, "prompt"))
            learned_from = max(1, len(ids))
            ids = ids + tokens.whole(text_of(fields, "completion"), special=False)
        else:
            ids, learned_from = tokens.whole(text_of(fields, "text")), 1
        if ids[-1:] != tokens.eos:
            ids = ids + tokens.eos
        kept = ids[: tokens.max_length]
        if learned_from >= len(kept):
            return None
        return Example((kept,), learned_from, was_cut=len(kept) < len(ids))

    def output(self, model: PyTree, example: Batch) -> Float[Array, ""]:
        (ids,), (seen,), (learned,) = example.ids, example.seen, example.learned
        logits = model(ids, seen)[:-1].astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[1:])
        return jnp.sum(jnp.where(learned[1:], losses, 0))

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(outputs)

    def weight(self, batch: Batch) -> float:
        return float(np.sum(batch.learned))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        loss = float(np.sum(outputs)) / self.weight(batch)
        return {"loss": loss, "perplexity": float(np.exp(loss))}


class Pairs(AbstractTask):
    """Sentence embeddings: `{"anchor": ..., "positive": ...}`, or two texts of other names. The first shall
    be closer to its partner than to those of all others of the batch.

    Henderson et al., Efficient Natural Language Response Suggestion (2017), as sentence-transformers has it.
    """

    peft_type: ClassVar[str] = "FEATURE_EXTRACTION"
    unused: ClassVar[tuple[str, ...]] = ("pooler.dense",)
    least_batch: ClassVar[int] = 2
    scale: ClassVar[float] = 20.0

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example:
        if len(fields) != 2:
            raise ValueError(f"expected two texts that belong together; found {', '.join(fields) or 'none'}")
        anchor, positive = (tokens.cut(text_of(fields, name)) for name in fields)
        return Example((anchor[0], positive[0]), was_cut=anchor[1] or positive[1])

    def output(self, model: PyTree, example: Batch) -> Float[Array, "texts hidden"]:
        embed = lambda ids, seen: mean_pooled(model(ids, seen).astype(jnp.float32), seen)
        return jax.vmap(embed)(example.ids, example.seen)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        anchors, positives = outputs[:, 0], outputs[:, 1]
        logits = self.scale * anchors @ positives.T
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))))

    def weight(self, batch: Batch) -> float:
        return float(len(batch.ids))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Whether each anchor finds its positive among all: the share that does, and the mean of 1 / rank."""
        similarity = outputs[:, 0] @ outputs[:, 1].T
        ranks = np.sum(similarity >= np.diagonal(similarity)[:, None], axis=1)
        return {"accuracy": float(np.mean(ranks == 1)), "mrr": float(np.mean(1 / ranks))}


class Classes(AbstractTask):
    """Classification: `{"text": ..., "label": ...}`, labels numbered from 0."""

    n_classes: int

    peft_type: ClassVar[str] = "SEQ_CLS"
    trained_in_full: ClassVar[tuple[str, ...]] = ("classifier",)

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example:
        label = fields.get("label")
        if type(label) is not int or not 0 <= label < self.n_classes:
            most = self.n_classes - 1
            raise ValueError(f"'label' must be a whole number from 0 to {most}; found {label!r}")
        ids, was_cut = tokens.cut(text_of(fields, "text"))
        return Example((ids,), label=label, was_cut=was_cut)

    def output(self, model: PyTree, example: Batch) -> Float[Array, " classes"]:
        return model(example.ids[0], example.seen[0]).astype(jnp.float32)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(outputs, batch.labels))

    def weight(self, batch: Batch) -> float:
        return float(len(batch.ids))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"accuracy": float(np.mean(np.argmax(outputs, axis=-1) == batch.labels)), "loss": loss}


def task_for(model: PyTree) -> AbstractTask:
    """The task of a model of `load_model`."""
    match model:
        case Decoder():
            return NextToken()
        case Bert():
            return Pairs()
        case BertForSequenceClassification():
            return Classes(model.classifier.weight.shape[0])
    raise FinetuneError(f"There is no task for a {type(model).__name__}.")
