"""Accurate summation and fast set membership."""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from .._checked import checked
from .trees import ARRAY_LIKE, at, describing, map_with_path

_T = TypeVar("_T")


@checked
def isin(a: ArrayLike | Sequence[Any], b: ArrayLike | Sequence[Any], max_item: SupportsIndex) -> jax.Array:
    """Returns whether each item of `a` is in `b`. Like `jnp.isin`, but uses a lookup table.

    The table takes time and memory proportional to `a.size + b.size + max_item`.

    **Arguments:**

    - `a`: the items to look up, as integers of any shape.
    - `b`: the set, as integers of any shape.
    - `max_item`: the size of the table (static). Items outside `[0, max_item)` are never in the set.

    **Returns:**

    An array of booleans with the same shape as `a`.

    **Raises:**

    - `TypeError`: if `a` or `b` are not integers, or `max_item` is traced.
    - `ValueError`: if `max_item` is negative.

    !!! example

        ```python
        from quaxlike.utils import isin

        # [False, True, False]
        isin(jnp.array([1, 3, -1]), jnp.array([3, 9]), max_item=10)
        ```
    """
    if isinstance(max_item, Tracer):
        raise TypeError(
            "isin: `max_item` is the size of a table and must be a Python integer, found a traced "
            "value. Make it static, such as by jax.jit(..., static_argnames='max_item')."
        )
    try:
        size = operator.index(max_item)
    except TypeError:
        raise TypeError(f"isin: `max_item` must be a whole number, found {max_item!r}.") from None
    if size < 0:
        raise ValueError(f"isin: `max_item` must not be negative, found {size}.")
    # Out-of-range items map to an additional entry at the end of the table, which is then reset to `False`.
    table = jnp.zeros(size + 1, bool).at[_rows("b", b, size)].set(True).at[size].set(False)
    return table[_rows("a", a, size)]


def _rows(name: str, items: Any, size: int) -> jax.Array:
    on_device = any(isinstance(item, jax.Array) for item in jax.tree.leaves(items))
    items = jnp.asarray(items) if on_device else np.asarray(items)
    if items.size == 0 and not on_device:  # NumPy converts an empty list to floats
        items = items.astype(int)
    if not jnp.issubdtype(items.dtype, jnp.integer):
        raise TypeError(
            f"isin: `{name}` must hold integers, found {items.dtype} of shape {items.shape}. "
            "Use jnp.isin for other types."
        )
    # Very large unsigned integers wrap around to a negative value here, which is still out of range.
    wide = items.astype(int if on_device else np.int64)
    return jnp.where((wide >= 0) & (wide < size), wide, size)


@checked
def kahan_summation(*summands: _T, compensate: _T | None = None) -> tuple[_T, _T]:
    """Sums pytrees, with a rounding error that doesn't grow with the number of summands.

    The rounding error of each addition is computed exactly, and then compensates the sum. This works even if
    a summand is larger than the running total, and under XLA's fast-math flags. Derivatives are the same as
    for an ordinary sum. Integers have no rounding error and are summed without compensation.

    This is Neumaier's variant ("Rundungsfehleranalyse einiger Verfahren zur Summation endlicher Summen",
    1974) of Kahan's method ("Further remarks on reducing truncation errors", 1965).

    **Arguments:**

    - `*summands`: at least one pytree. All of them must have the same structure, with leaves broadcasting
        against each other. Dtypes are promoted.
    - `compensate`: the compensation from an earlier call. Pass this if the first summand is that call's sum.
        Default: zero.

    **Returns:**

    A pair `(sum, compensation)` of pytrees. Mathematically, `sum - compensation` is the sum in a higher
    precision.

    **Raises:**

    - `TypeError`: if there are no summands, or if a leaf is a boolean or isn't a number.
    - `ValueError`: if the structures or shapes differ. The error message says where.

    !!! example

        ```python
        from quaxlike.utils import kahan_summation

        total, lost = kahan_summation(jnp.float32(1e8), jnp.float32(1.0))
        total, lost = kahan_summation(total, jnp.float32(-1e8), compensate=lost)  # 1.0
        ```
    """
    if not summands:
        raise TypeError("kahan_summation needs at least one summand, found none.")

    def sum_leaves(path: tuple[Any, ...], *leaves: Any) -> _Sum:
        for leaf in leaves:
            _require_numbers(path, leaf)
        with describing("kahan_summation", path, leaves):
            dtype = jnp.result_type(*leaves)
            values = [jnp.asarray(leaf, dtype) for leaf in leaves]
            if compensate is None:
                return _compensated_sum(values, jnp.zeros_like(values[0]))
            return _compensated_sum(values[:-1], -values[-1])

    trees = summands if compensate is None else (*summands, compensate)
    sums = map_with_path(sum_leaves, *trees)

    def is_sum(node: Any) -> Any:
        return isinstance(node, _Sum)

    total = jax.tree.map(lambda s: s.total, sums, is_leaf=is_sum)
    compensation = jax.tree.map(lambda s: s.compensation, sums, is_leaf=is_sum)
    return total, compensation


class _Sum(NamedTuple):
    total: jax.Array
    compensation: jax.Array


_FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64, jnp.complex64, jnp.complex128)


def _require_numbers(path: tuple[Any, ...], leaf: Any) -> None:
    dtype = jnp.result_type(leaf) if isinstance(leaf, ARRAY_LIKE) else None
    if dtype is None or not (jnp.issubdtype(dtype, jnp.integer) or dtype in _FLOATS):
        found = type(leaf).__name__ if dtype is None else dtype
        raise TypeError(
            "kahan_summation sums integers, complex numbers, and floats of 16 bits or more; found "
            f"{found}{at(path)}. Convert it with `.astype`."
        )


def _compensated_sum(summands: list[jax.Array], error: jax.Array) -> _Sum:
    total, *others = summands
    for summand in others:
        total, lost = _two_sum(total, summand)
        # Compilers could reassociate a plain sum, so use `_two_sum` here as well.
        error, _ = _two_sum(error, lost)
    # By now the error may be as large as the total, so fold it back in.
    total, rest = _two_sum(total, error)
    # Subtract from zero, so that the compensation for an exact sum is 0.0 rather than -0.0.
    return _Sum(total, jnp.zeros_like(rest) - rest)


def _two_sum(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the rounded sum and its exact rounding error."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        total = x + y
        return total, jnp.zeros_like(total)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        real, real_error = _two_sum_of_floats(x.real, y.real)
        imag, imag_error = _two_sum_of_floats(x.imag, y.imag)
        return lax.complex(real, imag), lax.complex(real_error, imag_error)
    return _two_sum_of_floats(x, y)


@jax.custom_jvp
def _two_sum_of_floats(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    total = _opaque(x + y)
    x_is_larger = jnp.abs(x) >= jnp.abs(y)
    larger = jnp.where(x_is_larger, x, y)
    smaller = jnp.where(x_is_larger, y, x)
    error = _opaque(_opaque(larger - total) + smaller)
    # An infinite total makes the error `inf - inf`, i.e. NaN. Return zero instead.
    return total, jnp.where(jnp.isfinite(total), error, jnp.zeros_like(error))


@_two_sum_of_floats.defjvp
def _two_sum_of_floats_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    # The total plus the error is exactly `x + y`, so this fixes the sum of their tangents. By convention all
    # of it goes to the total.
    t = tangents[0] + tangents[1]
    return _two_sum_of_floats(*primals), (t, jnp.zeros_like(t))


def _opaque(x: jax.Array) -> jax.Array:
    """The identity function, across which compilers can't reassociate a sum.

    In particular LLVM does this under fast-math, by which point `lax.optimization_barrier` has already been
    removed (in JAX 0.10). As a workaround, replace the bit pattern of one particular NaN by a different NaN.
    (No floating-point rule allows a compiler to remove this.)
    """
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    is_that_nan = bits == bits.dtype.type(np.iinfo(bits.dtype).max)
    return lax.bitcast_convert_type(bits ^ is_that_nan.astype(bits.dtype), x.dtype)
