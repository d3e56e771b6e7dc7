"""Low-rank adapters: a frozen weight plus a small trained correction."""

# Imported to register rules.
from . import convolution, dot, elementwise, indexing  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .array import RANK, LoraArray, labels, padded_to, plainly_scaled, row_norm, row_scale
from .dot import DropoutWarning
from .einsum import arrange, in_float32
from .shape import has_all_axes, without_adapter
from .trainable import LoraBias, TrainableArray
from .trainable_rows import TrainableRows

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
