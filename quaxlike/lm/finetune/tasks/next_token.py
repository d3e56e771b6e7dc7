"""Causal language modelling, plus anything shared by all tasks for text-generating decoders."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...folders.companions import modules_of
from ...models import Decoder
from ..data import Batch, Example, Tokens
from ..rows import check_roles, normal, template_options, text_of
from ..settings import DataSettings, TrainSettings
from .task import AbstractTask, cross_entropy


class AbstractTextTask(AbstractTask):
    """A task for decoders that write texts, rather than embed them as in sentence-transformers."""

    models: ClassVar[str] = "decoders that write texts"
    peft_type: ClassVar[str] = "CAUSAL_LM"

    @classmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        return isinstance(model, Decoder) and not modules_of(folder)


class NextToken(AbstractTextTask):
    """Causal language modelling.

    Which tokens contribute to the loss depends on the row's format. For `{"text": ...}` it's the whole text,
    for `{"prompt": ..., "completion": ...}` it's the completion, and for `{"messages": [...]}` it's every
    turn of the assistant. In the latter case (or if the prompt and completion are lists of messages) you can
    add `"tools"` and `"chat_template_kwargs"`. ShareGPT's and Alpaca's formats are also supported.
    """

    chunk: int = 0
    """The number of tokens per row to compute logits for at a time. 0 means all."""
    packed: bool = False
    """Whether several texts can be packed into one row."""

    help: ClassVar[str] = """\
  decoders            {"text": ...}  or  {"prompt": ..., "completion": ...}  or
                      {"messages": [{"role": "user", "content": ...}, ...]}, with its chat template;
                      rows of ShareGPT ("conversations") and Alpaca ("instruction", "input", "output")
"""
    needs_name: ClassVar[bool] = False
    packs: ClassVar[bool] = True
    invokes: ClassVar[bool] = True

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "NextToken":
        return cls(chunk_of(train), data.pack)

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        fields = normal(fields, has_template=tokens.has_template)
        if "messages" in fields:
            messages = fields["messages"]
            check_roles(messages)
            talk = tokens.chat.learned(messages, **template_options(fields))
            ids, learned = tokens.spans(*talk)
            return learned_part(ids, learned, tokens.max_length)
        if isinstance(fields.get("text"), list):
            raise ValueError(
                "'text' must be a text; found a list. A conversation, with the answers in it, is one list "
                "under the name 'messages'"
            )
        if "prompt" in fields:
            prompt = tokens.marks.begun(tokens.ids(text_of(fields, "prompt")))
            learned_from = max(1, len(prompt))
            ids = tokens.marks.finished(prompt + tokens.ids(text_of(fields, "completion")), answer=True)
        else:
            ids = tokens.marks.finished(tokens.marks.begun(tokens.ids(text_of(fields, "text"))))
            learned_from = 1
        return learned_part(ids, [i >= learned_from for i in range(len(ids))], tokens.max_length)

    def output(self, model: PyTree, example: Batch) -> Float[Array, ""]:
        (ids,), (segments,), (learned,) = example.ids, example.segments, example.learned
        hidden = model.hidden(ids, segments > 0, segments if self.packed else None)
        return cross_entropy_of_text(model, hidden, ids, learned, self.chunk)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(outputs)

    def weight(self, batch: Batch) -> float:
        return float(np.sum(batch.learned))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        loss = float(np.sum(outputs)) / self.weight(batch)
        return {"loss": loss, "perplexity": float(np.exp(loss))}


def chunk_of(settings: TrainSettings) -> int:
    """Returns the chunk size in tokens per row. (`loss_chunk` is the size over all rows of a batch.)"""
    return max(1, settings.loss_chunk // settings.batch_size)


def learned_part(ids: list[int], learned: list[bool], max_length: int) -> Example | None:
    """Truncates a text to `max_length`. Returns None if this leaves nothing to train on.

    There is nothing to predict the first token from, so this is never trained on. If there was nothing to
    train on even before truncation, then the text doesn't count as truncated.
    """
    if not any(learned[1:]):
        return Example((ids[:max_length],), [False] * len(ids[:max_length]))
    kept, learned = ids[:max_length], [False, *learned[1:max_length]]
    return Example((kept,), learned, was_cut=len(kept) < len(ids)) if any(learned) else None


def cross_entropy_of_text(model: PyTree, hidden: Any, ids: Any, learned: Any, chunk: int) -> Float[Array, ""]:
    """Computes the cross-entropy of the next token, summed over all tokens to train on."""

    def losses(model: PyTree, hidden: Any, targets: Any) -> Any:
        logits = model.logits(hidden).astype(jnp.float32)
        return cross_entropy(logits, targets)

    return losses_of_text(losses, model, hidden, ids, learned, chunk)


def losses_of_text(
    losses: Callable[..., Any], models: PyTree, hidden: PyTree, ids: Any, learned: Any, chunk: int
) -> Float[Array, "*terms"]:
    """Sums `losses(models, hidden, successors)`, of shape `(tokens, *terms)`, over the tokens to train on.

    With a large vocabulary, logits would dominate a step's memory use. So this only materialises them for
    `chunk` tokens at a time, and recomputes them for the gradient. Chunks are strided slices, so that if
    tokens are sharded then every device has a part of each chunk.
    """
    # Pair each token with the one after it. The last token wraps around to the first one, but this is
    # harmless: the first one is never trained on.
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
