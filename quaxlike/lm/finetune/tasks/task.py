"""The abstract base class for tasks."""

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
    """Abstract base class for tasks. They convert data to examples, and define a loss and metrics.

    The loss must be a sum over the batch, so that batches can be sharded over devices.
    """

    help: ClassVar[str]
    """The supported models and data. For `--help`, so this should have two columns."""
    models: ClassVar[str]
    """The supported models. For error messages."""
    peft_type: ClassVar[str]
    """The corresponding `task_type` in PEFT's configuration."""
    own: ClassVar[type[TaskSettings] | None] = None
    """The type of the task's settings. If None then `--task` doesn't list it."""
    needs_name: ClassVar[bool] = True
    """Whether `--task` must name this task. If not, it's also the default for any suitable model."""
    least_batch: ClassVar[int] = 1
    packs: ClassVar[bool] = False
    """Whether several texts can be packed into a row."""
    invokes: ClassVar[bool] = False
    """Whether adapters can have invocation tokens, i.e. only become active part of the way through a text."""

    compares_with_start: ClassVar[bool] = False
    """Whether the loss compares with the model before training.

    If training an existing adapter further, then this includes the adapter and is passed as the teacher.
    """

    @classmethod
    @abc.abstractmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        """Returns whether the task is suitable for the model from a checkpoint folder."""

    @classmethod
    def begun(
        cls, model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
    ) -> tuple[PyTree, DataSettings]:
        """Prepares a model for the task, e.g. by replacing its last layer.

        Also returns the settings, including anything inferred from the data. Calling this again with the new
        settings gives the same model. `config` comes from the checkpoint.
        """
        return model, data

    @classmethod
    @abc.abstractmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "AbstractTask":
        """Creates the task for a model. `takes` must have returned True for it."""

    @abc.abstractmethod
    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        """Encodes a row of data. Returns None if truncation leaves nothing to train on."""

    def unused(self, model: PyTree) -> tuple[str, ...]:
        """Returns the parts of the model not used by the task. (Don't adapt these.)"""
        return ()

    def teacher(self, settings: TrainSettings, config: Mapping[str, Any], devices: Devices) -> PyTree:
        """Loads the teacher, if there is one. `config` comes from the checkpoint being trained."""
        return None

    def compared(self, model: PyTree, teacher: PyTree = None) -> PyTree:
        """Returns the first argument for `output`: the model, or a tuple with whatever it's compared to."""
        return model

    @abc.abstractmethod
    def output(self, model: PyTree, example: Batch) -> PyTree:
        """Computes the output for a single example, i.e. a batch without its leading axis."""

    @abc.abstractmethod
    def total(self, outputs: PyTree, batch: Batch) -> Float[Array, ""]:
        """Computes the loss, summed over the batch."""

    def weight(self, batch: Batch) -> float:
        """Returns the number of terms in the loss. Default: one for each example."""
        return float(len(batch.ids))

    @abc.abstractmethod
    def metrics(self, outputs: PyTree, batch: Batch) -> dict[str, float]:
        """Computes metrics from the outputs for all held-out examples."""


def cross_entropy(logits: Float[Array | np.ndarray, "*batch classes"], labels: Any) -> Float[Array, "*batch"]:
    import optax  # not at module level: listing the tasks should work without the extra `lm`

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
