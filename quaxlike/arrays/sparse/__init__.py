"""Arrays that are mostly zero, stored by what is not."""

from . import block_rules as _block_rules  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from .block import BlockSparseArray as BlockSparseArray
from .one_hot import OneHotVector as OneHotVector
