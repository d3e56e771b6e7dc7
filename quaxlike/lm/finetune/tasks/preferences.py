"""`--task dpo`, for direct preference optimisation."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...._arguments import number
from ....arrays.adapted import innermost
from ....core.values import is_value
from ..data import Batch, Example, Tokens
from ..rows import not_learned, preference_of, template_options
from ..settings import DataSettings, TaskSettings, TrainSettings, option
from .next_token import AbstractTextTask, chunk_of, cross_entropy_of_text


@dataclasses.dataclass(frozen=True)
class PreferenceSettings(TaskSettings):
    name: ClassVar[str] = "dpo"
    about: ClassVar[str] = "prefer one of two texts"

    beta: float | int = option(
        "of --task dpo: how close the model stays to the one before training", 0.1, type=number(float, 0)
    )
    """The factor to multiply the log-ratio of probabilities by."""


class Preferences(AbstractTextTask):
    """Direct preference optimisation. Rows have the form `{"prompt": ..., "chosen": ..., "rejected": ...}`.

    The chosen text should become more likely and the rejected one less likely, both compared to the model
    before training. (That is, without adapters, or with the existing adapter if training this further.)

    All three entries can be lists of messages too. Without a prompt, this uses whatever both texts have in
    common at the start.

    Rafailov et al., Direct Preference Optimization (2023), as in TRL.
    """

    chunk: int = 0
    """The number of tokens per row to compute logits for at a time. See `NextToken.chunk`."""
    settings: PreferenceSettings = eqx.field(static=True, default=PreferenceSettings())

    help: ClassVar[str] = """\
  ... --task dpo      {"prompt": ..., "chosen": ..., "rejected": ...}
"""
    own: ClassVar[type[TaskSettings] | None] = PreferenceSettings
    compares_with_start: ClassVar[bool] = True

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "Preferences":
        assert isinstance(data.task, PreferenceSettings)
        return cls(chunk_of(train), data.task)

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        row = preference_of(fields, has_template=tokens.has_template)
        if isinstance(row["chosen"], list):
            whole, first = _encoded_messages(row, tokens)
        else:
            prompt = tokens.marks.begun(tokens.ids(row["prompt"]))
            ends = [tokens.ids(row[name]) for name in ("chosen", "rejected")]
            whole = [tokens.marks.finished(prompt + end, answer=True) for end in ends]
            first = max(1, len(prompt))
        if whole[0] == whole[1]:
            raise ValueError("'chosen' and 'rejected' are the same text")
        longest = max(map(len, whole))
        if first >= tokens.max_length:
            return None
        texts = tuple(ids[: tokens.max_length] for ids in whole)
        learned = [i >= first for i in range(max(map(len, texts)))]
        return Example(texts, learned, was_cut=longest > tokens.max_length)

    def compared(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        if teacher is not None:
            return model, teacher
        # Without a teacher, strip off the adapters: the weights underneath are the model before training.
        return model, jax.tree.map(innermost, model, is_leaf=is_value)

    def output(self, model: PyTree, example: Batch) -> Float[Array, " texts"]:
        """Computes log(p / p_start) for both continuations, where p_start is the model before training."""

        def gain(ids: Any, seen: Any, learned: Any) -> Any:
            after, before = (
                cross_entropy_of_text(each, each.hidden(ids, seen), ids, learned, self.chunk)
                for each in model
            )
            return before - after  # cross-entropies, so this is the increase in log-probability

        return jax.vmap(gain)(example.ids, example.seen, example.learned & example.seen)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return -jnp.sum(jax.nn.log_sigmoid(self.settings.beta * (outputs[:, 0] - outputs[:, 1])))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes the loss, the accuracy, and the mean margin (scaled by `beta`).

        A pair is correct if the chosen text gained more than the rejected one, and half-correct if both
        gained the same. The accuracy before training is therefore one half.
        """
        margins = self.settings.beta * (outputs[:, 0] - outputs[:, 1])
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {
            "loss": loss,
            "accuracy": float(np.mean((1 + np.sign(margins)) / 2)),
            "margin": float(np.mean(margins)),
        }


def _encoded_messages(row: Mapping[str, Any], tokens: Tokens) -> tuple[list[list[int]], int]:
    """Tokenises both conversations. Also returns the position of the answers in them."""
    if any("weight" in message for name in ("prompt", "chosen", "rejected") for message in row[name]):
        raise ValueError("'weight' has no meaning for preferences, of which whole answers are compared")
    prompt = not_learned(row["prompt"])
    options, found = template_options(row), []
    for name in ("chosen", "rejected"):
        ids, learned = tokens.spans(*tokens.chat.learned([*prompt, *row[name]], **options))
        if True not in learned:
            raise ValueError(f"{name!r} has no answer of the assistant")
        found.append((ids, learned.index(True)))
    (chosen, first), (rejected, other) = found
    if first != other or chosen[:first] != rejected[:first]:
        raise ValueError("the chat template does not write the same prompt before 'chosen' and 'rejected'")
    return [chosen, rejected], max(1, first)
