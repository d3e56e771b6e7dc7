"""Arrays of integer codes with block scales: NF4, FP4, int4, int8."""

# They register rules.
from . import dot, elementwise, experts, indexing, shape  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .base import AbstractQuantizedArray
from .codebook import AbstractCodebookArray, FP4Array, Int4Array, NF4Array
from .int8 import Int8Array
from .scales import NestedScales

__all__ = [
    "AbstractCodebookArray",
    "AbstractQuantizedArray",
    "FP4Array",
    "Int4Array",
    "Int8Array",
    "NF4Array",
    "NestedScales",
]
