"""Sparse arrays: only nonzero elements (or blocks) are stored."""

# These are imported to register their rules.
from . import block_rules, dot, elementwise, shape  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .block import BlockSparseArray
from .one_hot import OneHotVector
from .unstructured import SparseArray

__all__ = ["BlockSparseArray", "OneHotVector", "SparseArray"]
