"""An older name of `quaxlike.finetune.run`."""

from ...finetune.run import finetune

__all__ = ["finetune"]
