"""Rules matching after materialising some Values.

At least one operand remains a Value: `Sparse @ Foreign` is computed as `Sparse @ array`, rather than as a
dense product. For the same reason, a user's rule for `(array, Foreign)` is preferred to our own for
`(Adapter, any type)`, which would end up materialising `Foreign`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from ..scoped import Scoped
from ..values import ArrayValue, Value, is_value
from .matching import depends_on_operands, is_value_dependent, matches
from .registry import Rule, RuleSet, epoch, lock, require_stack_depth, signature_of

if TYPE_CHECKING:
    from .resolution import Resolver


class Beyond:
    """A rule matching if the Values in `positions` are materialised."""

    def __init__(self, rule: Rule, types: Sequence[type | None], positions: tuple[int, ...]) -> None:
        self.rule = rule
        self.positions = positions
        self._depends_on_operands = depends_on_operands(rule)
        self._types = [jax.Array if t is None or i in positions else t for i, t in enumerate(types)]

    def applies_to(self, operands: Sequence[Any]) -> bool:
        """Returns whether the rule accepts not just the types but also the dtypes and shapes of the
        operands."""
        if not all(
            x.follows_rules() for i, x in enumerate(operands) if is_value(x) and i not in self.positions
        ):
            return False
        return not self._depends_on_operands or matches(self.rule, self._types, operands)


def rules_beyond(resolver: "Resolver", key: tuple[Any, ...]) -> list[Beyond]:
    """Finds rules matching these operand types after materialising some Values.

    Users' rules come before our own, then rules of earlier layers, then those preserving more Values.
    """
    if (known := resolver.beyond.get(key)) is not None:
        return known
    require_stack_depth()
    primitive, *types = key
    values = sum(t is not None for t in types)
    ranked: list[tuple[Any, Beyond]] = []
    declined: set[Callable[..., Any]] = set()  # rules that were already tried without materialising
    made_at = epoch()
    for n, layer in enumerate(resolver.layers):
        for rule in layer[primitive]:
            if (positions := _in_the_way(rule, types)) == ():
                # The same rule may be registered for several signatures. If it has already declined this
                # call, don't try it again after materialising.
                declined.add(rule.written)
            elif positions is not None and len(positions) < values:
                # Our own rules cover many types. They mustn't shadow a user's more specific rule.
                ranked.append(((rule.is_ours, n, len(positions), positions), Beyond(rule, types, positions)))
    ranked.sort(key=lambda entry: entry[0])
    found = [beyond for _, beyond in ranked if beyond.rule.written not in declined]
    with lock:
        if made_at == epoch():  # otherwise a rule was registered in the meantime
            resolver.beyond[key] = found
    return found


def _in_the_way(rule: Rule, types: Sequence[type | None]) -> tuple[int, ...] | None:
    """Returns the positions of the Values for which the rule requires an array. None if it doesn't accept the
    operands even with these materialised."""
    annotations = rule.annotations(len(types))
    if len(annotations) != len(types):
        return None

    def takes(hint: Any, cls: Any) -> bool:
        return is_value_dependent(hint) or signature_of([cls]) <= signature_of([hint])

    positions: list[int] = []
    for i, (t, annotation) in enumerate(zip(types, annotations, strict=True)):
        if t is not None and takes(annotation.hint, t):
            continue
        if not takes(annotation.hint, jax.Array):
            return None
        if t is not None:
            positions.append(i)
    return tuple(positions)


# Rules for any type, beside a user's rule ---------------------------------------------------------


class Lost(Exception):
    """Raised if a rule for arbitrary types would materialise a Value a user's rule could handle.

    **Arguments:**

    - `lacking`: returns which operation lacks a rule for which operands, and which rule to write.
    """

    def __init__(self, lacking: Callable[[], tuple[str, str]]) -> None:
        super().__init__()
        self.lacking = lacking


def kept_by_others(rule: Any, layers: Sequence[RuleSet], key: Sequence[Any]) -> tuple[type, ...]:
    """Returns types not special to `rule`, but accepted by a user's rule alongside arrays."""
    primitive, *types = key
    if len({*types} - {None}) < 2 or not isinstance(rule, Rule):
        return ()
    annotations = rule.annotations(len(types))
    unnamed = [i for i, t in enumerate(types) if t is not None and not _names(annotations[i].classes, t)]
    others = [r for layer in layers for r in layer[primitive] if not r.is_ours] if unnamed else []
    in_the_way = [positions for r in others if (positions := _in_the_way(r, types))]
    return tuple({types[i] for i in unnamed if any(i not in positions for positions in in_the_way)})


def _names(classes: Sequence[Any], cls: type) -> bool:
    own = (c for c in classes if isinstance(c, type) and issubclass(c, Value) and c not in _ANY_TYPE)
    return any(issubclass(cls, c) for c in own)


_ANY_TYPE = (Value, ArrayValue)

kept = Scoped[tuple[type, ...]]("quaxlike_kept", ())


def keeping(types: tuple[type, ...]) -> contextlib.AbstractContextManager[Any]:
    """In this context, `Lost` is raised rather than materialising a Value of any of these types."""
    return kept.use(tuple(dict.fromkeys((*kept.get(), *types))))
