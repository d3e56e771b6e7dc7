"""Determines whether a rule matches some operands, and whether it's more specific than another rule."""

import functools
import typing
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..values import KINDS, Value, aval_of
from .registry import Rule, signature_of

if TYPE_CHECKING:
    import plum


def depends_on_operands(rule: Rule) -> bool:
    """Returns whether types alone aren't enough to determine if a rule matches."""
    return rule.depends_on_shapes or any(map(is_value_dependent, _hints(rule)))


def may_match(rule: Rule, types: "plum.Signature") -> bool:
    """Returns whether a rule may match operands dispatching as these types."""
    if not any(map(is_value_dependent, _hints(rule))):
        return types <= rule.signature
    n = len(types.types)
    return rule.signature.has_varargs or len(rule.signature.types) == n


def fits(rule: Rule, i: int, x: Any, cls: Any) -> bool:
    """Returns whether the rule accepts `x` (which dispatches as `cls`) as its operand at position `i`."""
    annotation = rule.annotations(i + 1)[i]
    signature = signature_of([annotation.hint])
    by_value = cls is not jax.Array and is_value_dependent(annotation.hint)
    if not (signature.match((x,)) if by_value else signature_of([cls]) <= signature):
        return False
    return annotation.takes(cls, lambda: aval_of_operand(x))


def matches(rule: Rule, types: Sequence[Any], operands: Sequence[Any]) -> bool:
    typed = list(zip(operands, types, rule.annotations(len(types)), strict=True))
    if any(map(is_value_dependent, _hints(rule))):
        each = all(fits(rule, i, x, cls) for i, (x, cls, _) in enumerate(typed))
    else:
        each = all(not a.kinds or a.takes(cls, functools.partial(aval_of_operand, x)) for x, cls, a in typed)
    return each and all(_are_of_one_size(axes, operands) for axes in rule.shared_axes(len(types)))


def _are_of_one_size(axes: Collection[tuple[int, int]], operands: Sequence[Any]) -> bool:
    return len({aval_of_operand(operands[i]).shape[axis] for i, axis in axes}) == 1


def _hints(rule: Rule) -> list[Any]:
    return [each.hint for each in rule.annotations(len(rule.operands) + 1)]


def is_value_dependent(hint: Any) -> bool:
    import plum

    members = typing.get_args(hint)
    if members and not isinstance(hint, type):
        return any(map(is_value_dependent, members))
    if not isinstance(hint, type) or not issubclass(hint, Value):
        return False
    if isinstance(hint, plum.CovariantMeta):  # uses the instance check of the underlying class
        hint = next(cls for cls in hint.__mro__ if not isinstance(cls, plum.CovariantMeta))
    return not plum.is_faithful(hint)


def more_specific(a: Rule, b: Rule) -> bool:
    return _implies(a, b) and not _implies(b, a)


def _implies(a: Rule, b: Rule) -> bool:
    """Returns whether rule `b` matches all operands matched by `a`."""
    if not a.signature <= b.signature:
        return False
    n = max(len(a.operands), len(b.operands)) + 1
    if not all(any(axes <= own for own in a.shared_axes(n)) for axes in b.shared_axes(n)):
        return False
    return all(x.implies(y) for x, y in zip(a.annotations(n), b.annotations(n), strict=False))


def aval_of_operand(x: Any) -> Any:
    return aval_of(x) if KINDS[type(x)] == "value" else jax.typeof(x)
