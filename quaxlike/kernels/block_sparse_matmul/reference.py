"""The block-sparse matmul in plain JAX, as a scan over the weight's block rows.

This neither materialises the weight nor gathers any operands. Each step multiplies stored blocks by slices of
the activations, split into feature blocks. Padding selects an additional zero block at the end. Its products
must still be masked out, because the padding itself can contain anything.

On GPUs there are typically many activations and little memory, so we can't afford to split the activations.
The `…_sliced` functions instead multiply slices of rows and update the result in place.

Blocks are numbered in their stored order: slot `j` of block row `n` has number `n · slots + j`. Rows and
columns with fewer blocks than others are padded with an out-of-bounds index, as in BCOO.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Int32

from ..._checked import checked
from ..multilinear import accumulator_dtype, precision_for


@checked
def transposed_index(
    col_idx: Int[np.ndarray, "rows slots"], columns: int
) -> Int[np.ndarray, "columns slots_transposed"]:
    """Computes the blocks in each block column, given the block column of each block.

    The result is as wide as the fullest column. This depends on the values in `col_idx`, so these must be
    concrete, not traced.

    **Arguments:**

    - `col_idx`: the block column of every block, or `columns` for padding.
    - `columns`: the number of block columns, K / b.

    **Returns:** int32 block numbers for each block column, in ascending order, padded with `rows · slots`.

    **Raises:** `ValueError` if any index is outside `[0, columns]`.
    """
    flat = np.asarray(col_idx).reshape(-1)
    if flat.size and not 0 <= flat.min() <= flat.max() <= columns:
        raise ValueError(f"col_idx must lie in [0, {columns}], got values in [{flat.min()}, {flat.max()}]")
    order = np.argsort(flat, kind="stable")
    column = flat[order]
    first = np.searchsorted(column, np.arange(columns + 1))
    width = np.diff(first).max(initial=0)
    # Padding is sorted last, and so is written to an additional row, dropped at the end.
    transposed = np.full((columns + 1, width), flat.size, np.int32)
    order, column = order[: first[-1]], column[: first[-1]]
    transposed[column, np.arange(column.size) - first[column]] = order
    return transposed[:-1]


def matmul_reference(
    x: Float[Array, "*batch contracted"],
    blocks: Float[Array, "rows slots b b"],
    col_idx: Int32[Array, "rows slots"],
    transposed_idx: Int32[Array, "columns slots_transposed"],
    *,
    transpose: bool,
    out_dtype: np.dtype,
) -> Float[Array, "*batch free"]:
    """Computes `x @ W.T`, or `x @ W` if `transpose`. Accumulates in at least float32."""
    multiply = _scatter if transpose else _gather
    y = multiply(_by_blocks(x, blocks.shape[-1]), blocks, col_idx, transposed_idx.shape[0])
    return _by_rows(y, x.shape[:-1]).astype(out_dtype)


def sampled_reference(
    y: Float[Array, "*batch out"],
    x: Float[Array, "*batch in"],
    col_idx: Int32[Array, "rows slots"],
    *transposed_idx: Array,  # only used by the derivatives
    block_size: int,
    out_dtype: np.dtype,
) -> Float[Array, "rows slots b b"]:
    """Computes the blocks of `y.T @ x` at `col_idx`, i.e. the cotangent of the stored blocks."""
    y, x = _by_blocks(y, block_size), _with_zeros(_by_blocks(x, block_size))

    def row(_: None, of_row: tuple[Array, Array]) -> tuple[None, Array]:
        y_row, columns = of_row

        def product(column: Any) -> Any:
            return _dot(y_row, _at(x, column), ((0,), (0,)))

        def block(column: Any) -> Any:
            return _if_stored(column < x.shape[0] - 1, product(column))

        return None, lax.map(block, columns)

    return lax.scan(row, None, (y, col_idx))[1].astype(out_dtype)


def matmul_sliced(
    x: Float[Array, "*batch contracted"],
    blocks: Float[Array, "rows slots b b"],
    col_idx: Int32[Array, "rows slots"],
    transposed_idx: Int32[Array, "columns slots_transposed"],
    *,
    transpose: bool,
    out_dtype: np.dtype,
) -> Float[Array, "*batch free"]:
    """As `matmul_reference`, but with temporaries for just one block of features."""
    rows, slots, b, _ = blocks.shape
    index, absent = (transposed_idx, rows * slots) if transpose else (col_idx, transposed_idx.shape[0])
    if 0 in (x.shape[-1], index.size):  # then there isn't anything to slice
        return matmul_reference(x, blocks, col_idx, transposed_idx, transpose=transpose, out_dtype=out_dtype)
    lead, numbered = x.shape[:-1], blocks.reshape(rows * slots, b, b)
    x = x.reshape(math.prod(lead), x.shape[-1])

    def features(i: Array, y: Array) -> Array:
        def add(slot: Array, acc: Array) -> Array:
            number = index[i, slot]
            column, block = (number // slots, number) if transpose else (number, i * slots + slot)
            # An out-of-bounds index is clamped by the slices, and its product is masked out below.
            product = _dot(_columns(x, column, b), _at(numbered, block), ((1,), (0 if transpose else 1,)))
            return acc + _if_stored(number < absent, product)

        acc = lax.fori_loop(0, index.shape[1], add, _zeros((x.shape[0], b), x))
        return lax.dynamic_update_slice_in_dim(y, acc.astype(out_dtype), i * b, axis=1)

    y = jnp.zeros_like(x, out_dtype, shape=(x.shape[0], index.shape[0] * b))
    y = lax.fori_loop(0, index.shape[0], features, y)
    return y.reshape(*lead, y.shape[1])


def sampled_sliced(
    y: Float[Array, "*batch out"],
    x: Float[Array, "*batch in"],
    col_idx: Int32[Array, "rows slots"],
    *transposed_idx: Array,  # only used by the derivatives
    block_size: int,
    out_dtype: np.dtype,
) -> Float[Array, "rows slots b b"]:
    """As `sampled_reference`, but with temporaries for just one block of features."""
    if 0 in (x.shape[-1], y.shape[-1]):
        return sampled_reference(y, x, col_idx, block_size=block_size, out_dtype=out_dtype)
    y, x = (z.reshape(math.prod(z.shape[:-1]), z.shape[-1]) for z in (y, x))

    def row(_: None, of_row: tuple[Array, Array]) -> tuple[None, Array]:
        i, columns = of_row
        y_row = _columns(y, i, block_size)

        def block(column: Array) -> Array:
            product = _dot(y_row, _columns(x, column, block_size), ((0,), (0,)))
            return _if_stored(column < x.shape[1] // block_size, product).astype(out_dtype)

        return None, lax.map(block, columns)

    return lax.scan(row, None, (jnp.arange(col_idx.shape[0]), col_idx))[1]


def _columns(x: Array, number: Array, b: int) -> Array:
    """Returns a single feature block."""
    return lax.dynamic_slice_in_dim(x, number * b, b, axis=1)


def _gather(x: Array, blocks: Array, col_idx: Array, columns: int) -> Array:
    x = _with_zeros(x)
    zeros = _zeros((x.shape[1], blocks.shape[2]), x)

    def row(_: None, of_row: tuple[Array, Array]) -> tuple[None, Array]:
        def add(acc: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
            w, column = block
            product = _dot(_at(x, column), w, ((1,), (1,)))
            return acc + _if_stored(column < columns, product), None

        return None, lax.scan(add, zeros, of_row)[0]

    return lax.scan(row, None, (blocks, col_idx))[1]


def _scatter(x: Array, blocks: Array, col_idx: Array, columns: int) -> Array:
    acc = _zeros((columns + 1, x.shape[1], blocks.shape[3]), x)

    def row(acc: Array, of_row: tuple[Array, Array, Array]) -> tuple[Array, None]:
        x_row, row_blocks, columns = of_row

        def add(acc: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
            w, column = block
            # Products with padding are added to the additional last column, dropped at the end.
            return acc.at[column].add(_dot(x_row, w, ((1,), (0,)))), None

        return lax.scan(add, acc, (row_blocks, columns))[0], None

    return lax.scan(row, acc, (x, blocks, col_idx))[0][:-1]


def _by_blocks(x: Array, b: int) -> Array:
    """Reshapes (..., features) to (features / b, rows, b)."""
    rows = math.prod(x.shape[:-1])
    return jnp.moveaxis(x.reshape(rows, x.shape[-1] // b, b), 1, 0)


def _by_rows(y: Array, lead: tuple[int, ...]) -> Array:
    """Reshapes (features / b, rows, b) back to (..., features); the inverse of `_by_blocks`."""
    return jnp.moveaxis(y, 0, 1).reshape(*lead, y.shape[0] * y.shape[2])


def _zeros(shape: tuple[int, ...], x: Array) -> Array:
    return jnp.zeros_like(x, accumulator_dtype(x.dtype), shape=shape)


def _if_stored(stored: Array, product: Array) -> Array:
    # Don't multiply by zero instead, because padding can contain NaNs.
    return jnp.where(stored, product, jnp.zeros_like(product))


def _with_zeros(x: Array) -> Array:
    return jnp.concatenate([x, jnp.zeros_like(x, shape=(1, *x.shape[1:]))])


def _at(x: Array, index: Array) -> Array:
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _dot(x: Array, w: Array, contract: tuple[tuple[int], tuple[int]]) -> Array:
    # Cast explicitly: strict dtype promotion would raise an error if the dtypes differ.
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return lax.dot_general(
        x.astype(dtype),
        w.astype(dtype),
        (contract, ((), ())),
        precision=precision_for(dtype),
        preferred_element_type=accumulator_dtype(x.dtype),
    )
