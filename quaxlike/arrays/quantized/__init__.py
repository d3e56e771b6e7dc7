"""Arrays of codes with block scales: NF4, FP4, int4, int8, and all published block formats."""

# These are imported to register their rules.
from ...kernels.block_matmul import CODECS, Codec
from . import dot, elementwise, shape  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .array import AbstractCodebookArray, BlockArray, CacheArray, FP4Array, Int4Array, Int8Array, NF4Array
from .base import AbstractQuantizedArray
from .scales import BlockScales, NestedScales

__all__ = [
    "CODECS",
    "AbstractCodebookArray",
    "AbstractQuantizedArray",
    "BlockArray",
    "BlockScales",
    "CacheArray",
    "Codec",
    "FP4Array",
    "Int4Array",
    "Int8Array",
    "NF4Array",
    "NestedScales",
]
