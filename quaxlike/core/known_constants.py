"""Plain arrays that are known to be filled with one number, such as the zeros that a library starts from.

A plain array is never boxed, so what is known of it is kept in a table for as long as it lives. Constants are
tracked only inside a `quaxify` that holds a Value of a type with placeholders, such as a quantity in a unit.
"""

import dataclasses
import functools
import inspect
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

from . import compat
from .values import KINDS, Value, as_shapes, is_value, probing

# Stands for the number if it is 0, infinity or NaN, but it is not known which.
OPEN = np.float64("nan")

_known: dict[int, tuple[weakref.ref[Any], Any]] = {}

# Primitives each of whose results holds only elements of the operand at the same position.
_MOVES = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p device_put expand_dims nonbatchable nontraceable
    optimization_barrier pvary reshape rev slice squeeze stop_gradient transpose""".split()  # noqa: SIM905
)
# Which operands must all be filled with 0, infinity or NaN for the result to be so ...
_ALL: dict[str, slice] = {
    **dict.fromkeys(["abs", "add", "add_any", "neg", "sqrt", "square", "sub", "concatenate"], slice(None)),
    **dict.fromkeys(["conj", "imag", "real", "stack"], slice(None)),
    **dict.fromkeys(["cumsum", "dynamic_slice", "gather", "reduce_max", "reduce_sum"], slice(0, 1)),
    **dict.fromkeys(["dynamic_update_slice", "pad"], slice(0, 2)),
    **dict.fromkeys(["scatter", "scatter-add"], slice(0, None, 2)),
    **dict.fromkeys(["select_n", "select_if_vmap"], slice(1, None)),
}
# ... and of which one is enough.
_ANY = {"mul": slice(None), "dot_general": slice(None), "div": slice(0, 1)}
# Primitives that carry code, and the parameter that holds it, if there is a single one.
_CODE = {
    **dict.fromkeys(["cond", "scan", "while"], ""),
    **dict.fromkeys(["checkpoint", "jit", "pjit", "remat", "remat2"], "jaxpr"),
    **dict.fromkeys(["closed_call", "custom_jvp_call", "custom_vjp_call"], "call_jaxpr"),
}
# Uninitialised buffers.
_UNSET = frozenset(["empty", "empty2"])
# The module of the callback of `eqx.error_if`: it raises instead of returning, but has a result all the same.
_RAISING = "equinox._errors"
# Numbers that stay known beyond one equation, besides 0, infinity and NaN: 1, which guards divisions, and
# the largest and the least of a dtype, which stand for infinity and 0. Any others are dropped: what is
# memoised by them has no limit.
_EXTREMES = [
    float(limit)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
    for limit in (jnp.finfo(dtype).max, jnp.finfo(dtype).tiny)
]
_LASTING = frozenset([1.0, *_EXTREMES, *(-limit for limit in _EXTREMES)])
_FOLLOWED = _MOVES | _UNSET | {"pure_callback"} | _ALL.keys() | _ANY.keys() | _CODE.keys()


@functools.cache
def has_placeholders(cls: type[Value]) -> bool:
    """Whether `promote` of the class can turn an array into a value without a `like`."""
    like = inspect.signature(cls.promote).parameters.get("like")
    if like is None or like.default is like.empty:
        return False
    return promoted_alone(cls, jax.ShapeDtypeStruct((), jnp.float32)) is not NotImplemented


def promoted_alone(cls: type[Value], aval: Any) -> Value | NotImplementedType:
    """What `promote` of the class makes of an array without a `like`, with shapes in place of leaves."""
    value: Any = NotImplemented

    def promote(array: jax.Array) -> None:
        nonlocal value
        value = cls.promote(array, None)
        if value is not NotImplemented:
            value = as_shapes(value)

    with probing():
        jax.eval_shape(promote, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return value


def asks_for_constants(value: Value) -> bool:
    """Whether the type of a Value, or of a Value that it holds, has placeholders."""
    cls: Any = type(value)
    asks, names = _asking(cls)
    if asks:
        return True
    for name in names:  # no generator, for speed: this runs for every Value that enters a quaxified function
        part = getattr(value, name, None)
        if KINDS[type(part)] != "array" and _part_asks(part):
            return True
    return False


@functools.cache
def _asking(cls: Any) -> tuple[bool, tuple[str, ...]]:
    """Whether the type has placeholders, and the names of its fields that may hold Values."""
    names = (f.name for f in dataclasses.fields(cls) if not f.metadata.get("static"))
    return has_placeholders(cls), tuple(names)


def _part_asks(part: Any) -> bool:
    if isinstance(part, Value):
        return asks_for_constants(part)
    if not isinstance(part, tuple | list | dict):
        return False
    return any(is_value(x) and asks_for_constants(x) for x in jtu.tree_leaves(part, is_leaf=is_value))


def follow(primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any) -> None:
    """Records what is known of `out`, the result of `primitive` for plain operands."""
    if primitive.name not in _FOLLOWED:
        return
    outs = out if primitive.multiple_results else [out]
    numbers = _results(primitive.name, list(map(constant_of, operands)), params)
    for y, number in zip(outs, numbers, strict=False):
        if number is not None:
            note_constant(y, number)


def _results(name: str, numbers: Sequence[Any], params: dict[str, Any]) -> Iterable[Any]:
    """The number that fills each result of a primitive, from those that fill its operands; None if unknown.
    There may be more entries than results."""
    if name in _MOVES:
        return numbers
    if name in _UNSET:
        return itertools.repeat(OPEN)
    if name == "pure_callback":
        function = getattr(params["callback"], "callback_func", None)
        return itertools.repeat(OPEN) if getattr(function, "__module__", None) == _RAISING else ()
    if name in _CODE:
        return _results_of_code(name, list(map(_lasting, numbers)), params)
    if name == "scatter" and params["update_jaxpr"] is not None:  # `at[...].apply`, of any function
        return ()
    among, matter = (all, numbers[_ALL[name]]) if name in _ALL else (any, numbers[_ANY[name]])
    if not among(map(_is_placeholder, matter)):
        return ()
    return [0 if among(n is not None and n == 0 for n in matter) else OPEN]


def _is_placeholder(number: Any) -> bool:
    return number is not None and bool(number == 0 or not np.isfinite(number))


def _lasting(number: Any) -> Any:
    """What stays known of a number beyond one equation."""
    if number is None:
        return None
    if _is_placeholder(number):
        return 0 if number == 0 else OPEN
    number = complex(number)  # compared with a larger number as it is, a half-precision one would warn
    return number.real if number in _LASTING else None


def _results_of_code(name: str, numbers: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    if name == "cond":
        return functools.reduce(_either, (_results_of(b, numbers[1:]) for b in params["branches"]))
    if name == "while":
        at = params["cond_nconsts"]
        start = at + params["body_nconsts"]
        body = lambda carry: _results_of(params["body_jaxpr"], [*numbers[at:start], *carry])
        return _fixed_point(body, numbers[start:])
    if name == "scan":
        n_consts, n_carry = compat.scan_arity(params)
        consts, xs = numbers[:n_consts], numbers[n_consts + n_carry :]
        step = lambda carry: _results_of(params["jaxpr"], [*consts, *carry, *xs])
        carry = _fixed_point(lambda carry: step(carry)[:n_carry], numbers[n_consts : n_consts + n_carry])
        return [*carry, *step(carry)[n_carry:]]
    return _results_of(params[_CODE[name]], numbers)


def _either(xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
    """The numbers that fill results that come from either side."""
    both = lambda x, y: OPEN if _is_placeholder(x) and _is_placeholder(y) else None
    return [x if x is y or x == y else both(x, y) for x, y in zip(xs, ys, strict=True)]


def _fixed_point(body: Callable[[Sequence[Any]], Sequence[Any]], carry: Sequence[Any]) -> Sequence[Any]:
    """The numbers that fill a loop's carry, however often the body runs."""
    while (after := _either(carry, body(carry))) != carry:
        carry = after
    return carry


def _results_of(jaxpr: Any, numbers: Sequence[Any]) -> Sequence[Any]:
    """The numbers that fill the results of a jaxpr."""
    jaxpr = compat.closed(jaxpr)
    known = _known_results(jaxpr)
    key = tuple(numbers)
    if key not in known:
        known[key] = _interpret(jaxpr, numbers)
    return known[key]


def _interpret(jaxpr: jexc.ClosedJaxpr, numbers: Sequence[Any]) -> Sequence[Any]:
    opened = compat.opened(jaxpr)
    of = dict(zip(compat.all_invars(opened), [*map(constant_of, jaxpr.consts), *numbers], strict=True))
    read = lambda atom: constant_of(atom.val) if isinstance(atom, jexc.Literal) else of.get(atom)
    for eqn in opened.eqns:
        name = eqn.primitive.name
        found = _results(name, list(map(read, eqn.invars)), eqn.params) if name in _FOLLOWED else ()
        of.update(zip(eqn.outvars, found, strict=False))
    return list(map(read, opened.outvars))


@compat.weakly_cached
def _known_results(jaxpr: jexc.ClosedJaxpr) -> dict[Any, Sequence[Any]]:
    return {}


def note_constant(array: Any, number: Any) -> None:
    """Records that `array` is filled with `number`."""
    if isinstance(array, jax.Array):
        at = id(array)
        _known[at] = (weakref.ref(array, lambda _: _known.pop(at, None)), number)


def constant_of(x: Any) -> Any:
    """The number, or `OPEN`, that is known to fill the plain array `x`; None if unknown or not an array."""
    found = _known.get(id(x))
    if found is not None and found[0]() is x:
        return found[1]
    if isinstance(x, Tracer) or is_value(x) or np.ndim(x) or _is_extended(x):
        return None
    return np.asarray(x)[()]


def _is_extended(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def lasting_constant_of(x: Any) -> Any:
    """As `constant_of`, if it stays known beyond one equation: 0, `OPEN`, 1, or an extreme of a dtype."""
    return _lasting(constant_of(x))


def may_be_placeholder(x: Any) -> bool:
    """Whether all elements of `x` are known to be 0, infinity or NaN, as in a buffer to be written to."""
    return _is_placeholder(constant_of(x))


def is_zero(x: Any) -> bool:
    number = constant_of(x)
    return number is not None and bool(number == 0)


def is_open(x: Any) -> bool:
    """Whether `x` is known to hold 0, infinity or NaN, but not which."""
    return constant_of(x) is OPEN
