"""Arrays of codes with block scales: NF4, FP4, int4, int8, and every published block format."""

# Imported to register rules.
from . import convolution, dot, elementwise, experts, indexing, shape  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .base import AbstractQuantizedArray
from .block import BlockArray
from .codebook import AbstractCodebookArray, FP4Array, Int4Array, NF4Array
from .codecs import CODECS, Codec
from .int8 import Int8Array
from .scales import BlockScales, NestedScales

__all__ = [
    "CODECS",
    "AbstractCodebookArray",
    "AbstractQuantizedArray",
    "BlockArray",
    "BlockScales",
    "Codec",
    "FP4Array",
    "Int4Array",
    "Int8Array",
    "NF4Array",
    "NestedScales",
]
