"""Checkpoints of language models: their folders, configurations and formats."""
