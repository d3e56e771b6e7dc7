"""Arrays with named axes, matched by name."""

from . import rules as _rules  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers them)
from .array import AxisError, NamedArray, align

__all__ = ["AxisError", "NamedArray", "align"]
