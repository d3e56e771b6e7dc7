"""An older name of `quaxlike.finetune.data`."""

from ...finetune.data import (
    Batch,
    Example,
    Examples,
    Tokens,
    chosen_for,
    collate,
    read_examples,
    split,
    text_of,
)

__all__ = [
    "Batch",
    "Example",
    "Examples",
    "Tokens",
    "chosen_for",
    "collate",
    "read_examples",
    "split",
    "text_of",
]
