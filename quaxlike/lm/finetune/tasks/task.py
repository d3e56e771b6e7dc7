"""The interface of tasks: data, loss and metrics."""

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
    """A loss, as a sum over the examples of a batch, and metrics for held-out data."""

    help: ClassVar[str]
    """The lines of `--help` with its models and data, in two columns."""
    models: ClassVar[str]
    """The models that it is for, in errors."""
    peft_type: ClassVar[str]
    """PEFT's name of the task."""
    own: ClassVar[type[TaskSettings] | None] = None
    """The class of its own settings, if `--task` may name it."""
    needs_name: ClassVar[bool] = True
    """Whether only `--task` chooses it; otherwise, also a model that is made for it."""
    least_batch: ClassVar[int] = 1
    packs: ClassVar[bool] = False
    """Whether a row can hold several texts."""
    invokes: ClassVar[bool] = False
    """Whether tokens of a row may invoke adapters."""

    compares_with_start: ClassVar[bool] = False
    """Whether it compares with the model as it was before training: with the adapter that the run goes on
    with, if there is one, as its teacher; else without adapters."""

    @classmethod
    @abc.abstractmethod
    def takes(cls, model: PyTree, folder: Path) -> bool:
        """Whether it is for this model, of the checkpoint in this folder."""

    @classmethod
    def begun(
        cls, model: PyTree, config: Mapping[str, Any], train: TrainSettings, data: DataSettings
    ) -> tuple[PyTree, DataSettings]:
        """A model that it takes with what the task adds to it, such as a last layer, and the settings with
        what was found in the data for that, so that the same settings add the same again. `config` is that of
        the checkpoint."""
        return model, data

    @classmethod
    def trained_in_full(cls, model: PyTree) -> tuple[str, ...]:
        """Parts of the model that are trained besides the adapters."""
        return ()

    @classmethod
    @abc.abstractmethod
    def of(cls, model: PyTree, train: TrainSettings, data: DataSettings) -> "AbstractTask":
        """The task for a model that it takes."""

    @abc.abstractmethod
    def encode(self, fields: Mapping[str, Any], tokens: Tokens) -> Example | None:
        """Encodes a line of data as an example; None if the limit on tokens leaves nothing to learn."""

    @abc.abstractmethod
    def layers(self, model: PyTree) -> Any:
        """The model's sequence of layers: a list, or stacked into one."""

    def unused(self, model: PyTree) -> tuple[str, ...]:
        """Parts of the model that this task does not use, which get no adapters."""
        return ()

    def teacher(self, settings: TrainSettings, config: Mapping[str, Any], devices: Devices) -> PyTree:
        """Reads the model that this task compares with; None if there is none. `config` is that of the
        checkpoint that is trained."""
        return None

    def compared(self, model: PyTree, teacher: PyTree = None) -> PyTree:
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


def cross_entropy(logits: Float[Array | np.ndarray, "*batch classes"], labels: Any) -> Float[Array, "*batch"]:
    import optax  # here, since the command line lists tasks without the extra `lm`

    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
