"""For authors of operations: a JAX primitive from one function."""

from .custom_dce import custom_dce as custom_dce
from .define import DefinedPrimitive as DefinedPrimitive
from .define import define_primitive as define_primitive
from .partitioning import Partitioning as Partitioning
from .slots import MissingRuleError as MissingRuleError
from .slots import Slot as Slot
