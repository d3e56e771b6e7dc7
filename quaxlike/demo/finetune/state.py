"""An older name of `quaxlike.finetune.state`."""

from ...finetune.state import RunDirectory

__all__ = ["RunDirectory"]
