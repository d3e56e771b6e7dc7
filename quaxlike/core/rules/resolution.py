"""The choice of a rule for a primitive, and the checks on its results.

The cache may only answer what resolution would answer again. It is keyed by types alone,
so rules that also look at dtypes, shapes or values are stored as one `RulesByOperands`, which decides on
every call. An entry is stored only if no rule was registered while it was computed.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import typing
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc

from .. import compat
from ..values import KINDS, Value, aval_of, is_value, refuses
from .annotations import type_name
from .registry import (
    GLOBAL,
    Rule,
    RuleError,
    RuleSet,
    RuleWarning,
    check_operands,
    epoch,
    lock,
    require_stack_depth,
    signature_of,
    warn_once,
)

if TYPE_CHECKING:
    import plum


class AmbiguousRuleError(RuleError, LookupError):
    """Several rules match the operand types, and none is more specific than the others."""

    __module__ = "quaxlike"


class Resolver:
    """Finds rules in a stack of rule sets, outermost priority first, cached by types."""

    def __init__(self, layers: tuple[RuleSet, ...], made_at: int) -> None:
        self.layers = layers
        self.cache: dict[Any, list[Callable[..., Any]]] = {}
        self.beyond: dict[Any, list[Any]] = {}  # filled by `rules_beyond`
        self._made_at = made_at

    def candidates(self, key: tuple[Any, ...], params: Collection[str] = ()) -> list[Callable[..., Any]]:
        """Returns the rules for `key`, best first. Each is tried if the previous one returned
        `NotImplemented`.

        A key is a primitive followed by one entry per operand: a Value's class, or None for anything
        else.

        **Raises:** `TypeError` for a rule which takes one of the primitive's `params` by position.
        """
        require_stack_depth()
        primitive, *types = key
        for rule in itertools.chain.from_iterable(layer[primitive] for layer in self.layers):
            check_operands(rule, params)
        operands = signature_of(jax.Array if t is None else t for t in types)
        # A type may decide for each instance whether rules apply. Only then do rules ask, since this takes a
        # call per operand.
        may_decline = any(t is not None and t.follows_rules is not Value.follows_rules for t in types)
        found: list[Callable[..., Any]] = []
        # Rules of an outer layer come first, however specific the rules of an inner one are: a user's rule
        # set can override anything.
        for layer in self.layers:
            matching = [r for r in layer[primitive] if may_match(r, operands)]
            if any(map(depends_on_operands, matching)):
                found.append(RulesByOperands(operands, matching, may_decline))
            else:
                found += [Checked(r, may_decline) for r in in_order(primitive, operands, matching)]
        with lock:
            if self._made_at == epoch():  # otherwise a rule was registered in the meantime
                self.cache[key] = found
        return found


# The rule sets in force in this context. A `quaxify` adds its own while calling its function.
active_layers: contextvars.ContextVar[tuple[RuleSet, ...]] = contextvars.ContextVar(
    "quaxlike_rules", default=(GLOBAL,)
)


# The same, as a setting in the keys of JAX's caches: a function traced with other rule sets is
# traced again.
_jit_layers = jax.make_user_context((GLOBAL,))


@contextlib.contextmanager
def use_rule_sets(layers: tuple[RuleSet, ...]) -> Iterator[None]:
    """Puts these rule sets in force inside the block."""
    token = active_layers.set(layers)
    try:
        with _jit_layers(layers):
            yield
    finally:
        active_layers.reset(token)


def resolver(layers: tuple[RuleSet, ...] = (GLOBAL,)) -> Resolver:
    """Returns the resolver for these rule sets, as of the last registration."""
    return _resolver(layers, epoch(), jax.config.jax_enable_checks)


@functools.lru_cache(maxsize=64)  # earlier epochs drop out
def _resolver(layers: tuple[RuleSet, ...], at: int, checks: bool) -> Resolver:
    return Resolver(layers, at)


def in_order(
    primitive: jexc.Primitive, operands: "plum.Signature", matching: Sequence[Rule]
) -> list[Callable[..., Any]]:
    order: list[Callable[..., Any]] = []
    while matching:
        # Repeatedly take the most specific rule. The others remain as alternatives, for when it declines.
        best = [r for r in matching if not any(more_specific(q, r) for q in matching)]
        highest = max(r.signature.precedence for r in best)
        best = [r for r in best if r.signature.precedence == highest]
        if any(r.written is not best[0].written for r in best):
            return [*order, Ambiguity(primitive, operands, best)]
        order.append(best[0])
        # If a function declines these types, it also declines them under another signature.
        matching = [r for r in matching if r.written is not best[0].written]
    return order


class RulesByOperands:
    """The rules for certain operand types, if types alone do not tell which of them match.

    Some rules need certain dtypes or shapes (jaxtyping's `Float[Array, "n"]`), or types whose instances are
    recognised by value instead of class (plum's `__faithful__ = False`). Each call tries the rules that match
    its operands.
    """

    def __init__(self, types: "plum.Signature", rules: Sequence[Rule], may_decline: bool) -> None:
        self._types = types
        self._rules = rules
        self._may_decline = may_decline
        self._orders: dict[tuple[Rule, ...], list[Callable[..., Any]]] = {}

    def matching(self, primitive: jexc.Primitive, operands: Sequence[Any]) -> list[Callable[..., Any]]:
        """Returns the rules for these operands, best first."""
        found = tuple(rule for rule in self._rules if _matches(rule, self._types.types, operands))
        if found not in self._orders:
            order = in_order(primitive, self._types, found)
            self._orders[found] = [Checked(rule, self._may_decline) for rule in order]
        return self._orders[found]

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        for rule in self.matching(primitive, operands):
            out = rule(primitive, operands, params)
            if out is not NotImplemented:
                return out
        return NotImplemented


def depends_on_operands(rule: Rule) -> bool:
    """Returns whether operand types alone do not tell if a rule matches."""
    return rule.depends_on_shapes or any(map(is_value_dependent, _hints(rule)))


def may_match(rule: Rule, types: "plum.Signature") -> bool:
    """Returns whether a rule may match operands dispatching as these types."""
    if not any(map(is_value_dependent, _hints(rule))):
        return types <= rule.signature
    n = len(types.types)
    return rule.signature.has_varargs or len(rule.signature.types) == n


def fits(rule: Rule, i: int, x: Any, cls: Any) -> bool:
    """Returns whether the rule accepts `x`, which dispatches as `cls`, in place `i`."""
    annotation = rule.annotations(i + 1)[i]
    signature = signature_of([annotation.hint])
    by_value = cls is not jax.Array and is_value_dependent(annotation.hint)
    if not (signature.match((x,)) if by_value else signature_of([cls]) <= signature):
        return False
    return annotation.takes(cls, lambda: _aval(x))


def _matches(rule: Rule, types: Sequence[Any], operands: Sequence[Any]) -> bool:
    if any(map(is_value_dependent, _hints(rule))):
        return all(fits(rule, i, x, cls) for i, (x, cls) in enumerate(zip(operands, types, strict=True)))
    annotations = rule.annotations(len(types))
    return all(
        not annotation.kinds or annotation.takes(cls, functools.partial(_aval, x))
        for x, cls, annotation in zip(operands, types, annotations, strict=True)
    )


def _hints(rule: Rule) -> list[Any]:
    return [each.hint for each in rule.annotations(len(rule.operands) + 1)]


def is_value_dependent(hint: Any) -> bool:
    import plum

    members = typing.get_args(hint)
    if members and not isinstance(hint, type):
        return any(map(is_value_dependent, members))
    if not isinstance(hint, type) or not issubclass(hint, Value):
        return False
    if isinstance(hint, plum.CovariantMeta):  # it recognises instances as the class behind it does
        hint = next(cls for cls in hint.__mro__ if not isinstance(cls, plum.CovariantMeta))
    return not plum.is_faithful(hint)


def more_specific(a: Rule, b: Rule) -> bool:
    return _implies(a, b) and not _implies(b, a)


def _implies(a: Rule, b: Rule) -> bool:
    """Returns whether rule `b` matches all operands of `a`."""
    if not a.signature <= b.signature:
        return False
    n = max(len(a.operands), len(b.operands)) + 1
    return all(x.implies(y) for x, y in zip(a.annotations(n), b.annotations(n), strict=False))


@dataclasses.dataclass(frozen=True, eq=False)
class Ambiguity:
    """Stands for rules without a decided order. Raises the error when called."""

    primitive: jexc.Primitive
    operands: "plum.Signature"
    rules: list[Rule]

    def __call__(self, *_: Any) -> Any:
        listed = "\n".join(f"  {rule}" for rule in self.rules)
        types = ", ".join(map(type_name, self.operands.types))
        raise AmbiguousRuleError(
            f"`{self.primitive}` of ({types}) is ambiguous: none of these rules is more specific "
            f"than the others.\n{listed}\nRegister a rule for exactly these types, give one of them "
            "a `precedence`, or fix the order with nested `quaxify(..., filter_spec=...)`."
        )


# Checks of results: their number, shapes and dtypes -----------------------------------------------


class Checked:
    """A rule together with the checks on its results.

    A check costs about as much as tracing the primitive. So once a rule has returned a correct result, we
    trust it with the same parameters: for concrete arrays, within one trace, and in other traces for operands
    with the same shapes and dtypes. Under `jax_enable_checks` we never trust it.

    If `may_decline`, each call asks whether the operands follow the rules of their type.
    """

    def __init__(self, rule: Callable[..., Any], may_decline: bool) -> None:
        self.rule = rule
        self._may_decline = may_decline
        # Parameters for which a result has been checked. While tracing, avals belong to the key.
        self._right: set[Any] = set()
        self._is_trusted = False  # whether this holds for any parameters
        # A trace, and the parameters checked in it. Within one trace, we do not compare avals again.
        self._here: tuple[Callable[[], Any], set[Any]] = (lambda: None), set()

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if self._may_decline and not all(x.follows_rules() for x in operands if is_value(x)):
            return NotImplemented
        out = self.rule(primitive, operands, params)
        key: Any = tuple(params.values())
        here, right_here = self._here
        try:
            if here() is compat.current_trace() and key in right_here:
                return out
            hash(key)
        except TypeError:  # unhashable parameters
            key = None
        if out is not NotImplemented:
            self._check(primitive, operands, params, out, key)
        return out

    def _check(
        self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any, key: Any
    ) -> None:
        if jax.config.jax_enable_checks:
            check_results(self.rule, primitive, operands, params, out)
            return
        if self._is_trusted:
            return
        if key is None or any(isinstance(p, jexc.Jaxpr | compat.ClosedJaxpr) for p in key):
            check_results(self.rule, primitive, operands, params, out)
            self._is_trusted = True  # these are unhashable, or a set would keep them alive
            return
        trace: Any = compat.current_trace()
        known = key if compat.is_eval_trace(trace) else (key, *map(_aval, operands))
        if known not in self._right:
            check_results(self.rule, primitive, operands, params, out)
            if len(self._right) >= _MOST_TRUSTED:
                self._right.clear()
            self._right.add(known)
        here, right_here = self._here
        if here() is not trace or len(right_here) >= _MOST_TRUSTED:
            right_here = set()
            self._here = weakref.ref(trace), right_here  # one assignment: other threads have other traces
        right_here.add(key)


_MOST_TRUSTED = 256  # entries in a set of trusted parameters


def _aval(x: Any) -> Any:
    return aval_of(x) if KINDS[type(x)] == "value" else jax.typeof(x)


def check_results(
    rule: Any, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any
) -> None:
    """Raises a `RuleError` if `primitive` cannot return `out`; only warns if just the dtype differs."""
    expected = _expected(primitive, operands, params)
    results = out if primitive.multiple_results else [out]
    if not isinstance(results, list | tuple) or (expected is not None and len(results) != len(expected)):
        number = "" if expected is None else f" of {len(expected)} result(s)"
        found = f"one of {len(out)}" if isinstance(out, list | tuple) else _found(out)
        raise RuleError(f"The rule {rule} must return a sequence{number}; found {found}.")
    for i, x in enumerate(results):
        which = f" as result {i}" if primitive.multiple_results else ""
        if not is_value(x) and not eqx.is_array_like(x):
            raise RuleError(f"The rule {rule} must return an array or a Value{which}; found {_found(x)}.")
        found = aval_of(x) if is_value(x) else jax.typeof(x)
        want = None if expected is None else expected[i]
        if not isinstance(want, jax.core.ShapedArray) or not isinstance(found, jax.core.ShapedArray):
            continue
        values = [x for x in operands if is_value(x)]
        other_shape = found.shape != want.shape and not any(x.own_shapes for x in values)
        other_dtype = found.dtype != want.dtype and not any(x.own_dtypes for x in values)
        if not other_shape and not other_dtype:
            continue
        message = (
            f"The rule {rule} must return {want.str_short()}{which}, as `{primitive}` does for operands "
            f"of these types; found {_found(x)}."
        )
        if other_shape:
            values = [x for x in values if x.own_shapes is None and refuses(x)]
            if not values:
                raise RuleError(message)
        names = " or ".join(sorted({type(x).__name__ for x in values}))
        message += (
            f" It is used as it is, since {names} refuses to materialise: there is no array to compare it "
            f"with. If it is meant to have another shape, set `own_shapes = True` on {names}, or else "
            "`own_shapes = False`, which makes it an error."
            if other_shape
            else f" If it is meant to have another dtype, set `own_dtypes = True` on {names}."
        )
        if jax.config.jax_enable_checks:
            raise RuleError(message)
        warn_once(rule, RuleWarning(message))


def _expected(
    primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any] | None:
    """Returns the avals of the primitive's results for arrays with these shapes; None if unknown."""
    try:
        out, _ = primitive.abstract_eval(*map(_aval, operands), **params)
    except Exception:  # the primitive itself may not accept what its rule accepts
        return None
    return out if primitive.multiple_results else [out]


def _found(x: Any) -> str:
    if is_value(x):
        return f"{type(x).__name__} of {aval_of(x).str_short()}"
    return jax.typeof(x).str_short() if eqx.is_array_like(x) else repr(x)
