"""An older name of `quaxlike.finetune.settings`."""

from ...finetune.settings import FinetuneError, Settings

__all__ = ["FinetuneError", "Settings"]
