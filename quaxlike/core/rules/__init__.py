"""Rules: their registration, the choice of one for a primitive, and the checks of its results."""

from .registry import (
    GLOBAL,
    Rule,
    RuleError,
    RuleSet,
    RuleWarning,
    epoch,
    mark_in_use,
    register,
    register_on_either_side,
    require_stack_depth,
    signature_of,
)
from .resolution import (
    Ambiguity,
    AmbiguousRuleError,
    Checked,
    Resolver,
    active_layers,
    in_order,
    more_specific,
    resolver,
    use_rule_sets,
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
    "epoch",
    "in_order",
    "mark_in_use",
    "more_specific",
    "register",
    "register_on_either_side",
    "require_stack_depth",
    "resolver",
    "signature_of",
    "use_rule_sets",
]
