"""Plain arrays that are known to be filled with one number, such as the zeros that a library starts from.

A plain array is never boxed, so what is known of it stands beside it, for as long as it lives. Nothing is
noted until a type asks for it with `track`.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .values import is_value

# The number of arrays that hold 0, infinity or NaN, but it is not known which.
OPEN = np.float64("nan")

_known: dict[int, tuple[weakref.ref[Any], Any]] = {}

# Primitives whose results hold nothing but elements of their operands, in order.
_MOVES = frozenset(
    """broadcast_in_dim convert_element_type copy copy_p device_put expand_dims nonbatchable nontraceable
    optimization_barrier pvary reshape rev slice squeeze stop_gradient transpose""".split()  # noqa: SIM905
)
# Which operands have to be 0, infinity or NaN in every element for the result to be so ...
_ALL: dict[str, slice] = {
    **dict.fromkeys(["abs", "add", "add_any", "neg", "sqrt", "square", "sub", "concatenate"], slice(None)),
    **dict.fromkeys(["conj", "imag", "real", "stack"], slice(None)),
    **dict.fromkeys(["cumsum", "dynamic_slice", "gather", "reduce_max", "reduce_sum"], slice(0, 1)),
    **dict.fromkeys(["dynamic_update_slice", "pad"], slice(0, 2)),
    **dict.fromkeys(["scatter", "scatter-add"], slice(0, None, 2)),
    **dict.fromkeys(["select_n", "select_if_vmap"], slice(1, None)),
}
# ... and where one of them is enough.
_ANY = {"mul": slice(None), "dot_general": slice(None), "div": slice(0, 1)}
# What holds no number yet.
_UNSET = frozenset(["empty", "empty2"])
# What returns nothing: the callback of `eqx.error_if`, which raises, has a result all the same.
_RAISING = "equinox._errors"
_tracked: frozenset[str] = frozenset()


def track() -> None:
    """From now on, what plain arrays are filled with is followed through the primitives that keep it."""
    global _tracked
    _tracked = _MOVES | _UNSET | {"pure_callback"} | _ALL.keys() | _ANY.keys()


def is_tracking() -> bool:
    return bool(_tracked)


def follow(primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any], out: Any) -> None:
    """Notes what is known of `out`, which `primitive` made of plain operands."""
    name = primitive.name
    if name not in _tracked:
        return
    outs = out if primitive.multiple_results else [out]
    if name in _MOVES:
        for x, y in zip(operands, outs, strict=False):
            number = constant_of(x)
            if number is not None:
                note_constant(y, number)
    elif name == "pure_callback":
        function = getattr(params["callback"], "callback_func", None)
        for y in outs if getattr(function, "__module__", None) == _RAISING else ():
            note_constant(y, OPEN)
    elif name in _UNSET:
        for y in outs:
            note_constant(y, OPEN)
    else:
        among, matter = (all, operands[_ALL[name]]) if name in _ALL else (any, operands[_ANY[name]])
        if among(map(may_be_placeholder, matter)):
            note_constant(out, 0 if among(map(is_zero, matter)) else OPEN)


def note_constant(array: Any, number: Any) -> None:
    """`array` is filled with `number`."""
    if isinstance(array, jax.Array):
        at = id(array)
        _known[at] = (weakref.ref(array, lambda _: _known.pop(at, None)), number)


def constant_of(x: Any) -> Any:
    """The number that all elements of `x` are known to be, or `OPEN`, if it is a plain array; else None."""
    found = _known.get(id(x))
    if found is not None and found[0]() is x:
        return found[1]
    if isinstance(x, Tracer) or is_value(x) or np.ndim(x) or _is_extended(x):
        return None
    return np.asarray(x)[()]


def _is_extended(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


def may_be_placeholder(x: Any) -> bool:
    """Whether all elements of `x` are known to be 0, infinity or NaN, as of arrays to be written to."""
    number = constant_of(x)
    return number is not None and bool(number == 0 or not np.isfinite(number))


def is_zero(x: Any) -> bool:
    number = constant_of(x)
    return number is not None and bool(number == 0)


def is_open(x: Any) -> bool:
    """Whether `x` is known to hold 0, infinity or NaN, but not which."""
    return constant_of(x) is OPEN
