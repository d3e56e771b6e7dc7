"""Lists the rules for a type, and finds ambiguous pairs of rules.

Ambiguities are found by the functions used by dispatch, so that the two always agree.
"""

import dataclasses
import functools
import inspect
import itertools
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ..._checked import checked
from ..rules import GLOBAL, AmbiguousRuleError, Rule, RuleSet, signature_of
from ..rules.matching import more_specific
from ..rules.resolution import Ambiguity, in_order
from ..values import ArrayValue, Value
from .page import plain_table


@checked
def rules_for(cls: type[Value], *, rules: RuleSet | None = None) -> list[Rule]:
    """Lists the rules for a type, sorted by primitive.

    Use this before writing a rule, to see what a type already supports.

    **Arguments:**

    - `cls`: a subclass of [`quaxlike.Value`][].
    - `rules`: a [`quaxlike.RuleSet`][]. Default: the global one.

    **Returns:**

    A list of rules, each with its `primitive`, `signature` and `source` (file and line).
    """
    _check_types("rules_for", cls)
    return sorted(
        (r for r in (GLOBAL if rules is None else rules) if _mentions(r, cls)),
        key=lambda r: (r.primitive.name, r.source),
    )


def _mentions(rule: Rule, cls: type[Value]) -> bool:
    """Returns whether a rule is specific to this type.

    Parameters that accept arbitrary Values don't count as specific, unless all of them do.
    """
    hints = list(rule.signature.types)
    if rule.signature.has_varargs:
        hints.append(rule.signature.varargs)
    flat = itertools.chain.from_iterable(typing.get_args(h) or (h,) for h in hints)
    named = {h for h in flat if isinstance(h, type) and issubclass(h, Value)}
    # Nearly every rule accepts arbitrary Values for some parameter. Listing all of these would bury the
    # type's own rules.
    return any(issubclass(cls, h) for h in (named - {Value, ArrayValue} or named))


@dataclasses.dataclass(frozen=True, repr=False)
class RulesDiff:
    """The primitives with rules for either of two types. Prints as a table."""

    types: tuple[type[Value], type[Value]]
    rules: dict[str, tuple[tuple[Rule, ...], tuple[Rule, ...]]]
    """For each primitive, by name: the rules for the first type, and the rules for the second type."""

    @property
    def only_first(self) -> list[str]:
        """The primitives with rules for the first type only."""
        return [name for name, (_, second) in self.rules.items() if not second]

    @property
    def only_second(self) -> list[str]:
        """The primitives with rules for the second type only."""
        return [name for name, (first, _) in self.rules.items() if not first]

    @property
    def both(self) -> list[str]:
        """The primitives with rules for both types."""
        return [name for name, (first, second) in self.rules.items() if first and second]

    def __str__(self) -> str:
        head = ("primitive", *(cls.__name__ for cls in self.types))
        lines = [(name, *("yes" if rules else "-" for rules in each)) for name, each in self.rules.items()]
        return plain_table([head, *lines])

    __repr__ = __str__


@checked
def compare_rules(first: type[Value], second: type[Value], /, *, rules: RuleSet | None = None) -> RulesDiff:
    """Compares two types, by listing the primitives supported by either.

    Use this when writing a type that should support everything another one does.

    **Arguments:**

    - `first`, `second`: subclasses of [`quaxlike.Value`][].
    - `rules`: a [`quaxlike.RuleSet`][]. Default: the global one.

    **Returns:**

    A [`RulesDiff`][quaxlike.RulesDiff], which prints as a table.

    !!! example

        ```python
        import quaxlike as ql

        print(ql.compare_rules(ql.LoraArray, ql.NF4Array))
        ```
    """
    _check_types("compare_rules", first, second)
    found = [rules_for(cls, rules=rules) for cls in (first, second)]
    names = sorted({r.primitive.name for each in found for r in each})

    def of(name: str, each: Sequence[Rule]) -> tuple[Rule, ...]:
        return tuple(r for r in each if r.primitive.name == name)

    return RulesDiff((first, second), {name: (of(name, found[0]), of(name, found[1])) for name in names})


@checked
def check_ambiguities(*types: type[Value], rules: RuleSet | None = None) -> None:
    """Checks for pairs of rules matching the same operands, without either being the better match.

    Use this in the tests of any package registering rules, to find ambiguities before your users do.

    **Arguments:**

    - `types`: the Value types to consider as operands, in all combinations with each other and with plain
        arrays. Default: every concrete type occurring in a rule.
    - `rules`: a [`quaxlike.RuleSet`][] to check as well as the global one.

    **Raises:**

    [`quaxlike.AmbiguousRuleError`][], listing each ambiguous pair of signatures with file and line.
    """
    _check_types("check_ambiguities", *types)
    layers = (GLOBAL,) if rules is None else (rules, GLOBAL)
    pairs: dict[tuple[str, str], None] = {}
    for layer in layers:
        for _, registered in layer.items():
            among = [rule for rule in registered if not types or _takes(rule, types)]
            for a, b in itertools.combinations(among, 2):
                if _clash(a, b, registered, types):
                    pairs[(repr(a), repr(b))] = None
    if pairs:
        listed = "\n".join(f"  {a}\n  {b}\n" for a, b in pairs)
        raise AmbiguousRuleError(
            f"{len(pairs)} ambiguous pair(s) of rules:\n{listed}Register a rule for the types that "
            "both match, or give one of them a `precedence`."
        )


def _check_types(function: str, *types: Any) -> None:
    for cls in types:
        if not (isinstance(cls, type) and issubclass(cls, Value)):
            raise TypeError(f"{function} takes classes of Values, such as ql.LoraArray; found {cls!r}.")


def _takes(rule: Rule, types: Sequence[type[Value]]) -> bool:
    """Returns whether the rule can match these types or plain arrays."""
    classes: list[type] = [jax.Array, *types]
    return all(any(_matches(t, hint) for t in classes) for hint in rule.signature.types)


def _clash(a: Rule, b: Rule, registered: Sequence[Rule], types: Sequence[type[Value]]) -> bool:
    """Returns whether some operands match both rules, without either being preferred."""
    if a.signature.precedence != b.signature.precedence:
        return False
    variadic = a.signature.has_varargs or b.signature.has_varargs
    if not variadic and len(a.signature.types) != len(b.signature.types):
        return False
    arity = max(len(a.signature.types), len(b.signature.types))
    slots = []
    for x, y in zip(a.annotations(arity), b.annotations(arity), strict=True):
        both = [
            cls
            for cls in _classes(x.hint, y.hint, types)
            if _matches(cls, x.hint) and _matches(cls, y.hint) and not x.excludes(y, cls)
        ]
        if not both:
            return False
        slots.append(both)
    if more_specific(a, b) or more_specific(b, a):
        return False
    # Each operand may have several possible types. A single combination without a better rule is a clash.
    for operands in itertools.product(*slots):
        # Plain arrays alone aren't dispatched.
        if all(t is jax.Array for t in operands):
            continue
        signature = signature_of(operands)
        # A third rule may be a better match than both: then there's no ambiguity.
        others = [r for r in registered if signature <= r.signature and not r.depends_on_shapes]
        order = in_order(a.primitive, signature, list({*others, a, b}))
        first = order[0]  # dispatch only tries the others if a better match declines
        if isinstance(first, Ambiguity) and a in first.rules and b in first.rules:
            return True
    return False


def _classes(x: Any, y: Any, types: Sequence[type[Value]]) -> list[type]:
    if types:
        return [jax.Array, *types]
    named = itertools.chain.from_iterable(typing.get_args(h) or (h,) for h in (x, y))
    values = [t for t in named if isinstance(t, type) and issubclass(t, Value)]
    return [jax.Array, *dict.fromkeys(itertools.chain.from_iterable(map(_concrete, values)))]


def _concrete(cls: type[Value]) -> Iterator[type[Value]]:
    """Returns the class itself if it's concrete, or its concrete subclasses otherwise. Ignores the common
    base classes: nearly everything inherits from them.
    """
    if not inspect.isabstract(cls):
        yield cls
    elif cls not in (Value, ArrayValue):
        yield from itertools.chain.from_iterable(map(_concrete, cls.__subclasses__()))


@functools.lru_cache(maxsize=65536)
def _matches(cls: type, hint: Any) -> bool:
    return signature_of([cls]) <= signature_of([hint])
