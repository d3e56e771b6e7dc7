"""An older name of `quaxlike.finetune.train`."""

from ...finetune.step import State
from ...finetune.train import Step, Training, optimiser_for, steps_of

__all__ = ["State", "Step", "Training", "optimiser_for", "steps_of"]
