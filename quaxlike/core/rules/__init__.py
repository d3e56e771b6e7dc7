"""Rules: their registration, the choice of one for a primitive, and the checks of its results."""

from .checks import Checked, RuleError, RuleWarning
from .registry import (
    GLOBAL,
    Rule,
    RuleSet,
    epoch,
    mark_in_use,
    need_stack,
    register,
    register_on_either_side,
    signature_of,
)
from .resolution import (
    Ambiguity,
    AmbiguousRuleError,
    Resolver,
    active_layers,
    asking,
    in_order,
    more_specific,
    resolver,
)

__all__ = [
    "GLOBAL",
    "Ambiguity",
    "AmbiguousRuleError",
    "Checked",
    "Resolver",
    "Rule",
    "RuleError",
    "RuleSet",
    "RuleWarning",
    "active_layers",
    "asking",
    "epoch",
    "in_order",
    "mark_in_use",
    "more_specific",
    "need_stack",
    "register",
    "register_on_either_side",
    "resolver",
    "signature_of",
]
