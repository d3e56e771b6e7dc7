"""Tools for defining JAX primitives from a single function, aimed at authors of new operations."""

from .custom_dce import custom_dce
from .define import define_primitive
from .partitioning import Partitioning
from .primitive import DefinedPrimitive, MissingRuleError, Slot

__all__ = ["DefinedPrimitive", "MissingRuleError", "Partitioning", "Slot", "custom_dce", "define_primitive"]
