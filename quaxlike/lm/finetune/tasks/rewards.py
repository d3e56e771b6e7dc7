"""`--task reward`, for training a reward model on preferences."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from ...._arguments import number
from ...folders.labels import numbered
from ...models import Decoder, DecoderForSequenceClassification
from ..data import Batch, Example, Tokens
from ..rows import preference_of, template_options
from ..settings import DataSettings, TaskSettings, TrainSettings, option
from .classes import new_head
from .task import AbstractTask


@dataclasses.dataclass(frozen=True)
class RewardSettings(TaskSettings):
    name: ClassVar[str] = "reward"
    about: ClassVar[str] = "score texts, so that the preferred ones get more"

    center_rewards: float | int = option(
        "of --task reward: weight of the squared sum of both rewards of a pair, which keeps them around 0",
        0.0, type=number(float, 0),
    )  # fmt: skip


class Rewards(AbstractTask):
    """A reward model, trained to give the chosen text a higher reward than the rejected one.

    The rows are the same as for `Preferences`.

    Ouyang et al., Training Language Models to Follow Instructions (2022), as in TRL's `RewardTrainer`.
    """

    settings: RewardSettings = eqx.field(static=True, default=RewardSettings())

    help: ClassVar[str] = """\
  ... --task reward   {"prompt": ..., "chosen": ..., "rejected": ...}
"""
    models: ClassVar[str] = "decoders, and those that classify texts with one label"
    peft_type: ClassVar[str] = "SEQ_CLS"
    own: ClassVar[type[TaskSettings] | None] = RewardSettings

    @classmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        if isinstance(model, DecoderForSequenceClassification):
            return len(model.labels.names) == 1
        return isinstance(model, Decoder)

    @classmethod
    def begun(
        cls, model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
    ) -> tuple[PyTree, DataSettings]:
        if isinstance(model, Decoder):
            model = new_head(model, config, train, numbered(1), None)
        return model, data

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "Rewards":
        assert isinstance(data.task, RewardSettings)
        return cls(data.task)

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        row = preference_of(fields, has_template=tokens.has_template)
        texts = []
        for name in ("chosen", "rejected"):
            if isinstance(row[name], list):
                talk = tokens.chat.render([*row["prompt"], *row[name]], **template_options(row))
                texts.append(tokens.ids(talk.text))
            else:
                ids = tokens.marks.begun(tokens.ids(row["prompt"] + row[name]))
                texts.append(tokens.marks.finished(ids))
        if texts[0] == texts[1]:
            raise ValueError("'chosen' and 'rejected' are the same text")
        chosen, rejected = (ids[: tokens.max_length] for ids in texts)
        if chosen == rejected:
            return None
        return Example((chosen, rejected), was_cut=max(map(len, texts)) > tokens.max_length)

    def output(self, model: PyTree, example: Batch) -> Float[Array, " texts"]:
        """Computes the rewards for the chosen text and for the rejected text."""
        return jax.vmap(model)(example.ids, example.seen)[:, 0].astype(jnp.float32)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        losses = -jax.nn.log_sigmoid(outputs[:, 0] - outputs[:, 1])
        return jnp.sum(losses + self.settings.center_rewards * jnp.sum(outputs, axis=1) ** 2)

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes the loss, the accuracy, and the mean difference between both rewards."""
        margins = outputs[:, 0] - outputs[:, 1]
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"loss": loss, "accuracy": float(np.mean(margins > 0)), "margin": float(np.mean(margins))}
