"""Tasks. Each task is one file, with its data, loss, metrics and options, and an entry in the table."""

from jaxtyping import PyTree

from ..settings import DataSettings, FinetuneError, TrainSettings
from .classes import Classes
from .distillation import Distillation, DistillationSettings
from .next_token import NextToken
from .pairs import Pairs
from .preferences import Preferences, PreferenceSettings
from .task import AbstractTask

__all__ = [
    "TASKS",
    "AbstractTask",
    "Classes",
    "Distillation",
    "DistillationSettings",
    "NextToken",
    "Pairs",
    "PreferenceSettings",
    "Preferences",
    "task_for",
]

#: In the order of `--help`.
TASKS: tuple[type[AbstractTask], ...] = (NextToken, Preferences, Distillation, Pairs, Classes)


def task_for(model: PyTree, train: TrainSettings, data: DataSettings) -> AbstractTask:
    """Returns the task from the settings, or else the task that suits the model."""
    wanted = None if data.task is None else type(data.task)
    tasks = [task for task in TASKS if task.own is wanted]
    for task in tasks:
        if task.takes(model, train.model):
            return task.of(model, train, data)
    if data.task is None:
        raise FinetuneError(f"There is no task for {type(model).__name__}.")
    raise FinetuneError(f"--task {data.task.name} is for {tasks[0].models}; found {type(model).__name__}.")
