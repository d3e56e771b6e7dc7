"""New kinds of arrays for any JAX program."""

from ._version import __version__ as __version__
from .arrays.lora import LoraArray as LoraArray
from .arrays.lora import LoraBias as LoraBias
from .arrays.lora import TrainableArray as TrainableArray
from .arrays.quantized import FP4Array as FP4Array
from .arrays.quantized import Int4Array as Int4Array
from .arrays.quantized import Int8Array as Int8Array
from .arrays.quantized import NF4Array as NF4Array
from .arrays.sparse import BlockSparseArray as BlockSparseArray
from .arrays.sparse import SparseArray as SparseArray
from .core import higher_order as _higher_order  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from .core import late as _late  # noqa: F401  # pyright: ignore[reportUnusedImport] (adopts late Values)
from .core.coverage import check_ambiguities as check_ambiguities
from .core.coverage import compare_rules as compare_rules
from .core.coverage import rules_for as rules_for
from .core.explain import explain as explain
from .core.operators import ArrayOperators as ArrayOperators
from .core.policy import (
    MaterialisationError as MaterialisationError,
)
from .core.policy import (
    MaterialisationWarning as MaterialisationWarning,
)
from .core.policy import (
    on_materialise as on_materialise,
)
from .core.quaxify import quaxify as quaxify
from .core.quaxify import value_of as value_of
from .core.rules import (
    AmbiguousRuleError as AmbiguousRuleError,
)
from .core.rules import (
    RuleError as RuleError,
)
from .core.rules import (
    RuleSet as RuleSet,
)
from .core.rules import (
    register as register,
)
from .core.slots import OperandMismatch as OperandMismatch
from .core.values import (
    ArrayValue as ArrayValue,
)
from .core.values import (
    Value as Value,
)
from .core.values import (
    is_value as is_value,
)
from .core.values import (
    materialise as materialise,
)
from .primitives import custom_dce as custom_dce
from .surgery.adapters import choose_adapter as choose_adapter
from .surgery.adapters import combine_adapters as combine_adapters
from .surgery.adapters import stack_adapters as stack_adapters
from .surgery.dropout import with_dropout_key as with_dropout_key
from .surgery.eva import eva as eva
from .surgery.eva import eva_ranks as eva_ranks
from .surgery.eva import input_moments as input_moments
from .surgery.loftq import loftq as loftq
from .surgery.loraify import loraify as loraify
from .surgery.merge import merge as merge
from .surgery.merge import unmerge as unmerge
from .surgery.quantize import fake_quantize as fake_quantize
from .surgery.quantize import quantize as quantize
from .surgery.select import path_of as path_of
from .surgery.select import select as select
from .surgery.summary import summary as summary
from .surgery.trainable import trainable as trainable
