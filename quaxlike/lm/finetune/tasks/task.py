"""The abstract base class of tasks."""

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
    """Abstract base class for tasks, which convert data to examples and define a loss and metrics on these.

    The loss must be a sum over the batch, so that batches can be sharded over devices.
    """

    help: ClassVar[str]
    """The models and data supported, as two columns for `--help`."""
    models: ClassVar[str]
    """The models supported, as named in error messages."""
    peft_type: ClassVar[str]
    """The corresponding `task_type` in PEFT's configuration."""
    own: ClassVar[type[TaskSettings] | None] = None
    """The type of this task's settings; None if it can't be specified by `--task`."""
    needs_name: ClassVar[bool] = True
    """Whether the task must be specified by `--task`. If not, suitable models also default to it.
    """
    least_batch: ClassVar[int] = 1
    packs: ClassVar[bool] = False
    """Whether several texts can be packed into a row."""
    invokes: ClassVar[bool] = False
    """Whether the data can contain invocation tokens for adapters."""

    compares_with_start: ClassVar[bool] = False
    """Whether the loss makes use of the model before training.

    If we continue to train an adapter then that model includes it, and is passed as the teacher.
    """

    @classmethod
    @abc.abstractmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        """Returns whether this task can be used with a model, as loaded from this checkpoint folder."""

    @classmethod
    def begun(
        cls, model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
    ) -> tuple[PyTree, DataSettings]:
        """Prepares a model for the task, e.g. by replacing its last layer.

        Also returns the settings, completed by anything inferred from the data, such that calling this again
        with the returned settings produces the same model. `config` is the checkpoint's.
        """
        return model, data

    @classmethod
    def trained_in_full(cls, model: PyTree) -> tuple[str, ...]:
        """Returns which parts of the model are trained in full, in addition to any adapters."""
        return ()

    @classmethod
    @abc.abstractmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "AbstractTask":
        """Creates the task for a model for which `takes` returned True."""

    @abc.abstractmethod
    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        """Encodes a row of data. Returns None if nothing to train on fits into the maximum length."""

    @abc.abstractmethod
    def layers(self, model: PyTree) -> Any:
        """Returns the layers of a model: either a list, or a single stacked layer."""

    def unused(self, model: PyTree) -> tuple[str, ...]:
        """Returns which parts of the model are unused by this task, and so should not be adapted."""
        return ()

    def teacher(self, settings: TrainSettings, config: Mapping[str, Any], devices: Devices) -> PyTree:
        """Loads the teacher, if there is one. `config` belongs to the checkpoint being trained."""
        return None

    def compared(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        """Returns the first argument for `output`: the model, or a tuple of the model and its references."""
        return model

    @abc.abstractmethod
    def output(self, model: PyTree, example: Batch) -> PyTree:
        """Computes the output for a single example, i.e. for a batch without its leading axis."""

    @abc.abstractmethod
    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        """Computes the loss, summed over the batch."""

    def weight(self, batch: Batch) -> float:
        """Returns the number of terms in the loss. By default, this is the number of examples."""
        return float(len(batch.ids))

    @abc.abstractmethod
    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes metrics, given the outputs for all held-out examples."""


def cross_entropy(logits: Float[Array | np.ndarray, "*batch classes"], labels: Any) -> Float[Array, "*batch"]:
    import optax  # imported lazily, so that tasks can be listed without the extra `lm`

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
