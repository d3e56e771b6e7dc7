"""An older name of `quaxlike.finetune`."""
