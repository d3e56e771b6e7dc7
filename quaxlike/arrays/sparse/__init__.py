"""Arrays that are mostly zero, stored by what is not."""

from . import axes as _axes  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import block_rules as _block_rules  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import elements as _elements  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from . import products as _products  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from .block import BlockSparseArray
from .one_hot import OneHotVector
from .unstructured import SparseArray

__all__ = ["BlockSparseArray", "OneHotVector", "SparseArray"]
