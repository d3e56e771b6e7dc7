"""Products with a weight that is decoded in chunks, for libraries that take a dense one."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jax import lax
from jaxtyping import Array

from ..core import compat

_Weight = TypeVar("_Weight")

# Rows of activations up to which a chunk is what the L2 cache of an H100 holds.
FEW_ROWS = 1024
# Weights: 8 MiB of bfloat16, as fewer do not keep a GPU busy; 32 MiB; 128 MiB.
_LEAST, _CACHED, _MOST = 1 << 22, 1 << 24, 1 << 26


def chunk_size(size: int, other: int, m: int, *, aligned: int = 1) -> int:
    """How many rows of a weight that has `size` of them, and `other` columns, are decoded at a time for `m`
    rows of activations: so many that there is no dense copy, unless the weight is small; chunks of one size,
    a multiple of `aligned`. Or how many columns, of so many rows."""
    least_chunks, most = (2, _CACHED) if m <= FEW_ROWS else (4, _MOST)
    weights = min(most, max(_LEAST, -(-size * other // least_chunks)))
    rows = max(1, weights // max(other, 1) // aligned) * aligned
    chunks = max(1, -(-size // rows))
    return -(-size // (chunks * aligned)) * aligned


def rows_beside(m: int, n: int, k: int) -> int:
    """How many of `m` rows of `n` numbers are copied at a time, beside a weight of `n` rows and `k` columns:
    as many as are a quarter of it, unless that is little; chunks of one size."""
    rows = max(k // 4, _LEAST // max(n, 1), 1)
    return -(-m // max(1, -(-m // rows)))


def join(
    part: Callable[[_Weight, int, int], Array], weight: _Weight, size: int, step: int, *, axis: int = -1
) -> Array:
    """A product of `size` columns, `step` of them at a time, each written to its place.

    **Arguments:**

    - `part`: `part(weight, start, stop)` computes columns.
    - `weight`: arrays that `part` decodes. They are handed on from chunk to chunk, so that one is decoded
        after the other, in the same memory.
    - `axis`: that of the columns in the result; or that of rows, which are computed instead.
    """
    columns = part(weight, 0, min(step, size))
    if step >= size:
        return columns
    aval = jax.typeof(columns)
    axis %= columns.ndim
    shape = (*aval.shape[:axis], size, *aval.shape[axis + 1 :])
    y = lax.empty(shape, aval.dtype, out_sharding=aval.sharding)
    y = compat.vary_over(y, compat.varying_axes(columns))
    put = lambda y, columns, start: lax.dynamic_update_slice_in_dim(y, columns, start, axis=axis)
    y = put(y, columns, 0)
    for start in range(step, size, step):
        weight, y = lax.optimization_barrier((weight, y))
        y = put(y, part(weight, start, min(start + step, size)), start)
    return y


def add(part: Callable[[_Weight, int, int], Array], weight: _Weight, size: int, step: int) -> Array:
    """A sum over `size` rows of a weight, `step` of them at a time; `part` computes terms, `weight` is as for
    `join`."""
    y = part(weight, 0, min(step, size))
    for start in range(step, size, step):
        weight, y = lax.optimization_barrier((weight, y))
        y += part(weight, start, min(start + step, size))
    return y
