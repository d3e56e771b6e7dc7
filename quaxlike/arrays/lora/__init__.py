"""Low-rank adapters: a frozen weight plus a small trained correction."""

from . import contraction as _contraction  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import convolution as _convolution  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import joining as _joining  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import layout as _layout  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import reshaping as _reshaping  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import slicing as _slicing  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .array import RANK, LoraArray, labels, padded_to, plainly_scaled, row_norm, row_scale
from .beside import LoraBias, TrainableArray
from .einsum import arrange
from .joining import without_adapter
from .layout import has_all_axes

__all__ = [
    "RANK",
    "LoraArray",
    "LoraBias",
    "TrainableArray",
    "arrange",
    "has_all_axes",
    "labels",
    "padded_to",
    "plainly_scaled",
    "row_norm",
    "row_scale",
    "without_adapter",
]
