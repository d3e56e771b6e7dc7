"""What happens if no rule matches: call `default`, or materialise under the policy.

Values must never be materialised unnoticed, or nobody could rely on `on_materialise("error")`. So
materialising for lack of a rule must go through `_densify`, which raises, warns or records.

The mode must also be part of JAX's cache keys (see `_jit_mode`). A function traced under "allow" has to be
traced again under "error": the cached program would materialise silently.
"""

import contextlib
import contextvars
import dataclasses
import math
import operator
import threading
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu

from . import compat, recording
from .recording import describe, in_bytes, user_source
from .rules import (
    Beyond,
    Keeping,
    Lost,
    Rule,
    active_layers,
    expected_results,
    fits,
    kept,
    require_stack_depth,
    resolver,
    rules_beyond,
)
from .shapes import as_strong, is_weak
from .statics import are_of_same_types, statics_of
from .values import ArrayValue, Value, aval_of, is_value, materialised, probing

Mode = Literal["allow", "warn", "error"]
_MODES: tuple[Mode, ...] = typing.get_args(Mode)  # from most to least permissive


class MaterialisationError(RuntimeError):
    """A Value would have been materialised where this is not allowed."""

    __module__ = "quaxlike"


class MaterialisationWarning(UserWarning):
    """A Value was materialised because no rule covers the operation applied to it."""

    __module__ = "quaxlike"


class on_materialise(contextlib.ContextDecorator):
    """Sets what happens in this context if a Value has to be materialised for lack of a rule.

    Use it as a context manager or as a decorator. It overrides the class attribute `on_materialise`, and the
    innermost one takes precedence. It is local to the current thread and context: every asyncio task has its
    own. (A thread running in a copied context, as with `asyncio.to_thread`, has to enter its own.)

    This happens when tracing: a jitted function is traced once for each mode, and doesn't warn or raise after
    that. Inside `quaxify`, JAX traces the body of a jitted function, loop or branch before we dispatch it. So
    entering another mode inside such a body has no effect: enter it around the call.

    **Arguments:**

    - `mode`: `"allow"`, `"warn"` (a [`quaxlike.MaterialisationWarning`][], once per call site) or `"error"`
        (a [`quaxlike.MaterialisationError`][]).

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        with ql.on_materialise("error"):
            ql.quaxify(jnp.sum)(jnp.ones(3))  # nothing to materialise
        ```
    """

    def __init__(self, mode: Mode) -> None:
        if mode not in _MODES:
            raise ValueError(f"on_materialise takes one of {_MODES}; found {mode!r}.")
        self.mode: Mode = mode
        self.warned: set[Any] = set()  # call sites already warned about

    def __enter__(self) -> None:
        _count(1)
        entered.set((*entered.get(), self))

    def __exit__(self, *_: object) -> None:
        # Not necessarily the innermost one: an abandoned generator only exits once it is garbage collected.
        stack = entered.get()
        if stack and stack[-1] is self:
            entered.set(stack[:-1])  # before any calls, which may fail at the recursion limit
        else:
            at = max((i for i, policy in enumerate(stack) if policy is self), default=len(stack))
            entered.set(stack[:at] + stack[at + 1 :])
        _count(-1)


probing.asides.append(lambda: on_materialise("allow"))

entered: contextvars.ContextVar[tuple[on_materialise, ...]] = contextvars.ContextVar(
    "on_materialise", default=()
)


def policy_key() -> Mode | None:
    """Returns the current mode, which must be part of every cached jaxpr's key."""
    stack = entered.get()
    return stack[-1].mode if stack else None


# The mode, as part of JAX's cache keys: in a different mode, `jax.jit(quaxify(f))` is traced again, and
# reports what it materialises. The keys use thread-local settings, but asyncio tasks on the same thread may
# have different modes. So the setting is an object that only looks up the mode when JAX hashes it.
_jit_mode = jax.make_user_context(None)
_n_entered = 0  # in all contexts together
_enter_lock = threading.Lock()


def _count(more: int) -> None:
    """Sets the key for JAX's caches if there's a policy in any context.

    Otherwise leaves it unset: a key slows down JAX's fast path for jitted functions.
    """
    global _n_entered
    with _enter_lock:
        _n_entered += more
        mode = compat.DecidedLate(_jit_mode, policy_key) if _n_entered else None
        compat.set_user_context(_jit_mode, mode)


# Materialising under the policy -------------------------------------------------------------------


def dense(value: Any, what: str, operands: Sequence[Any] | None = None, *, hint: str = "") -> Any:
    """Materialises a Value, under the policy. Anything else is returned unchanged.

    **Arguments:**

    - `what`: the primitive, or a phrase such as "bool()".
    - `operands`: all of the primitive's operands, for use in the message. Default: just `value`.
    - `hint`: the reason, or what to do about it. Default: register a rule for the primitive `what`.
    """
    if not is_value(value):
        return value
    return _densify([value], what, [value] if operands is None else operands, hint)[0]


def dense_operands(
    primitive: jexc.Primitive, operands: Sequence[Any], positions: Sequence[int] | None = None
) -> list[Any]:
    """Materialises all operands, or just those in `positions`, under the policy."""
    arrays = list(operands)
    positions = range(len(arrays)) if positions is None else positions

    def densify(values: list[Value]) -> list[Any]:
        return _densify(values, primitive.name, operands, "")

    for i, x in zip(positions, map_values(densify, [operands[i] for i in positions]), strict=True):
        arrays[i] = x
    return arrays


def by_default(trace: Any, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    """Computes the result if no rule matches.

    First tries the `default` of operand types overriding it, then a rule matching after materialising just
    some operands. As a last resort, materialises them all.
    """
    # Types inheriting the same `default` aren't ambiguous, so use the function as the key.
    overriding = {type(v).default: type(v) for v in operands if is_value(v)}
    overriding.pop(Value.default, None)
    if len(overriding) > 1:
        highest = max(cls.default_precedence for cls in overriding.values())
        overriding = {d: cls for d, cls in overriding.items() if cls.default_precedence == highest}
    if len(overriding) > 1:
        names = ", ".join(sorted(cls.__name__ for cls in overriding.values()))
        raise TypeError(
            f"No rule for `{primitive}` matches, and its operands {names} each have a `default` of "
            "their own. Register a rule for this combination of types, or give one a `default_precedence`."
        )
    for default, cls in overriding.items():
        if (recorder := recording.active()) is not None:
            recorder.by_default_of(cls)
        if (out := default(primitive, operands, params)) is not NotImplemented:
            weak = not is_value(out) and is_weak(out)
            return as_strong(out, expected_results(primitive, operands, params)) if weak else out
    if (found := _rule_beyond(trace, primitive, operands)) is not None:
        some = dense_operands(primitive, operands, found.positions)
        names = dict.fromkeys(type(operands[i]).__name__ for i in found.positions)
        recording.note(f"only {' and '.join(names)} is made dense")
        return trace.dispatch(primitive, some, params)
    # JAX's functions make all operands vary over the same mesh axes, but `bind` doesn't.
    arrays = compat.vary_alike(dense_operands(primitive, operands))
    return primitive.bind(*arrays, **primitive.get_bind_params(params))


def _rule_beyond(trace: Any, primitive: jexc.Primitive, operands: Sequence[Any]) -> Beyond | None:
    """Finds a rule matching after materialising some operands.

    Prefers not to materialise any that refuse.
    """
    types = [type(x) if is_value(x) else None for x in operands]
    if sum(t is not None for t in types) < 2:
        return None
    if not (rules := rules_beyond(trace.resolver, (primitive, *types))):
        return None
    once = _first_positions(operands)

    def keeps_twins_together(rule: Beyond) -> bool:
        # Treat both occurrences of a Value in the same way: see `map_values`.
        made_dense = {once[i] for i in rule.positions}
        return made_dense.isdisjoint(once[i] for i in once if i not in rule.positions)

    rules = [rule for rule in rules if keeps_twins_together(rule) and rule.applies_to(operands)]
    return min(rules, key=lambda r: _strictest([operands[i] for i in r.positions]) == "error", default=None)


def map_values(f: Callable[[list[Value]], Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
    """Applies `f` to the Values among `operands`.

    A Value occurring twice is only passed to `f` once. The compiler may fuse two copies differently, so that
    their last digits differ. Then `x != x`, the usual test for NaN, could be true for ordinary numbers.
    """
    first = _first_positions(operands)
    once = list(dict.fromkeys(first.values()))
    made = dict(zip(once, f([operands[i] for i in once]), strict=True))
    return [made[first[i]] if i in first else x for i, x in enumerate(operands)]


def _first_positions(operands: Sequence[Any]) -> dict[int, int]:
    """Maps each position of a Value to the first position of the same Value."""
    flat = {i: (*jtu.tree_flatten(x), statics_of(x)) for i, x in enumerate(operands) if is_value(x)}
    return {i: next(j for j in flat if _are_one(flat[j], flat[i])) for i in flat}


def _are_one(x: tuple[Any, ...], y: tuple[Any, ...]) -> bool:
    """Returns whether two flattened Values have identical arrays as well as equal statics."""
    same_leaves = len(x[0]) == len(y[0]) and all(map(operator.is_, x[0], y[0]))
    return same_leaves and x[1] == y[1] and are_of_same_types(x[2], y[2])


def _densify(values: Sequence[Value], what: str, operands: Sequence[Any], hint: str) -> list[Any]:
    event = _Materialisation(values, what, operands, hint)
    event.happens(policy_key() or _strictest(values))
    if (recorder := recording.active()) is not None:
        return [_materialised_or_stand_in(v, recorder) for v in values]
    try:
        return [materialised(v) for v in values]
    except Exception as error:
        if not any(note.startswith(_WHEN) for note in getattr(error, "__notes__", ())):  # already added
            error.add_note(f"{_WHEN}\n{event.message()}")
        raise


_WHEN = "Raised when it had to be materialised, by"


def _strictest(values: Sequence[Value]) -> Mode:
    """Returns the strictest policy among all types, including types nested inside them."""
    found: set[Mode] = {"allow"}
    for x in _with_nested(values):
        if (mode := x.on_materialise) is None:
            continue
        if mode not in _MODES:
            raise ValueError(
                f"`on_materialise` of {type(x).__name__} must be None or one of {_MODES}; found {mode!r}."
            )
        found.add(mode)
    # If one type forbids what another one allows, the stricter one takes precedence.
    return max(found, key=_MODES.index)


def _with_nested(values: Sequence[Any]) -> Iterator[Value]:
    """Returns these Values, followed by those nested inside them."""
    for x in filter(is_value, values):
        yield x
        yield from _with_nested(jtu.tree_leaves(x, is_leaf=lambda y, x=x: y is not x and is_value(y)))


def _materialised_or_stand_in(value: Value, recorder: Any) -> Any:
    """As `materialised`, but goes on if a type refuses while `explain` traces shapes."""
    try:
        return materialised(value)
    except Exception as error:
        aval = aval_of(value)
        recorder.note(f"{type(value).__name__}.materialise raises {type(error).__name__}: {error}")
        # Zeros can stand in for any array, except for keys.
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            raise
        return jnp.zeros(aval.shape, aval.dtype)


# Messages -----------------------------------------------------------------------------------------

_OF_ANY_NUMBER = ("concatenate", "sort", "optimization_barrier")  # primitives with arbitrarily many operands
_warned_for_types: set[Any] = set()
_warned_lock = threading.Lock()


@dataclasses.dataclass
class _Materialisation:
    """A single materialisation, with the message reporting it."""

    values: Sequence[Value]
    what: str
    operands: Sequence[Any]
    hint: str

    @property
    def size(self) -> int:
        return sum(map(_logical_bytes, self.values))

    def happens(self, mode: Mode) -> None:
        """Raises, warns or records this materialisation."""
        if any(isinstance(v, kept.get()) for v in self.values):
            raise Lost(self.lacking)
        if (recorder := recording.active()) is not None:
            notes = [] if mode == "allow" else [f'on_materialise "{mode}"']
            recorder.record_materialisation(self.what, self.operands, self.size, self.remedy, notes)
        elif mode == "error":
            raise MaterialisationError(self.message())
        elif mode == "warn":
            self.warn()

    def lacking(self) -> tuple[str, str]:
        """Returns the operation with its operands, and the rule to write for it."""
        return f"{self.what} of ({', '.join(map(describe, self.operands))})", self.remedy

    def message(self, *, happened: bool = False) -> str:
        """Says what is materialised, where, why, and what to do about it."""
        source, through = user_source()
        types = ", ".join(map(describe, self.operands))
        why = "" if self.hint else f"no rule for ({types}); "
        dense_ones = " and ".join(
            dict.fromkeys(describe(v) if self.hint else type(v).__name__ for v in self.values)
        )
        made = "was made dense" if happened else "would be made dense"
        return "\n".join(
            [
                f"{self.what}: {why}{dense_ones} {made}, {in_bytes(self.size)},",
                f"  at {source}" + (f", which calls {through}" if through else ""),
                *(f"  nearest rule: {rule}" for rule in self._nearest()),
                *(f"  {line}" for line in self.remedy.splitlines()),
                f"  {self._on_purpose(happened)}",
            ]
        )

    def _on_purpose(self, happened: bool) -> str:
        """Says how to materialise on purpose.

        This is the `to_materialise` of these types, or "allow" by default.
        """
        strict = [v.to_materialise for v in _with_nested(self.values) if v.on_materialise == "error"]
        if instead := " ".join(dict.fromkeys(filter(None, strict))):
            return instead
        allow = '`with quaxlike.on_materialise("allow")`'
        return f"To silence this: {allow}." if happened else f"To let it happen: {allow}."

    @property
    def remedy(self) -> str:
        """The rule the type's author could write."""
        if self.hint:
            return self.hint
        if declined := [rule for misfit, rule in self._ranked() if not misfit]:
            if (lacked := self._lacked_by(declined[0])) is not None:
                return f"A rule declined, since it needs one for {lacked[0]}:\n  {declined[0]}\n{lacked[1]}"
            return (
                f"To keep the type, have the rule that declined return a result for these operands:\n"
                f"  {declined[0]}\n"
                "or write one in a `quaxlike.RuleSet`, whose rules are tried first."
            )
        types = [type(x).__name__ if is_value(x) else "jax.Array" for x in self.operands]
        names = [*"xyzuvw", *(f"x{i}" for i in range(6, len(self.operands)))]
        operands = ", ".join(f"{name}: {t}" for name, t in zip(names, types, strict=False))
        if self.what in _OF_ANY_NUMBER:
            operands = f"*xs: {' | '.join(dict.fromkeys(types))}"
        return (
            f'To keep the type, write a rule:\n  @quaxlike.register("{self.what}")\n'
            f"  def _({operands}, **params): ..."
        )

    def _lacked_by(self, declined: Rule) -> tuple[str, str] | None:
        """If a rule for arbitrary types declined, returns the operation for which it couldn't find a rule."""
        key = (declined.primitive, *(type(x) if is_value(x) else None for x in self.operands))
        rules = resolver(active_layers.get()).cache.get(key, ())
        return next((r.lacked for r in rules if isinstance(r, Keeping) and r.rule is declined), None)

    def _nearest(self) -> list[Rule]:
        """Returns at most two nearly matching rules for the primitive; none if a rule declined.

        Leaves out our own rules for other types: which ones exist depends on the modules loaded.
        """
        ranked = self._ranked()
        if not all(misfit for misfit, _ in ranked):
            return []
        return [rule for _, rule in ranked if not (rule.is_ours and self._is_others(rule))][:2]

    def _ranked(self) -> list[tuple[int, Rule]]:
        """Returns the rules for the primitive, each with its number of operands that don't match.

        Matching rules come first, then rules for the operands' own types, then those fitting best.
        """
        require_stack_depth()
        types = [type(x) if is_value(x) else jax.Array for x in self.operands]

        def misfit(rule: Rule) -> int:
            if not rule.signature.has_varargs and len(rule.signature.types) != len(types):
                return len(types) + 1
            return sum(
                not fits(rule, i, x, t) for i, (x, t) in enumerate(zip(self.operands, types, strict=True))
            )

        rules = [r for layer in active_layers.get() for r in layer if r.primitive.name == self.what]
        ranked = [(misfit(rule), rule) for rule in rules]
        return sorted(ranked, key=lambda entry: (bool(entry[0]), self._is_others(entry[1]), entry[0]))

    def _is_others(self, rule: Rule) -> bool:
        """Returns whether a rule isn't for any operand's own type."""
        bases = {cls for x in self.operands if is_value(x) for cls in type(x).__mro__}
        hints = (*rule.signature.types, *([rule.signature.varargs] if rule.signature.has_varargs else []))
        named = {t for hint in hints for t in (typing.get_args(hint) or (hint,))}
        return named.isdisjoint(bases.difference(ArrayValue.__mro__))

    def warn(self) -> None:
        """Warns at a line of the user's code, once for each call site, primitive, and operand types."""
        source, _ = user_source()
        site = source, self.what, tuple(map(type, self.operands))
        stack = entered.get()
        # Each context issues its own warnings. Outside any context, warn once per process.
        warned = stack[-1].warned if stack else _warned_for_types
        with _warned_lock:
            if site in warned:
                return
            warned.add(site)
        warnings.warn_explicit(
            MaterialisationWarning(self.message(happened=True)), None, source.file, source.line
        )


def _logical_bytes(value: Value) -> int:
    aval = aval_of(value)
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)
