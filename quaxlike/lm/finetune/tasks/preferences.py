"""`--task dpo`: direct preference optimisation."""

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
from ..data import Batch, Example, Tokens, text_of
from ..settings import DataSettings, TaskSettings, TrainSettings, option
from .next_token import AbstractTextTask, chunk_of, cross_entropy_of_text


@dataclasses.dataclass(frozen=True)
class PreferenceSettings(TaskSettings):
    name: ClassVar[str] = "dpo"
    about: ClassVar[str] = "prefer one of two texts"

    beta: float | int = option(
        "of --task dpo: how close the model stays to the one without adapters", 0.1, type=number(float, 0)
    )
    """The factor of log-probabilities."""


class Preferences(AbstractTextTask):
    """Direct preference optimisation: of two continuations of a prompt, `{"prompt": ..., "chosen": ...,
    "rejected": ...}`, the chosen one should gain more over the model without its adapters than the rejected.

    Rafailov et al., Direct Preference Optimization (2023), as in TRL.
    """

    chunk: int = 0
    """As of `NextToken`."""
    settings: PreferenceSettings = eqx.field(static=True, default=PreferenceSettings())

    help: ClassVar[str] = """\
  ... --task dpo      {"prompt": ..., "chosen": ..., "rejected": ...}
"""
    own: ClassVar[type[TaskSettings] | None] = PreferenceSettings

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "Preferences":
        assert isinstance(data.task, PreferenceSettings)
        return cls(chunk_of(train), data.task)

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        prompt = tokens.marks.begun(tokens.ids(text_of(fields, "prompt")))
        ends = [tokens.ids(text_of(fields, name)) for name in ("chosen", "rejected")]
        if ends[0] == ends[1]:
            raise ValueError("'chosen' and 'rejected' are the same text")
        whole = [tokens.marks.finished(prompt + end) for end in ends]
        first, longest = max(1, len(prompt)), max(map(len, whole))
        if first >= tokens.max_length:
            return None
        texts = tuple(ids[: tokens.max_length] for ids in whole)
        learned = [i >= first for i in range(max(map(len, texts)))]
        return Example(texts, learned, was_cut=longest > tokens.max_length)

    def compared(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        return model, jax.tree.map(innermost, model, is_leaf=is_value)

    def output(self, model: PyTree, example: Batch) -> Float[Array, " texts"]:
        """How much more likely each continuation is than without adapters, as a logarithm."""

        def gain(ids: Any, seen: Any, learned: Any) -> Any:
            after, before = (
                cross_entropy_of_text(each, each.hidden(ids, seen), ids, learned, self.chunk)
                for each in model
            )
            return before - after  # cross-entropies

        return jax.vmap(gain)(example.ids, example.seen, example.learned & example.seen)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return -jnp.sum(jax.nn.log_sigmoid(self.settings.beta * (outputs[:, 0] - outputs[:, 1])))

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """The loss, the share of pairs whose chosen text gained more, and by how much, times `beta`."""
        margins = self.settings.beta * (outputs[:, 0] - outputs[:, 1])
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"loss": loss, "accuracy": float(np.mean(margins > 0)), "margin": float(np.mean(margins))}
