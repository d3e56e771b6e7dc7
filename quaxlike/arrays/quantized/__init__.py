"""Arrays of integer codes with block scales: NF4, FP4, int4, int8."""

from . import arithmetic as _arithmetic  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import contract as _contract  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import experts as _experts  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import layout as _layout  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import rows as _rows  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from .base import AbstractQuantizedArray as AbstractQuantizedArray
from .codebook import AbstractCodebookArray as AbstractCodebookArray
from .codebook import FP4Array as FP4Array
from .codebook import Int4Array as Int4Array
from .codebook import NF4Array as NF4Array
from .int8 import Int8Array as Int8Array
from .scales import NestedScales as NestedScales
