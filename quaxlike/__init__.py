"""New kinds of arrays for any JAX program."""

from typing import TYPE_CHECKING

from ._lazy import OlderPaths, lazily
from ._version import __version__
from .core import higher_order as _higher_order  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers rules)
from .core import without_operators as _without_operators  # noqa: F401  # pyright: ignore[reportUnusedImport] (sets operators)
from .core.jaxprs.unify import OperandMismatch, StructureError
from .core.operators import ArrayOperators
from .core.plain_arrays import takes_no_like as _takes_no_like
from .core.policy import MaterialisationError, MaterialisationWarning, on_materialise
from .core.quaxify import quaxify, value_of
from .core.recording import note
from .core.rules import AmbiguousRuleError, RuleError, RuleSet, RuleWarning, register, register_on_either_side
from .core.values import ArrayValue, Value, is_value, materialise
from .core.values import on_new_type as _on_new_type

# The American spellings of the same objects.
materialize, on_materialize = materialise, on_materialise
MaterializationError, MaterializationWarning = MaterialisationError, MaterialisationWarning


if TYPE_CHECKING:
    from . import adapters as adapters
    from . import arrays as arrays
    from . import files as files
    from . import hijax as hijax
    from . import implicit as implicit
    from . import kernels as kernels
    from . import lm as lm
    from . import numpy as numpy
    from . import online_learning as online_learning
    from . import optim as optim
    from . import primitives as primitives
    from . import sharding as sharding
    from . import surgery as surgery
    from . import testing as testing
    from . import utils as utils
    from .arrays.adapted import AdaptedArray
    from .arrays.annotated import AnnotatedArray
    from .arrays.dot_axes import DotAxes, dot_axes
    from .arrays.layout import Layout
    from .arrays.lora import LoraArray, LoraBias, TrainableArray, TrainableRows
    from .arrays.quantized import BlockArray, FP4Array, Int4Array, Int8Array, NF4Array
    from .arrays.sparse import BlockSparseArray, SparseArray
    from .core.inspect.coverage import RulesDiff, check_ambiguities, compare_rules, rules_for
    from .core.inspect.exchange import Exchange
    from .core.inspect.explain import Report, Row, explain
    from .primitives import custom_dce
    from .surgery.adapt import adapt
    from .surgery.adapters import activate, choose_adapter, combine_adapters, stack_adapters, with_dropout_key
    from .surgery.balance import balance
    from .surgery.eva import eva, eva_ranks, input_maxima, input_moments
    from .surgery.inits import loftq
    from .surgery.loraify import loraify
    from .surgery.merge import merge, unmerge
    from .surgery.quantize import fake_quantize, quantize
    from .surgery.records import layouts, traced_layouts
    from .surgery.select import select
    from .surgery.stacking import stack_layers, unstack_layers
    from .surgery.summary import summary
    from .surgery.to_lora import to_lora
    from .surgery.trainable import train_scales, trainable
    from .surgery.trees import path_of

__all__ = [  # noqa: RUF022 (grouped by purpose)
    "__version__",
    # Running a function on new kinds of arrays
    "quaxify",
    "value_of",
    "materialise",
    "on_materialise",
    "MaterialisationError",
    "MaterialisationWarning",
    "materialize",
    "on_materialize",
    "MaterializationError",
    "MaterializationWarning",
    "OperandMismatch",
    "StructureError",
    # Inspecting what happened
    "explain",
    "Report",
    "Row",
    "Exchange",
    "note",
    # Defining your own types and rules
    "Value",
    "ArrayValue",
    "AdaptedArray",
    "AnnotatedArray",
    "ArrayOperators",
    "is_value",
    "register",
    "register_on_either_side",
    "dot_axes",
    "DotAxes",
    "RuleSet",
    "RuleError",
    "RuleWarning",
    "AmbiguousRuleError",
    "rules_for",
    "compare_rules",
    "RulesDiff",
    "check_ambiguities",
    # Built-in types
    "LoraArray",
    "LoraBias",
    "TrainableArray",
    "TrainableRows",
    "NF4Array",
    "FP4Array",
    "Int4Array",
    "Int8Array",
    "BlockArray",
    "SparseArray",
    "BlockSparseArray",
    # Whole models
    "path_of",
    "select",
    "Layout",
    "layouts",
    "traced_layouts",
    "summary",
    "train_scales",
    "trainable",
    "adapt",
    "loraify",
    "to_lora",
    "with_dropout_key",
    "activate",
    "merge",
    "unmerge",
    "stack_adapters",
    "choose_adapter",
    "combine_adapters",
    "stack_layers",
    "unstack_layers",
    "quantize",
    "fake_quantize",
    "loftq",
    "balance",
    "eva",
    "eva_ranks",
    "input_maxima",
    "input_moments",
    # Defining your own operations
    "custom_dce",
]

# Types, plus operations on whole models. Import these lazily, so that defining types of your own loads
# nothing beyond the core.
_NAMES = {
    "arrays.adapted": ("AdaptedArray",),
    "arrays.annotated": ("AnnotatedArray",),
    "arrays.dot_axes": ("DotAxes", "dot_axes"),
    "arrays.layout": ("Layout",),
    "arrays.lora": ("LoraArray", "LoraBias", "TrainableArray", "TrainableRows"),
    "arrays.quantized": ("BlockArray", "FP4Array", "Int4Array", "Int8Array", "NF4Array"),
    "arrays.sparse": ("BlockSparseArray", "SparseArray"),
    "core.inspect.coverage": ("RulesDiff", "check_ambiguities", "compare_rules", "rules_for"),
    "core.inspect.exchange": ("Exchange",),
    "core.inspect.explain": ("Report", "Row", "explain"),
    "primitives": ("custom_dce",),
    "surgery.adapt": ("adapt",),
    "surgery.adapters": (
        "activate",
        "choose_adapter",
        "combine_adapters",
        "stack_adapters",
        "with_dropout_key",
    ),
    "surgery.balance": ("balance",),
    "surgery.eva": ("eva", "eva_ranks", "input_maxima", "input_moments"),
    "surgery.inits": ("loftq",),
    "surgery.loraify": ("loraify",),
    "surgery.merge": ("merge", "unmerge"),
    "surgery.quantize": ("fake_quantize", "quantize"),
    "surgery.records": ("layouts", "traced_layouts"),
    "surgery.select": ("select",),
    "surgery.stacking": ("stack_layers", "unstack_layers"),
    "surgery.summary": ("summary",),
    "surgery.to_lora": ("to_lora",),
    "surgery.trainable": ("train_scales", "trainable"),
    "surgery.trees": ("path_of",),
}
_MODULES = (
    *(
        "adapters",
        "arrays",
        "files",
        "hijax",
        "implicit",
        "kernels",
        "lm",
        "numpy",
        "online_learning",
        "optim",
    ),
    *("primitives", "sharding", "surgery", "testing", "utils"),
    *("interop", "models"),  # old locations, to be removed in 0.3
)

__getattr__, __dir__ = lazily(__name__, _MODULES, globals(), _NAMES)

OlderPaths(
    *(f"{__name__}.{x}" for x in ("arrays.adapters", "finetune", "generate", "interop", "models")),
    f"{__name__}.surgery.methods",
).install()


def _follow_plain_arrays(cls: type) -> None:
    """Loads the placeholder types for plain arrays if a newly-defined type requires them."""
    if _takes_no_like(cls):
        from .arrays.unitful import placeholders as placeholders


_on_new_type.append(_follow_plain_arrays)
