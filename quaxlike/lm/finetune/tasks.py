"""Tasks, one for each kind of model: data, loss and metrics."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from ...arrays.adapted import innermost
from ...core.values import is_value
from ..folders.companions import modules_of
from ..models import Bert, BertForSequenceClassification, Decoder, ModernBert, Pooling
from .data import Batch, Example, Tokens, messages_of, template_options, text_of
from .settings import FinetuneError, Settings


class AbstractTask(eqx.Module):
    """A loss, as a sum over the examples of a batch, and metrics for held-out data."""

    peft_type: ClassVar[str]
    """PEFT's name of the task."""
    trained_in_full: ClassVar[tuple[str, ...]] = ()
    """Parts of the model that are trained besides the adapters."""
    least_batch: ClassVar[int] = 1
    packs: ClassVar[bool] = False
    """Whether a row can hold several texts."""
    invokes: ClassVar[bool] = False
    """Whether tokens of a row may invoke adapters."""

    @abc.abstractmethod
    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        """Encodes a line of data as an example; None if the limit on tokens leaves nothing to learn."""

    @abc.abstractmethod
    def layers(self, model: PyTree) -> Any:
        """The model's sequence of layers: a list, or stacked into one."""

    def unused(self, model: PyTree) -> tuple[str, ...]:
        """Parts of the model that this task does not use, which get no adapters."""
        return ()

    def models(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        """What `output` takes: the model, perhaps with the teacher, or with others that are made of it."""
        return model

    @abc.abstractmethod
    def output(self, model: PyTree, example: Batch) -> PyTree:
        """The output for one example (a batch without its first axis)."""

    @abc.abstractmethod
    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        """The loss, summed over a batch."""

    def weight(self, batch: Batch) -> float:
        """The number of terms in that sum: tokens or, by default, examples."""
        return float(len(batch.ids))

    @abc.abstractmethod
    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """The metrics of the outputs for all held-out examples; `batch` holds those examples."""


class NextToken(AbstractTask):
    """Causal language modelling of `{"text": ...}`; of `{"prompt": ..., "completion": ...}`, in which only
    the completion is learned; or of `{"messages": [...]}`, optionally with `"tools"` and
    `"chat_template_kwargs"`, in which the assistant's turns are learned."""

    chunk: int = 0
    """The number of tokens in a row whose logits are computed at a time; 0 for all."""
    packed: bool = False
    """Whether rows hold several texts."""

    peft_type: ClassVar[str] = "CAUSAL_LM"
    packs: ClassVar[bool] = True
    invokes: ClassVar[bool] = True

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        if "messages" in fields:
            options = {"tools": fields.get("tools"), **template_options(fields)}
            ids, learned = tokens.spans(*tokens.chat.learned(messages_of(fields), **options))
            return learned_part(ids, learned, tokens.max_length)
        for name in ("prompt", "completion", "text"):
            if isinstance(fields.get(name), list):
                raise ValueError(
                    f"{name!r} must be a text; found a list. A conversation, with the answers in it, is one "
                    "list under the name 'messages'"
                )
        if "prompt" in fields:
            ids = tokens.whole(text_of(fields, "prompt"))
            learned_from = max(1, len(ids))
            ids = ids + tokens.whole(text_of(fields, "completion"), special=False)
        else:
            ids, learned_from = tokens.whole(text_of(fields, "text")), 1
        if ids[-1:] != tokens.eos:
            ids = ids + tokens.eos
        return learned_part(ids, [i >= learned_from for i in range(len(ids))], tokens.max_length)

    def layers(self, model: PyTree) -> Any:
        return model.part("model").part("layers")

    def output(self, model: PyTree, example: Batch) -> Float[Array, ""]:
        (ids,), (segments,), (learned,) = example.ids, example.segments, example.learned
        hidden = model.hidden(ids, segments > 0, segments if self.packed else None)
        return _cross_entropy(model, hidden, ids, learned, self.chunk)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(outputs)

    def weight(self, batch: Batch) -> float:
        return float(np.sum(batch.learned))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        loss = float(np.sum(outputs)) / self.weight(batch)
        return {"loss": loss, "perplexity": float(np.exp(loss))}


class Preferences(AbstractTask):
    """Direct preference optimisation: of two continuations of a prompt, `{"prompt": ..., "chosen": ...,
    "rejected": ...}`, the chosen one should gain more over the model without its adapters than the rejected.

    Rafailov et al., Direct Preference Optimization (2023), as in TRL.
    """

    chunk: int = 0
    """As of `NextToken`."""
    beta: float | int = 0.1
    """The factor of log-probabilities: how close the model stays to the one without adapters."""

    peft_type: ClassVar[str] = "CAUSAL_LM"

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        prompt = tokens.whole(text_of(fields, "prompt"))
        ends = [tokens.whole(text_of(fields, name), special=False) for name in ("chosen", "rejected")]
        if ends[0] == ends[1]:
            raise ValueError("'chosen' and 'rejected' are the same text")
        whole = [prompt + end + ([] if end[-1:] == tokens.eos else tokens.eos) for end in ends]
        first, longest = max(1, len(prompt)), max(map(len, whole))
        if first >= tokens.max_length:
            return None
        texts = tuple(ids[: tokens.max_length] for ids in whole)
        learned = [i >= first for i in range(max(map(len, texts)))]
        return Example(texts, learned, was_cut=longest > tokens.max_length)

    def layers(self, model: PyTree) -> Any:
        return model.part("model").part("layers")

    def models(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        return model, jax.tree.map(innermost, model, is_leaf=is_value)

    def output(self, model: PyTree, example: Batch) -> Float[Array, " texts"]:
        """How much more likely each continuation is than without adapters, as a logarithm."""

        def gain(ids: Any, seen: Any, learned: Any) -> Any:
            after, before = (
                _cross_entropy(each, each.hidden(ids, seen), ids, learned, self.chunk) for each in model
            )
            return before - after  # cross-entropies

        return jax.vmap(gain)(example.ids, example.seen, example.learned & example.seen)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return -jnp.sum(jax.nn.log_sigmoid(self.beta * (outputs[:, 0] - outputs[:, 1])))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """The loss, the share of pairs whose chosen text gained more, and by how much, times `beta`."""
        margins = self.beta * (outputs[:, 0] - outputs[:, 1])
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"loss": loss, "accuracy": float(np.mean(margins > 0)), "margin": float(np.mean(margins))}


class Distillation(AbstractTask):
    """Causal language modelling of the same data, in which a teacher's probabilities of all tokens are
    learned beside the tokens themselves.

    Hinton et al., Distilling the Knowledge in a Neural Network (2015).
    """

    data: NextToken = NextToken()
    temperature: float | int = 1.0
    """What the logits of both are divided by."""
    share: float | int = 0.5
    """The weight of the divergence from the teacher; the rest is that of the data's cross-entropy."""

    peft_type: ClassVar[str] = "CAUSAL_LM"
    packs: ClassVar[bool] = True
    invokes: ClassVar[bool] = True

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        return self.data.encode(fields, tokens)

    def layers(self, model: PyTree) -> Any:
        return self.data.layers(model)

    def models(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        return model, teacher

    def output(self, model: PyTree, example: Batch) -> Float[Array, " terms"]:
        """The cross-entropy and the divergence KL(teacher ‖ model), times the squared temperature, so that
        gradients are of one size at all temperatures."""
        (ids,), (segments,), (learned,) = example.ids, example.segments, example.learned
        hidden = tuple(
            each.hidden(ids, segments > 0, segments if self.data.packed else None) for each in model
        )

        def losses(models: PyTree, hidden: Any, targets: Any) -> Any:
            logits, wanted = (m.logits(x).astype(jnp.float32) for m, x in zip(models, hidden, strict=True))
            own, wanted = (jax.nn.log_softmax(x / self.temperature) for x in (logits, wanted))
            apart = self.temperature**2 * jnp.sum(jnp.exp(wanted) * (wanted - own), axis=-1)
            return jnp.stack([optax.softmax_cross_entropy_with_integer_labels(logits, targets), apart], -1)

        return _of_tokens(losses, model, hidden, ids, learned, self.data.chunk)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(outputs @ jnp.array([1 - self.share, self.share]))

    def weight(self, batch: Batch) -> float:
        return self.data.weight(batch)

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """The loss, the perplexity of the data, and the divergence from the teacher."""
        of_data, apart = (np.sum(outputs, axis=0) / self.weight(batch)).tolist()
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"loss": loss, "perplexity": float(np.exp(of_data)), "divergence": apart}


class Pairs(AbstractTask):
    """Sentence embeddings: `{"anchor": ..., "positive": ...}`, or two texts under other names. The first
    should be closer to its partner than to the partners of all others in the batch.

    Henderson et al., Efficient Natural Language Response Suggestion (2017), as in sentence-transformers.
    """

    pooling: Pooling = Pooling()
    """How a vector is made of a text's tokens; compared by their angles, normalised or not."""

    peft_type: ClassVar[str] = "FEATURE_EXTRACTION"
    least_batch: ClassVar[int] = 2
    scale: ClassVar[float] = 20.0

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example:
        if len(fields) != 2:
            raise ValueError(f"expected two texts that belong together; found {', '.join(fields) or 'none'}")
        anchor, positive = (tokens.cut(text_of(fields, name)) for name in fields)
        return Example((anchor[0], positive[0]), was_cut=anchor[1] or positive[1])

    def layers(self, model: PyTree) -> Any:
        return model.encoder.layer if isinstance(model, Bert) else model.layers

    def unused(self, model: PyTree) -> tuple[str, ...]:
        return ("pooler.dense",) if isinstance(model, Bert) else ()

    def output(self, model: PyTree, example: Batch) -> Float[Array, "texts hidden"]:
        pool = Pooling(self.pooling.modes)
        vectors = model.hidden if isinstance(model, Decoder) else model
        embed = lambda ids, seen: pool(vectors(ids, seen).astype(jnp.float32), seen)
        return jax.vmap(embed)(example.ids, example.seen)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        anchors, positives = outputs[:, 0], outputs[:, 1]
        logits = self.scale * anchors @ positives.T
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(logits))))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """The share of anchors that rank their positive first among all, and the mean of 1 / rank."""
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

    def layers(self, model: PyTree) -> Any:
        return model.bert.encoder.layer

    def output(self, model: PyTree, example: Batch) -> Float[Array, " classes"]:
        return model(example.ids[0], example.seen[0]).astype(jnp.float32)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(outputs, batch.labels))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"accuracy": float(np.mean(np.argmax(outputs, axis=-1) == batch.labels)), "loss": loss}


def learned_part(ids: list[int], learned: list[bool], max_length: int) -> Example | None:
    """A text to learn, cut to length; None if that leaves nothing to learn. Its first token is never learned.
    If nothing of the whole text is, it is not cut."""
    if not any(learned[1:]):
        return Example((ids[:max_length],), [False] * len(ids[:max_length]))
    kept, learned = ids[:max_length], [False, *learned[1:max_length]]
    return Example((kept,), learned, was_cut=len(kept) < len(ids)) if any(learned) else None


def _cross_entropy(model: PyTree, hidden: Any, ids: Any, learned: Any, chunk: int) -> Float[Array, ""]:
    """The cross-entropy of each token's successor, summed over those that are learned."""

    def losses(model: PyTree, hidden: Any, targets: Any) -> Any:
        logits = model.logits(hidden).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    return _of_tokens(losses, model, hidden, ids, learned, chunk)


def _of_tokens(
    losses: Callable[..., Any], models: PyTree, hidden: PyTree, ids: Any, learned: Any, chunk: int
) -> Float[Array, "*terms"]:
    """`losses(models, hidden, successors)`, `(tokens, *terms)`, of each token's successor, summed over those
    that are learned; the first never is.

    Logits exist for only `chunk` tokens at a time, and are recomputed for the gradient, so that a large
    vocabulary does not dominate the memory of a step. A chunk has tokens from everywhere in the text, so that
    devices that share the tokens share each chunk, too.
    """
    targets, learned = jnp.roll(ids, -1), jnp.roll(learned.at[0].set(False), -1)

    def part(models: PyTree, hidden: Any, targets: Any, learned: Any) -> Any:
        found = losses(models, hidden, targets)
        return jnp.sum(jnp.where(learned.reshape(-1, *[1] * (found.ndim - 1)), found, 0), axis=0)

    if not 0 < chunk < len(targets):
        return part(models, hidden, targets, learned)
    n = -(-len(targets) // chunk)

    def split(x: Any) -> Any:
        x = jnp.pad(x, [(0, n * chunk - len(x))] + [(0, 0)] * (x.ndim - 1))
        return jnp.moveaxis(x.reshape(chunk, n, *x.shape[1:]), 1, 0)

    def add(total: Any, one: Any) -> Any:
        return total + jax.checkpoint(part)(models, *one), None

    parts = jax.tree.map(split, (hidden, targets, learned))
    shape = jax.eval_shape(part, models, *jax.tree.map(lambda x: x[0], parts)).shape
    return jax.lax.scan(add, jnp.zeros(shape), parts)[0]


def task_for(model: PyTree, settings: Settings) -> AbstractTask:
    """The task for a model from [`quaxlike.lm.load`][], and for what stands beside it."""
    chunk = max(1, settings.loss_chunk // settings.batch_size)
    if settings.task is not None:
        if not isinstance(model, Decoder) or modules_of(settings.model):
            raise FinetuneError(
                f"--task {settings.task} is for decoders that write texts; found {type(model).__name__}."
            )
        if settings.task == "dpo":
            return Preferences(chunk, settings.beta)
        return Distillation(NextToken(chunk, settings.pack), settings.temperature, settings.teacher_share)
    match model:
        case Decoder() if not modules_of(settings.model):
            return NextToken(chunk, settings.pack)
        case Bert() | ModernBert() | Decoder():  # one that sentence-transformers pools embeds texts
            return Pairs(Pooling.of(settings.model))
        case BertForSequenceClassification():
            return Classes(model.classifier.weight.shape[0])
    raise FinetuneError(f"There is no task for {type(model).__name__}.")
