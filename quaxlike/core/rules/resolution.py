"""Selects the rules for a primitive, and checks their results.

Looking up an entry in the cache must be equivalent to computing it again. The cache is keyed by types alone.
For rules also depending on dtypes, shapes or values, the entry is a `RulesByOperands`, which decides between
them on each call. An entry isn't stored if a rule was registered while it was being computed.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.tree_util as jtu

from .. import compat
from ..functions import type_name
from ..scoped import Scoped
from ..shapes import as_strong, is_weak
from ..values import KINDS, Value, aval_of, is_value, refuses
from .beyond import Lost, keeping, kept_by_others
from .matching import aval_of_operand, depends_on_operands, matches, may_match, more_specific
from .registry import (
    GLOBAL,
    Rule,
    RuleError,
    RuleSet,
    RuleWarning,
    check_keywords,
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
    """Raised if several rules match the operand types, and none is the most specific."""

    __module__ = "quaxlike"


class Resolver:
    """Finds rules in several layers of rule sets, by priority. Results are cached by types."""

    def __init__(self, layers: tuple[RuleSet, ...], made_at: int) -> None:
        self.layers = layers
        self.cache: dict[Any, list[Callable[..., Any]]] = {}
        self.beyond: dict[Any, list[Any]] = {}  # filled by `rules_beyond`
        self._made_at = made_at

    def candidates(self, key: tuple[Any, ...], params: Any = None) -> list[Callable[..., Any]]:
        """Returns the rules for `key`, best first. Each one is only tried if the previous ones returned
        `NotImplemented`.

        A key consists of the primitive, followed by each operand's class if it's a Value, and None otherwise.

        **Raises:** `TypeError` if a rule has one of the primitive's `params` as a positional parameter, or
        `RuleError` if it requires a keyword not among them.
        """
        require_stack_depth()
        primitive, *types = key
        for rule in itertools.chain.from_iterable(layer[primitive] for layer in self.layers):
            check_operands(rule, params or ())
        operands = signature_of(jax.Array if t is None else t for t in types)
        # A type can decide separately for each instance whether rules apply. This requires a function call
        # for every operand, so only check it if a type does.
        may_decline = any(t is not None and t.follows_rules is not Value.follows_rules for t in types)

        def checked(rule: Callable[..., Any]) -> Checked:
            kept = kept_by_others(rule, self.layers, key)
            return Keeping(rule, may_decline, kept) if kept else Checked(rule, may_decline)

        found: list[Callable[..., Any]] = []
        # The rules of earlier layers come first, even if those of later ones are more specific: users can
        # override anything in their own rule sets.
        for layer in self.layers:
            matching = [r for r in layer[primitive] if may_match(r, operands)]
            if params is not None:
                for rule in matching:
                    check_keywords(rule, params)
            if any(map(depends_on_operands, matching)):
                found.append(RulesByOperands(operands, matching, checked))
            else:
                found += map(checked, in_order(primitive, operands, matching))
        with lock:
            if self._made_at == epoch():  # otherwise a rule was registered in the meantime
                self.cache[key] = found
        return found

    def has_rule(self, primitive: jexc.Primitive, *operands: Any) -> bool:
        """Returns whether there may be a rule for these operands."""
        key = (primitive, *(type(x) if is_value(x) else None for x in operands))
        known = self.cache.get(key)
        return bool(self.candidates(key) if known is None else known)


# The rule sets in use. A `quaxify` adds its own rule set while calling the function.
active_layers = Scoped[tuple[RuleSet, ...]]("quaxlike_rules", (GLOBAL,))
use_rule_sets = active_layers.use


def resolver(layers: tuple[RuleSet, ...] = (GLOBAL,)) -> Resolver:
    """Returns the resolver for these rule sets, with all rules registered so far."""
    return _resolver(layers, epoch(), jax.config.jax_enable_checks)


@functools.lru_cache(maxsize=64)  # discards the results for earlier epochs
def _resolver(layers: tuple[RuleSet, ...], at: int, checks: bool) -> Resolver:
    return Resolver(layers, at)


def in_order(
    primitive: jexc.Primitive, operands: "plum.Signature", matching: Sequence[Rule]
) -> list[Callable[..., Any]]:
    order: list[Callable[..., Any]] = []
    while matching:
        # Repeatedly take the most specific rule. The others are needed as well, in case it declines.
        best = [r for r in matching if not any(more_specific(q, r) for q in matching)]
        highest = max(r.signature.precedence for r in best)
        best = [r for r in best if r.signature.precedence == highest]
        if any(r.written is not best[0].written for r in best):
            return [*order, Ambiguity(primitive, operands, best)]
        order.append(best[0])
        # If a function declines these types, don't try any of its other signatures.
        matching = [r for r in matching if r.written is not best[0].written]
    return order


class RulesByOperands:
    """The rules for some operand types, if types alone don't determine which rules match.

    Some rules require certain dtypes or shapes (e.g. jaxtyping's `Float[Array, "n"]`). Others have types
    recognising instances by value rather than by class (plum's `__faithful__ = False`). Either way, the
    actual operands are checked on each call, and only the rules matching them are tried.
    """

    def __init__(
        self,
        types: "plum.Signature",
        rules: Sequence[Rule],
        checked: Callable[[Callable[..., Any]], "Checked"],
    ) -> None:
        self._types = types
        self._rules = rules
        self._checked = checked
        self._orders: dict[tuple[Rule, ...], list[Callable[..., Any]]] = {}

    def matching(self, primitive: jexc.Primitive, operands: Sequence[Any]) -> list[Callable[..., Any]]:
        """Returns the rules for these operands, best first."""
        found = tuple(rule for rule in self._rules if matches(rule, self._types.types, operands))
        if found not in self._orders:
            order = in_order(primitive, self._types, found)
            self._orders[found] = list(map(self._checked, order))
        return self._orders[found]

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        for rule in self.matching(primitive, operands):
            out = rule(primitive, operands, params)
            if out is not NotImplemented:
                return out
        return NotImplemented


@dataclasses.dataclass(frozen=True, eq=False)
class Ambiguity:
    """Several rules without a well-defined order. Raises an error when called."""

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
    """A rule with the checks for its results.

    A check is about as expensive as tracing the primitive. So after a correct result, the rule is trusted
    whenever it's called again with the same parameters. This applies to concrete arrays, to any calls within
    the same trace, and to other traces if the operands have the same shapes and dtypes. (Under
    `jax_enable_checks`, no rule is ever trusted.)

    If `may_decline` is set, each call also checks that the operands follow the rules for their type.
    """

    def __init__(self, rule: Callable[..., Any], may_decline: bool) -> None:
        self.rule = rule
        self._may_decline = may_decline
        # The parameters with a checked result. When tracing, these also include the avals.
        self._right: set[Any] = set()
        self._is_trusted = False  # whether the rule is trusted for any parameters
        # A trace, and the parameters checked in it. While still in this trace, avals aren't compared again.
        self._here: tuple[Callable[[], Any], set[Any]] = (lambda: None), set()

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        if self._may_decline and not all(x.follows_rules() for x in operands if is_value(x)):
            return NotImplemented
        out = self.rule(primitive, operands, params)
        if (kind := KINDS[type(out)]) != "value":  # Values are never weak
            if out is NotImplemented:
                return out
            if getattr(out.aval, "weak_type", False) if kind == "array" else is_weak(out):
                out = as_strong(out, expected_results(primitive, operands, params))
        key: Any = tuple(params.values())
        here, right_here = self._here
        try:
            if here() is compat.current_trace() and key in right_here:
                return out
            hash(key)
        except TypeError:  # unhashable parameters
            key = None
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
        known = key if compat.is_eval_trace(trace) else (key, *map(aval_of_operand, operands))
        if known not in self._right:
            check_results(self.rule, primitive, operands, params, out)
            if len(self._right) >= _MOST_TRUSTED:
                self._right.clear()
            self._right.add(known)
        here, right_here = self._here
        if here() is not trace or len(right_here) >= _MOST_TRUSTED:
            right_here = set()
            # Assign both at once: threads have other traces.
            self._here = weakref.ref(trace), right_here
        right_here.add(key)


_MOST_TRUSTED = 256  # the maximal size of a set of trusted parameters


class Keeping(Checked):
    """A rule for arbitrary types, where a user's rule handles some types alongside arrays.

    The rule redispatches on its own type's parts. If this would materialise a Value the user's rule could
    handle, it declines, and the other operands are materialised instead. Tried only once for operands with
    the same structures, shapes and dtypes.
    """

    def __init__(self, rule: Callable[..., Any], may_decline: bool, kept: tuple[type, ...]) -> None:
        super().__init__(rule, may_decline)
        self._kept = kept
        self._declines: set[Any] = set()
        self.lacked: tuple[str, str] | None = None  # why it declined the first time, for use in messages

    def __call__(self, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
        leaves, structure = jtu.tree_flatten(list(operands))
        form: Any = structure, *map(jax.typeof, leaves), *params.items()
        try:
            if form in self._declines:
                return NotImplemented
        except TypeError:  # unhashable parameters
            form = None
        try:
            with keeping(self._kept):
                return super().__call__(primitive, operands, params)
        except Lost as lost:
            self.lacked = self.lacked or lost.lacking()
            if form is not None and len(self._declines) < _MOST_TRUSTED:
                self._declines.add(form)
            return NotImplemented


def check_results(
    rule: Any, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any
) -> None:
    """Raises a `RuleError` if `out` isn't a valid result.

    If just the dtype differs, this is only a warning.
    """
    expected = expected_results(primitive, operands, params)
    results = out if primitive.multiple_results else [out]
    if not isinstance(results, list | tuple) or (expected is not None and len(results) != len(expected)):
        number = "" if expected is None else f" of {len(expected)} result(s)"
        found = f"one of {len(out)}" if isinstance(out, list | tuple) else _found(out)
        raise RuleError(f"The rule {rule} must return a sequence{number}; found {found}.")
    for i, x in enumerate(results):
        which = f" as result {i}" if primitive.multiple_results else ""
        if not is_value(x) and (isinstance(x, type) or not eqx.is_array_like(x)):
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


def expected_results(
    primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any] | None:
    """Returns the primitive's result avals, for arrays with these shapes. None if unknown."""
    try:
        out, _ = primitive.abstract_eval(*map(aval_of_operand, operands), **params)
    except Exception:  # a rule may support more than its primitive does
        return None
    return out if primitive.multiple_results else [out]


def _found(x: Any) -> str:
    if is_value(x):
        return f"{type(x).__name__} of {aval_of(x).str_short()}"
    return jax.typeof(x).str_short() if eqx.is_array_like(x) else repr(x)
