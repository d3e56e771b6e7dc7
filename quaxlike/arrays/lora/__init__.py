"""Low-rank adapters: a frozen weight plus a small trained correction."""

from ..dot_axes import arrange, in_float32

# These are imported to register their rules.
from . import dot, elementwise  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .array import (
    RANK,
    DropoutWarning,
    LoraArray,
    has_all_axes,
    labels,
    padded_to,
    plainly_scaled,
    row_norm,
    row_scale,
)
from .shape import without_adapter
from .trainable import LoraBias, TrainableArray, TrainableRows

__all__ = [
    "RANK",
    "DropoutWarning",
    "LoraArray",
    "LoraBias",
    "TrainableArray",
    "TrainableRows",
    "arrange",
    "has_all_axes",
    "in_float32",
    "labels",
    "padded_to",
    "plainly_scaled",
    "row_norm",
    "row_scale",
    "without_adapter",
]
