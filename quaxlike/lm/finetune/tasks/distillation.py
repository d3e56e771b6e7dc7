"""`--task distill`, for knowledge distillation from a teacher."""

# ruff: noqa: RUF009 (calls that make fields)

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
from ....surgery.quantize import is_quantised
from ...loading import load
from ...models import Decoder
from ..data import Batch, Example, Tokens
from ..devices import Devices
from ..settings import SHARE, DataSettings, FinetuneError, TaskSettings, TrainSettings, option
from .next_token import AbstractTextTask, NextToken, losses_of_text
from .task import cross_entropy


@dataclasses.dataclass(frozen=True)
class DistillationSettings(TaskSettings):
    name: ClassVar[str] = "distill"
    about: ClassVar[str] = "learn a teacher's probabilities"

    teacher: Path | None = option(
        "of --task distill: checkpoint directory of the teacher, with the same tokeniser (default: --model, "
        "before it is quantised)", None, type=Path, metavar="DIR",
    )  # fmt: skip
    temperature: float | int = option(
        "of --task distill: what both models' logits are divided by", 1.0, type=number(float, 1e-3)
    )
    teacher_share: float | int = option(
        "of --task distill: share of the loss that is the teacher's; the rest is that of the data", 0.5,
        type=SHARE,
    )  # fmt: skip


class Distillation(AbstractTextTask):
    """Causal language modelling with a second loss for matching a teacher's probabilities.

    Hinton et al., Distilling the Knowledge in a Neural Network (2015).
    """

    data: NextToken = NextToken()
    settings: DistillationSettings = eqx.field(static=True, default=DistillationSettings())

    help: ClassVar[str] = """\
  ... --task distill  as without it; a --teacher's probabilities are learned, too
"""
    own: ClassVar[type[TaskSettings] | None] = DistillationSettings
    packs: ClassVar[bool] = True
    invokes: ClassVar[bool] = True

    @classmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "Distillation":
        assert isinstance(data.task, DistillationSettings)
        return cls(NextToken.of(model, train, data), data.task)

    def teacher(self, settings: TrainSettings, config: Mapping[str, Any], devices: Devices) -> PyTree:
        own = self.settings.teacher
        folder = own or settings.model
        rule = devices.rule if devices.mesh else None
        teacher, _ = load(folder, mesh=devices.mesh, sharding=rule)
        if own is None and (settings.quantize == "none" or is_quantised(teacher)):
            raise FinetuneError(
                "--task distill has nothing to learn from a teacher that is the same model: name another one "
                "by --teacher, or --quantize the one that is trained."
            )
        if not isinstance(teacher, Decoder):
            raise FinetuneError(
                f"--teacher must be a decoder that writes texts; found {type(teacher).__name__}."
            )
        sizes = teacher.config.vocab_size, config["vocab_size"]
        if sizes[0] != sizes[1] or not _have_same_tokens(folder, settings.model):
            raise FinetuneError(
                f"The teacher {folder} must have the tokens of {settings.model}: their vocabularies "
                f"{'differ' if sizes[0] == sizes[1] else f'have {sizes[0]} and {sizes[1]} tokens'}."
            )
        return teacher

    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        return self.data.encode(fields, tokens)

    def compared(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        return model, teacher

    def output(self, model: PyTree, example: Batch) -> Float[Array, " terms"]:
        """Computes the cross-entropy and KL(teacher ‖ model).

        The latter is multiplied by the square of the temperature. Without this, a higher temperature makes
        its gradients smaller.
        """
        (ids,), (segments,), (learned,) = example.ids, example.segments, example.learned
        hidden = tuple(
            each.hidden(ids, segments > 0, segments if self.data.packed else None) for each in model
        )

        def losses(models: PyTree, hidden: Any, targets: Any) -> Any:
            logits, wanted = (m.logits(x).astype(jnp.float32) for m, x in zip(models, hidden, strict=True))
            own, wanted = (jax.nn.log_softmax(x / self.settings.temperature) for x in (logits, wanted))
            apart = self.settings.temperature**2 * jnp.sum(jnp.exp(wanted) * (wanted - own), axis=-1)
            return jnp.stack([cross_entropy(logits, targets), apart], -1)

        return losses_of_text(losses, model, hidden, ids, learned, self.data.chunk)

    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        return jnp.sum(outputs @ jnp.array([1 - self.settings.teacher_share, self.settings.teacher_share]))

    def weight(self, batch: Batch) -> float:
        return self.data.weight(batch)

    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes the loss, the perplexity on the data, and the KL divergence from the teacher."""
        of_data, apart = (np.sum(outputs, axis=0) / self.weight(batch)).tolist()
        loss = float(self.total(outputs, batch)) / self.weight(batch)
        return {"loss": loss, "perplexity": float(np.exp(of_data)), "divergence": apart}


def _have_same_tokens(*folders: Path) -> bool:
    from ...text import TextTokenizer  # not at module level: `--help` should work without the extra `lm`

    first, second = (TextTokenizer(folder).vocabulary for folder in folders)
    return first == second
