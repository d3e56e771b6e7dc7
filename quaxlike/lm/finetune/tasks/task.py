"""The interface of a task: data, loss and metrics."""

import abc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, PyTree

from ..data import Batch, Example, Tokens
from ..devices import Devices
from ..settings import DataSettings, TaskSettings, TrainSettings


class AbstractTask(eqx.Module):
    """A task turns data into examples, and defines a loss and metrics on them.

    The loss is a sum over a batch, so that batches may be split over devices.
    """

    help: ClassVar[str]
    """The lines for `--help`: models and data, in two columns."""
    models: ClassVar[str]
    """The supported models, as errors name them."""
    peft_type: ClassVar[str]
    """The `task_type` in PEFT's configuration."""
    own: ClassVar[type[TaskSettings] | None] = None
    """The class of its settings; None if `--task` cannot name this task."""
    needs_name: ClassVar[bool] = True
    """Whether the task must be named by `--task`. If not, a suitable model also chooses it."""
    least_batch: ClassVar[int] = 1
    packs: ClassVar[bool] = False
    """Whether a row may hold several texts."""
    invokes: ClassVar[bool] = False
    """Whether the data may contain invocation tokens for adapters."""

    compares_with_start: ClassVar[bool] = False
    """Whether the loss compares with the model before training.

    If the run continues an adapter, that model includes it; `compared` then gets it as the teacher.
    """

    @classmethod
    @abc.abstractmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        """Returns whether this task can train the model from this checkpoint folder."""

    @classmethod
    def begun(
        cls, model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
    ) -> tuple[PyTree, DataSettings]:
        """Prepares a model for the task, for example by adding a last layer.

        Also returns the settings, with anything that was found in the data for this purpose: a second call
        with the returned settings makes the same model. `config` is the checkpoint's.
        """
        return model, data

    @classmethod
    def trained_in_full(cls, model: PyTree) -> tuple[str, ...]:
        """Returns the parts of the model that are trained in full, in addition to the adapters."""
        return ()

    @classmethod
    @abc.abstractmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "AbstractTask":
        """Builds the task for a model that `takes` accepts."""

    @abc.abstractmethod
    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        """Encodes one line of data. Returns None if nothing to learn fits into the maximal length."""

    @abc.abstractmethod
    def layers(self, model: PyTree) -> Any:
        """Selects the model's layers: a list, or one stacked layer."""

    def unused(self, model: PyTree) -> tuple[str, ...]:
        """Returns the parts of the model that this task does not use. They get no adapters."""
        return ()

    def teacher(self, settings: TrainSettings, config: Mapping[str, Any], devices: Devices) -> PyTree:
        """Reads the teacher, if this task has one. `config` belongs to the checkpoint that is trained."""
        return None

    def compared(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        """Builds the first argument of `output`: the model, or a tuple of it and its references."""
        return model

    @abc.abstractmethod
    def output(self, model: PyTree, example: Batch) -> PyTree:
        """Computes the output for one example, that is, a batch without its first axis."""

    @abc.abstractmethod
    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        """Computes the loss, summed over a batch."""

    def weight(self, batch: Batch) -> float:
        """Returns the number of terms in this sum: by default, the number of examples."""
        return float(len(batch.ids))

    @abc.abstractmethod
    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes the metrics. Both arguments cover all held-out examples."""


def cross_entropy(logits: Float[Array | np.ndarray, "*batch classes"], labels: Any) -> Float[Array, "*batch"]:
    import optax  # imported late: the command line lists tasks without the extra `lm`

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
