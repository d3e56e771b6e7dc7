"""An older name of `quaxlike.finetune.train`."""

from ...finetune.train import State, Step, measure, optimiser_for, steps_of, train

__all__ = ["State", "Step", "measure", "optimiser_for", "steps_of", "train"]
