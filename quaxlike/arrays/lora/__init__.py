"""Low-rank adapters: a frozen weight plus a small trained correction."""

from . import contraction as _contraction  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import layout as _layout  # noqa: F401  # pyright: ignore[reportUnusedImport]
from . import slicing as _slicing  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .array import LoraArray as LoraArray
from .array import row_norm as row_norm
from .array import row_scale as row_scale
from .beside import LoraBias as LoraBias
from .beside import TrainableArray as TrainableArray
from .einsum import arrange as arrange
