"""Placeholders: initial values of loops (such as zeros) with a unit not known yet.

For example, a library may accumulate into `jnp.zeros(3)`, which only turns out to be in metres during the
first iteration. This works for every type whose `promote` doesn't need `like`, e.g. quantities with units.
The interpreter calls this module via two hooks (core/plain_arrays.py), empty unless there's a type like this.

Whatever is known about an array is stored by its id, along with a weak reference, because another array may
reuse the id. An incorrect entry could result in a wrong unit, so if in doubt we treat an array as unknown.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import NotImplementedType
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ...core import compat
from ...core.high_level import as_call
from ...core.plain_arrays import Following, Placeholders, hooks, takes_no_like
from ...core.shapes import as_shapes
from ...core.values import Value, is_value, probing

# One of 0, infinity and NaN, but it isn't known which.
OPEN = np.float64("nan")

# The constant filling each array, by id. Entries are removed once their array is garbage collected.
_known: dict[int, tuple[weakref.ref[Any], Any]] = {}

# Primitives that only move elements: each result is filled with the same constant as its operand.
_MOVES = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p device_put expand_dims nonbatchable nontraceable
    optimization_barrier pvary reshape rev slice squeeze stop_gradient transpose""".split()  # noqa: SIM905
)
# If all of these operands are filled with 0, infinity or NaN, then so is the result ...
_ALL: dict[str, slice] = {
    **dict.fromkeys(["abs", "add", "add_any", "neg", "sqrt", "square", "sub", "concatenate"], slice(None)),
    **dict.fromkeys(["conj", "imag", "real", "stack"], slice(None)),
    **dict.fromkeys(["cumsum", "dynamic_slice", "gather", "reduce_max", "reduce_sum"], slice(0, 1)),
    **dict.fromkeys(["dynamic_update_slice", "pad"], slice(0, 2)),
    **dict.fromkeys(["scatter", "scatter-add"], slice(0, None, 2)),
    **dict.fromkeys(["select_n", "select_if_vmap"], slice(1, None)),
}
# ... whereas a single one of these is enough.
_ANY = {"mul": slice(None), "dot_general": slice(None), "div": slice(0, 1)}
# Primitives that call a jaxpr, and the parameter holding it (if there is only one).
_CODE = {
    **dict.fromkeys(["cond", "scan", "while"], ""),
    **dict.fromkeys(["checkpoint", "jit", "pjit", "remat", "remat2"], "jaxpr"),
    **dict.fromkeys(["closed_call", "custom_jvp_call", "custom_vjp_call"], "call_jaxpr"),
}
# Uninitialised buffers: treated as if filled with 0, infinity or NaN.
_UNSET = frozenset(["empty", "empty2"])
# The module of the callback in `eqx.error_if`. It raises rather than returning, so its result can have any
# unit.
_RAISING = "equinox._errors"
# Besides 0, infinity and NaN, only these constants are tracked for more than one equation: 1, which guards
# divisions; and each dtype's largest and smallest number, used in place of infinity and 0. Tracking any
# others would make memoisation unlimited.
_EXTREMES = [
    float(limit)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
    for limit in (jnp.finfo(dtype).max, jnp.finfo(dtype).tiny)
]
_LASTING = frozenset([1.0, *_EXTREMES, *(-limit for limit in _EXTREMES)])
_FOLLOWED = _MOVES | _UNSET | {"pure_callback"} | _ALL.keys() | _ANY.keys() | _CODE.keys()


@functools.cache
def has_placeholders(cls: type[Value]) -> bool:
    """Returns whether `promote` can convert an array to this class without `like`."""
    return (
        takes_no_like(cls)
        and promoted_alone(cls, jax.ShapeDtypeStruct((), jnp.float32)) is not NotImplemented
    )


def promoted_alone(cls: type[Value], aval: Any) -> Value | NotImplementedType:
    """Calls `promote` without `like`. The result's leaves are shapes rather than arrays."""
    value: Any = NotImplemented

    def promote(array: jax.Array) -> None:
        nonlocal value
        value = cls.promote(array, None)
        if value is not NotImplemented:
            value = as_shapes(value)

    with probing():
        jax.eval_shape(promote, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return value


def holds_type_with_placeholders(value: Value) -> bool:
    """Returns whether the type of a Value, or of any Value nested inside it, has placeholders."""
    cls: Any = type(value)
    if has_placeholders(cls):
        return True
    parts = jtu.tree_leaves(value, is_leaf=lambda x: x is not value and is_value(x))
    return any(is_value(x) and holds_type_with_placeholders(x) for x in parts)


def follow(primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any) -> None:
    """Records what is known about `out`, the result of applying `primitive` to plain operands."""
    name, params = as_call(primitive, params)
    if name not in _FOLLOWED:
        return
    outs = out if primitive.multiple_results else [out]
    numbers = _results(name, list(map(constant_of, operands)), params)
    for y, number in zip(outs, numbers, strict=False):
        if number is not None:
            note_constant(y, number)


def _results(name: str, numbers: Sequence[Any], params: dict[str, Any]) -> Iterable[Any]:
    """Returns the constant filling each result, given those filling the operands.

    An unknown constant is None. There may be more entries than results.
    """
    if name in _MOVES:
        return numbers
    if name in _UNSET:
        return itertools.repeat(OPEN)
    if name == "pure_callback":
        function = getattr(params["callback"], "callback_func", None)
        return itertools.repeat(OPEN) if getattr(function, "__module__", None) == _RAISING else ()
    if name in _CODE:
        return _results_of_code(name, list(map(_lasting, numbers)), params)
    if name == "scatter" and params["update_jaxpr"] is not None:  # `at[...].apply` calls any function
        return ()
    among, matter = (all, numbers[_ALL[name]]) if name in _ALL else (any, numbers[_ANY[name]])
    if not among(map(_is_placeholder, matter)):
        return ()
    return [0 if among(n is not None and n == 0 for n in matter) else OPEN]


def _is_placeholder(number: Any) -> bool:
    return number is not None and bool(number == 0 or not np.isfinite(number))


def _lasting(number: Any) -> Any:
    """Returns what to track for more than one equation, which may be less specific."""
    if number is None:
        return None
    if _is_placeholder(number):
        return 0 if number == 0 else OPEN
    number = complex(number)  # avoids warnings for half precision
    return number.real if number in _LASTING else None


def _results_of_code(name: str, numbers: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    if name == "cond":
        return functools.reduce(_elementwise, (_results_of(b, numbers[1:]) for b in params["branches"]))
    if name == "while":
        at = params["cond_nconsts"]
        start = at + params["body_nconsts"]

        def body(carry: Any) -> Any:
            return _results_of(params["body_jaxpr"], [*numbers[at:start], *carry])

        return _fixed_point(body, numbers[start:])
    if name == "scan":
        n_consts, n_carry = compat.scan_arity(params)
        consts, xs = numbers[:n_consts], numbers[n_consts + n_carry :]

        def step(carry: Any) -> Any:
            return _results_of(params["jaxpr"], [*consts, *carry, *xs])

        carry = _fixed_point(lambda carry: step(carry)[:n_carry], numbers[n_consts : n_consts + n_carry])
        return [*carry, *step(carry)[n_carry:]]
    return _results_of(params[_CODE[name]], numbers)


def _elementwise(xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    return list(map(either, xs, ys))


def _fixed_point(body: Callable[[Sequence[Any]], Sequence[Any]], carry: Sequence[Any]) -> Sequence[Any]:
    """Returns the constants filling a loop's carry, regardless of the number of iterations."""
    # This terminates, because each iteration can only make constants less specific.
    while (after := _elementwise(carry, body(carry))) != carry:
        carry = after
    return carry


def _results_of(jaxpr: Any, numbers: Sequence[Any]) -> Sequence[Any]:
    """Returns the constants filling a jaxpr's results."""
    jaxpr = compat.closed(jaxpr)
    known = _known_results(jaxpr)
    key = tuple(numbers)
    if key not in known:
        known[key] = _interpret(jaxpr, numbers)
    return known[key]


def _interpret(jaxpr: compat.ClosedJaxpr, numbers: Sequence[Any]) -> Sequence[Any]:
    opened = compat.open_jaxpr(jaxpr)
    of = dict(zip(compat.all_invars(opened), [*map(constant_of, jaxpr.consts), *numbers], strict=True))

    def read(atom: Any) -> Any:
        return constant_of(atom.val) if isinstance(atom, jexc.Literal) else of.get(atom)

    for eqn in opened.eqns:
        name, params = as_call(eqn.primitive, eqn.params)
        found = _results(name, list(map(read, eqn.invars)), params) if name in _FOLLOWED else ()
        of.update(zip(eqn.outvars, found, strict=False))
    return list(map(read, opened.outvars))


@compat.weakly_cached
def _known_results(jaxpr: compat.ClosedJaxpr) -> dict[Any, Sequence[Any]]:
    return {}


def note_constant(array: Any, number: Any) -> None:
    """Records that all elements of `array` are equal to `number`."""
    if isinstance(array, jax.Array):
        at = id(array)
        _known[at] = (weakref.ref(array, lambda _: _known.pop(at, None)), number)


def constant_of(x: Any) -> Any:
    """Returns the constant filling `x`: a number, or `OPEN` for one of 0, infinity and NaN, or None if
    unknown.
    """
    found = _known.get(id(x))
    if found is not None and found[0]() is x:
        return found[1]
    if isinstance(x, Tracer) or is_value(x) or np.ndim(x) or _is_extended(x):
        return None
    return np.asarray(x)[()]


def _is_extended(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def may_be_placeholder(x: Any) -> bool:
    """Returns whether all elements are known to be 0, infinity or NaN.

    This is accepted in place of an array with any unit, e.g. for a buffer that hasn't been written yet.
    """
    return _is_placeholder(constant_of(x))


def is_open(x: Any) -> bool:
    """Returns whether `x` is known to be filled with 0, infinity or NaN, but not with which."""
    return constant_of(x) is OPEN


# Slots of plain arrays filled with a known number -------------------------------------------------


def same(a: Any, b: Any) -> bool:
    """Returns whether two constants (each of them a number, `OPEN` or None) are the same."""
    return a is b or a == b


def either(a: Any, b: Any) -> Any:
    """Returns what is known about an array filled with either `a` or `b`, as after a `cond`."""
    if same(a, b):
        return a
    return OPEN if _is_placeholder(a) and _is_placeholder(b) else None


def marked(slots: Sequence[Any], operands: Sequence[Any], beside: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Returns the slots of `operands`, including any constants known to fill plain arrays.

    As an optimisation, only looks for constants if a type in these slots, or in `beside`, has placeholders.
    """
    known = any(has_placeholders(c) for s in (*slots, *beside) for c in s.classes)
    return tuple(map(_with_constant, slots, operands) if known else slots)


def starts(slots: Sequence[Any], operands: Sequence[Any], beside: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a loop carry's slots, for the initial values `operands`."""
    return tuple(map(_as_carry, marked(slots, operands, beside)))


def start(slot: Any, x: Any) -> Any:
    """Returns a loop carry's slot, for the initial value `x`."""
    return _as_carry(_with_constant(slot, x))


def _with_constant(slot: Any, x: Any) -> Any:
    """Adds the constant known to fill `x` to its slot, if it's a plain array."""
    if slot.treedef is not None or not _has_dtype(slot.avals[0], jnp.number):
        return slot
    return dataclasses.replace(slot, constant=_lasting(constant_of(x)))


def _as_carry(slot: Any) -> Any:
    """Returns a loop carry's slot, given the slot of its initial value.

    The carry can change in each iteration, so this only keeps whether it starts as a placeholder. (Counters
    also start at zero, but integers aren't placeholders.)
    """
    if slot.constant is None:
        return slot
    is_open = _is_placeholder(slot.constant) and _has_dtype(slot.avals[0], jnp.inexact)
    return dataclasses.replace(slot, constant=OPEN if is_open else None)


def _has_dtype(aval: Any, kind: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, kind)  # tokens don't have a dtype


def _guessed(slot: Any, cls: type[Value]) -> Any:
    """Returns a slot of type `cls` with unknown statics, if this slot is a placeholder."""
    if not _is_placeholder(slot.constant):
        return slot
    value = promoted_alone(cls, slot.avals[0])
    if value is NotImplemented:
        return slot
    return dataclasses.replace(slot, treedef=jtu.tree_structure(value), constant=None)


def without_guess(slot: Any) -> Any:
    """Inverts `_guessed`: returns the slot of a plain array. Other slots are returned unchanged."""
    may_be_one = len(slot.avals) == 1 and slot.treedef is not None
    if not may_be_one or not has_placeholders(slot.cls):
        return slot
    plain = dataclasses.replace(slot, treedef=None, constant=OPEN)
    return plain if _guessed(plain, slot.cls) == slot else slot


def with_revealed_types(
    init: Sequence[Any],
    carry: tuple[Any, ...],
    results_for: Callable[[Sequence[Any]], Sequence[Any]],
    cls: type[Value],
    unify: Callable[[Any, Any, str], Any],
) -> tuple[Any, ...] | None:
    """Lifts plain arrays in a loop carry if they turn out to be Values.

    Libraries initialise loops with placeholders such as `jnp.zeros`, which may turn into metres in the first
    iteration. Starting without any assumptions about these, this traces an iteration repeatedly, inferring
    their types until they no longer change.

    **Arguments:**

    - `init`, `carry`: the initial values of the loop, and their slots.
    - `results_for`: returns the slots after an iteration, given the slots before it.
    - `cls`: the type required by some operation in the loop.

    **Returns:** the carry's slots; None if none of the plain arrays are Values.
    """
    guesses = tuple(_guessed(start(slot, x), cls) for slot, x in zip(carry, init, strict=True))

    def tells(a: Any, b: Any, plain_tells: bool) -> bool:
        is_plain = b.treedef is None and plain_tells and not _is_placeholder(b.constant)
        return without_guess(a) is not a and (is_plain or (b.treedef is not None and without_guess(b) is b))

    for plain_tells in (False, True):  # whether a plain result implies that the carry is a plain array
        known, before = guesses, None
        while known != before:
            before, after = known, results_for(known)
            known = tuple(
                unify(without_guess(a), b, "A loop's carry") if tells(a, b, plain_tells) else a
                for a, b in zip(before, after, strict=False)
            )
        lifted = tuple(map(without_guess, known))
        if not all(a.has_structure_of(b) for a, b in zip(lifted, carry, strict=True)):
            return lifted
    return None


hooks.following = Following(holds_type_with_placeholders, has_placeholders, follow)
hooks.placeholders = Placeholders(
    marked=marked,
    starts=starts,
    start=start,
    revealed=with_revealed_types,
    without_guess=without_guess,
    either=either,
    note=note_constant,
)
