"""What is registered: the rules of a type, and the pairs of rules that no order decides between."""

import inspect
import itertools
import typing
from collections.abc import Sequence
from typing import Any

import jax

from .rules import GLOBAL, Ambiguity, AmbiguousRuleError, Rule, RuleSet, in_order, more_specific, signature_of
from .values import Value


def rules_for(cls: type[Value], *, rules: RuleSet | None = None) -> list[Rule]:
    """The rules that a type takes part in, sorted by primitive.

    **Arguments:**

    - `cls`: a subclass of [`quaxlike.Value`][].
    - `rules`: a [`quaxlike.RuleSet`][]. Default: the global one.

    **Returns:**

    A list of rules, each with its `primitive`, `signature` and `source` (file and line).
    """
    return sorted(
        (r for r in (GLOBAL if rules is None else rules) if _mentions(r, cls)),
        key=lambda r: (r.primitive.name, r.source),
    )


def _mentions(rule: Rule, cls: type[Value]) -> bool:
    hints = list(rule.signature.types)
    if rule.signature.has_varargs:
        hints.append(rule.signature.varargs)
    flat = itertools.chain.from_iterable(typing.get_args(h) or (h,) for h in hints)
    return any(isinstance(h, type) and issubclass(h, Value) and issubclass(cls, h) for h in flat)


def check_ambiguities(*types: type[Value], rules: RuleSet | None = None) -> None:
    """Checks that no two rules can match the same operands without one being the better match.

    **Arguments:**

    - `types`: the types of Values to consider as operands, in every combination with each other and
        with plain arrays. Default: every concrete type that a rule mentions.
    - `rules`: a [`quaxlike.RuleSet`][] to look at on top of the global one.

    **Raises:**

    [`quaxlike.AmbiguousRuleError`][], listing each ambiguous pair of signatures with file and line.
    """
    layers = (GLOBAL,) if rules is None else (rules, GLOBAL)
    pairs: dict[tuple[str, str], None] = {}
    for layer in layers:
        for _, registered in layer.items():
            for a, b in itertools.combinations(registered, 2):
                if _clash(a, b, registered, types):
                    pairs[(repr(a), repr(b))] = None
    if pairs:
        listed = "\n".join(f"  {a}\n  {b}\n" for a, b in pairs)
        raise AmbiguousRuleError(
            f"{len(pairs)} ambiguous pair(s) of rules:\n{listed}Register a rule for the types that "
            "both match, or give one of them a `precedence`."
        )


def _clash(a: Rule, b: Rule, registered: Sequence[Rule], types: Sequence[type[Value]]) -> bool:
    """Whether some operands match both rules and the order between the two is undecided for them."""
    if more_specific(a, b) or more_specific(b, a):
        return False
    if a.signature.precedence != b.signature.precedence:
        return False
    variadic = a.signature.has_varargs or b.signature.has_varargs
    if not variadic and len(a.signature.types) != len(b.signature.types):
        return False
    arity = max(len(a.signature.types), len(b.signature.types))
    slots = []
    for x, y in zip(a.signature.expand_varargs(arity), b.signature.expand_varargs(arity), strict=True):
        both = [t for t in _classes(x, y, types) if _matches(t, x) and _matches(t, y)]
        if not both:
            return False
        slots.append(both)
    for operands in itertools.product(*slots):
        if all(t is jax.Array for t in operands):
            continue
        signature = signature_of(operands)
        order = in_order(a.primitive, signature, [r for r in registered if signature <= r.signature])
        first = order[0]  # what comes after is asked only where a better match declines
        if isinstance(first, Ambiguity) and a in first.rules and b in first.rules:
            return True
    return False


def _classes(x: Any, y: Any, types: Sequence[type[Value]]) -> list[type]:
    if types:
        return [jax.Array, *types]
    named = itertools.chain.from_iterable(typing.get_args(h) or (h,) for h in (x, y))
    concrete = [t for t in named if isinstance(t, type) and issubclass(t, Value)]
    return [jax.Array, *dict.fromkeys(t for t in concrete if not inspect.isabstract(t))]


def _matches(cls: type, hint: Any) -> bool:
    return signature_of([cls]) <= signature_of([hint])
