"""Rules: their registration, the choice of one for a primitive, and the checks of its results."""

from .registry import (
    GLOBAL,
    Rule,
    RuleError,
    RuleSet,
    RuleWarning,
    mark_in_use,
    register,
    register_on_either_side,
    require_stack_depth,
    signature_of,
)
from .resolution import (
    AmbiguousRuleError,
    Checked,
    Resolver,
    active_layers,
    resolver,
    use_rule_sets,
)

__all__ = [
    "GLOBAL",
    "AmbiguousRuleError",
    "Checked",
    "Resolver",
    "Rule",
    "RuleError",
    "RuleSet",
    "RuleWarning",
    "active_layers",
    "mark_in_use",
    "register",
    "register_on_either_side",
    "require_stack_depth",
    "resolver",
    "signature_of",
    "use_rule_sets",
]
