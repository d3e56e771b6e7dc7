"""Rules: how they are registered, selected for a primitive, and checked."""

from .beyond import Beyond as Beyond
from .beyond import Lost as Lost
from .beyond import kept as kept
from .beyond import rules_beyond as rules_beyond
from .matching import fits as fits
from .registry import GLOBAL as GLOBAL
from .registry import Rule as Rule
from .registry import RuleError as RuleError
from .registry import RuleSet as RuleSet
from .registry import RuleWarning as RuleWarning
from .registry import mark_in_use as mark_in_use
from .registry import register as register
from .registry import register_on_either_side as register_on_either_side
from .registry import require_stack_depth as require_stack_depth
from .registry import signature_of as signature_of
from .resolution import AmbiguousRuleError as AmbiguousRuleError
from .resolution import Checked as Checked
from .resolution import Keeping as Keeping
from .resolution import Resolver as Resolver
from .resolution import RulesByOperands as RulesByOperands
from .resolution import active_layers as active_layers
from .resolution import expected_results as expected_results
from .resolution import resolver as resolver
from .resolution import use_rule_sets as use_rule_sets
