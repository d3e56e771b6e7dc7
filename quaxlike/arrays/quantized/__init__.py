"""Arrays of integer codes with block scales: NF4, FP4, int4, int8."""

from . import arithmetic as _arithmetic  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import contract as _contract  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import experts as _experts  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import layout as _layout  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import rows as _rows  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
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
