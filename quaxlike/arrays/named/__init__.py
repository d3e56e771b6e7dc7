"""Arrays whose axes have names, and are told apart by them."""

from . import rules as _rules  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers them)
from .array import AxisError as AxisError
from .array import NamedArray as NamedArray
from .array import align as align
