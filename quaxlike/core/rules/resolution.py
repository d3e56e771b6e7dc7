"""The choice of a rule for a primitive, by the types of its operands, and the checks of its results."""

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
from ..values import KINDS, Value, aval_of, is_value
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
    type_name,
    warn_once,
)

if TYPE_CHECKING:
    import plum


class AmbiguousRuleError(RuleError, LookupError):
    """Several rules match the types of the operands, and none is more specific than the others."""

    __module__ = "quaxlike"


class Resolver:
    """The rules of a stack of rule sets, in the order in which they are tried, cached by types."""

    def __init__(self, layers: tuple[RuleSet, ...], made_at: int) -> None:
        self.layers = layers
        self.cache: dict[Any, list[Callable[..., Any]]] = {}
        self._made_at = made_at

    def candidates(self, key: tuple[Any, ...], params: Collection[str] = ()) -> list[Callable[..., Any]]:
        """The rules for `key`: a primitive, followed by one entry for each operand, the class of a Value or
        None for anything else. Best first; each is tried if the one before returned `NotImplemented`.

        **Raises:** `TypeError` for a rule that takes one of the primitive's `params` by position.
        """
        require_stack_depth()
        primitive, *types = key
        for rule in itertools.chain.from_iterable(layer[primitive] for layer in self.layers):
            check_operands(rule, params)
        operands = signature_of(jax.Array if t is None else t for t in types)
        found: list[Callable[..., Any]] = []
        for layer in self.layers:
            if not any(map(_has_value_dependent_type, layer[primitive])):
                matching = [r for r in layer[primitive] if operands <= r.signature]
                found += in_order(primitive, operands, matching)
            else:
                found.append(ValueDependentRules(operands, layer[primitive]))
        may_decline = any(t is not None and t.follows_rules is not Value.follows_rules for t in types)
        found[:] = [Checked(rule, may_decline) for rule in found]
        with lock:
            if self._made_at == epoch():  # else a rule was registered in the meantime
                self.cache[key] = found
        return found


# The rule sets in force in this context; a `quaxify` adds its own while it calls its function.
active_layers: contextvars.ContextVar[tuple[RuleSet, ...]] = contextvars.ContextVar(
    "quaxlike_rules", default=(GLOBAL,)
)


# The same, as a setting that is part of the keys of JAX's caches: a function that was traced under other
# layers is traced again.
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
    """The resolver for these layers, as of the last registration."""
    return _resolver(layers, epoch(), jax.config.jax_enable_checks)


@functools.lru_cache(maxsize=64)  # those of earlier epochs drop out
def _resolver(layers: tuple[RuleSet, ...], at: int, checks: bool) -> Resolver:
    return Resolver(layers, at)


def in_order(
    primitive: jexc.Primitive, operands: "plum.Signature", matching: list[Rule]
) -> list[Callable[..., Any]]:
    order: list[Callable[..., Any]] = []
    while matching:
        best = [r for r in matching if not any(more_specific(q, r) for q in matching)]
        highest = max(r.signature.precedence for r in best)
        best = [r for r in best if r.signature.precedence == highest]
        if len(best) > 1:
            return [*order, Ambiguity(primitive, operands, best)]
        order += best
        # A function that declines these types also declines them under a less specific signature.
        matching = [r for r in matching if r.written is not best[0].written]
    return order


@dataclasses.dataclass(frozen=True, eq=False)
class ValueDependentRules:
    """Stands for the rules of a primitive if some are for types that are recognised by the value, not the
    class, of an operand (plum's `__faithful__ = False`). Each call tries those that match its operands."""

    operands: "plum.Signature"
    rules: Sequence[Rule]

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        types = self.operands.types

        def matches(rule: Rule) -> bool:
            if not _has_value_dependent_type(rule):
                return self.operands <= rule.signature
            if not rule.signature.has_varargs and len(rule.signature.types) != len(types):
                return False
            hints = rule.signature.expand_varargs(len(types))
            return all(_is_of(x, t, hint) for x, t, hint in zip(operands, types, hints, strict=True))

        matching = [r for r in self.rules if matches(r)]
        for rule in in_order(primitive, self.operands, matching):
            out = Checked(rule, may_decline=False)(primitive, operands, params)
            if out is not NotImplemented:
                return out
        return NotImplemented


def _has_value_dependent_type(rule: Rule) -> bool:
    """Whether the signature of a rule has a type whose instances are recognised by their value."""
    signature = rule.signature
    hints = (*signature.types, signature.varargs) if signature.has_varargs else signature.types
    return not signature.is_faithful and any(map(_is_value_dependent, hints))


def _is_value_dependent(hint: Any) -> bool:
    import plum

    members = typing.get_args(hint)
    if members and not isinstance(hint, type):
        return any(map(_is_value_dependent, members))
    if not isinstance(hint, type) or not issubclass(hint, Value):
        return False
    if isinstance(hint, plum.CovariantMeta):  # it tells instances as the class does of which it is made
        hint = next(cls for cls in hint.__mro__ if not isinstance(cls, plum.CovariantMeta))
    return not plum.is_faithful(hint)


def _is_of(x: Any, type_: Any, hint: Any) -> bool:
    """Whether an operand that counts as a `type_` in dispatch is of the annotated type."""
    signature = signature_of([hint])
    by_value = isinstance(x, Value) and _is_value_dependent(hint)
    return signature.match((x,)) if by_value else signature_of([type_]) <= signature


def more_specific(a: Rule, b: Rule) -> bool:
    return a.signature <= b.signature and not b.signature <= a.signature


@dataclasses.dataclass(frozen=True, eq=False)
class Ambiguity:
    """Stands in for rules whose order is undecided; raises the error when it is called."""

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
    """A rule for operands of certain types, together with the checks of its results.

    A check costs about as much as tracing the primitive. A rule that has returned a correct result is trusted
    with the same parameters from then on: for concrete arrays, within one trace, and in other traces for
    operands of the same shapes and dtypes. Under `jax_enable_checks` it is never trusted.

    If `may_decline`, each call checks whether the operands follow the rules of their type.
    """

    def __init__(self, rule: Callable[..., Any], may_decline: bool) -> None:
        self.rule = rule
        self._may_decline = may_decline
        self._right: set[Any] = set()  # trusted parameters; with avals, while tracing
        self._is_trusted = False  # with any parameters
        # A trace, and the parameters that are trusted there.
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


_MOST_TRUSTED = 256  # entries of a set of trusted parameters


def _aval(x: Any) -> Any:
    return aval_of(x) if KINDS[type(x)] == "value" else jax.typeof(x)


def check_results(
    rule: Any, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any
) -> None:
    """Raises a `RuleError` if `out` cannot be the result of `primitive`; only warns if its dtype differs."""
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
        own_dtypes = any(is_value(x) and x.own_dtypes for x in operands)
        if found.shape != want.shape or (found.dtype != want.dtype and not own_dtypes):
            message = (
                f"The rule {rule} must return {want.str_short()}{which}, as `{primitive}` does for operands "
                f"of these types; found {_found(x)}."
            )
            if found.shape != want.shape:
                raise RuleError(message)
            names = sorted({type(x).__name__ for x in operands if is_value(x)})
            message += (
                f" If it is meant to have another dtype, set `own_dtypes = True` on {' or '.join(names)}."
            )
            if jax.config.jax_enable_checks:
                raise RuleError(message)
            warn_once(rule, RuleWarning(message))


def _expected(
    primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any] | None:
    """The avals that the primitive returns for arrays of these shapes; None if they are unknown."""
    try:
        out, _ = primitive.abstract_eval(*map(_aval, operands), **params)
    except Exception:  # the primitive itself may not take types that its rule does
        return None
    return out if primitive.multiple_results else [out]


def _found(x: Any) -> str:
    if is_value(x):
        return f"{type(x).__name__} of {aval_of(x).str_short()}"
    return jax.typeof(x).str_short() if eqx.is_array_like(x) else repr(x)
