"""The sparse matmul in plain JAX: a scan scattering the terms of several stored elements at a time."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, Shaped

from ..multilinear import accumulator_dtype, varying_zeros
from ..padded import add_at, get_at

# The number of values to gather at a time: 1 MiB in float32.
_PIECE = 2**18
# The number of columns to assume if it is symbolic.
_OPEN_WIDTH = 64


def matmul_reference(x: Array, data: Array, *index: Array, transpose: bool, out_dtype: np.dtype) -> Array:
    """Computes `x @ W.T`, or `x @ W` if `transpose`. Floating-point sums use at least float32."""
    rows, columns, row_ptr, _, column_ptr = index
    into, out_of, ptr = (columns, rows, column_ptr) if transpose else (rows, columns, row_ptr)
    x, lead = features_first(x, sum_dtype(out_dtype))
    y = coo_matmul(x, data.astype(x.dtype), into, out_of, ptr.shape[0] - 1)
    return rows_first(y, lead).astype(out_dtype)


def coo_matmul(
    x: Shaped[Array, "features rows"],
    data: Shaped[Array, " elements"],
    into: Int32[Array, " elements"],
    out_of: Int32[Array, " elements"],
    size: int,
) -> Shaped[Array, "size rows"]:
    """Adds `data * x[out_of]` at index `into` for every element. The summation order is unspecified.

    Elements with an out-of-bounds index are treated as zero.
    """
    # The carry of a scan must vary over the same mesh axes as the values added to it.
    acc = varying_zeros((size, x.shape[1]), x.dtype, x, data, into)
    if 0 in (data.shape[0], x.shape[0]):
        return acc

    @jax.checkpoint  # Otherwise we would save the gathered rows, which are as large as a dense product.
    def add(acc: Array, piece: tuple[Array, Array, Array]) -> tuple[Array, None]:
        into, out_of, data = piece
        return add_at(acc, (into,), data[:, None] * get_at(x, (out_of,), 0)), None

    return lax.scan(add, acc, _pieces(x.shape[1], (into, size), (out_of, x.shape[0]), (data, 0)))[0]


def sampled_reference(by_rows: Array, by_columns: Array, *index: Array, out_dtype: np.dtype) -> Array:
    """Computes the stored elements of `by_rows.T @ by_columns`, i.e. their cotangent."""
    rows, columns = index[:2]
    y, _ = features_first(by_rows, sum_dtype(out_dtype))
    x, _ = features_first(by_columns, sum_dtype(out_dtype))
    if 0 in (x.shape[0], y.shape[0]):
        return varying_zeros(rows.shape, out_dtype, x, y, rows)

    def dots(_: None, piece: tuple[Array, Array]) -> tuple[None, Array]:
        row, column = piece
        return None, jnp.sum(get_at(y, (row,), 0) * get_at(x, (column,), 0), 1)

    pieces = _pieces(x.shape[1], (rows, y.shape[0]), (columns, x.shape[0]))
    return lax.scan(dots, None, pieces)[1].reshape(-1)[: rows.shape[0]].astype(out_dtype)


def features_first(x: Array, dtype: np.dtype) -> tuple[Array, tuple[int, ...]]:
    """Reshapes (..., features) to (features, rows), and also returns the leading axis sizes."""
    lead = x.shape[:-1]
    return x.reshape(math.prod(lead), x.shape[-1]).astype(dtype).T, lead


def rows_first(y: Array, lead: tuple[int, ...]) -> Array:
    """Reshapes (features, rows) back to (..., features); the inverse of `features_first`."""
    return y.T.reshape(*lead, y.shape[0])


def sum_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype for accumulating, given the result's dtype. Uses int32 for booleans."""
    # For booleans the sum is a count, and any nonzero count is then cast to True.
    if dtype == np.bool_:
        return np.dtype(np.int32)
    return accumulator_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _pieces(width: int, *arrays: tuple[Array, int]) -> Any:
    """Pads and splits element arrays into pieces, limiting how many values each piece gathers.

    Each element gathers `width` values.
    """
    size = arrays[0][0].shape[0]
    if not isinstance(width, int):  # a symbolic dimension, from `jax.export`
        width = _OPEN_WIDTH
    length = max(1, min(size, _PIECE // max(1, width)))
    count = -(-size // length)

    def pad(array: Any, fill: Any) -> Any:
        return jnp.pad(array, (0, count * length - size), constant_values=fill)

    return tuple(pad(array, fill).reshape(count, length) for array, fill in arrays)
