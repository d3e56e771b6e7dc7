"""`dot_general` with a block-sparse array, for every dimension_numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jaxtyping import Array, ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register_on_either_side
from ...core.values import ArrayValue
from ...kernels import block_sparse_matmul
from ...kernels.multilinear import accumulator_dtype, varying_zeros
from .block import BlockSparseArray
from .block_shape import leaves_are_stacked
from .stacks import (
    dot_stack,
    product_dtype,
)


@register_on_either_side("dot_general", BlockSparseArray, other=ArrayLike)
def _dot_general(
    primitive: Primitive,
    x: Any,
    y: Any,
    *,
    dimension_numbers: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    **params: Any,
) -> Any:
    on_left = isinstance(x, BlockSparseArray)
    w, x = (x, y) if on_left else (y, x)
    if isinstance(x, BlockSparseArray) or out_sharding is not None or not leaves_are_stacked(w):
        return NotImplemented
    x = jnp.asarray(x)
    dtype = product_dtype(x, w, preferred_element_type)
    if not jnp.issubdtype(dtype, jnp.floating):
        return NotImplemented  # kernels accumulate in floating point
    product = functools.partial(_matmul, out_dtype=dtype)
    return dot_stack(w, x, product, dimension_numbers, on_left=on_left)


def _matmul(w: BlockSparseArray, x: Array, axis: int, *, out_dtype: np.dtype) -> Array:
    transpose = (axis == 0) != w.transposed
    if isinstance(w.blocks, ArrayValue):
        return _matmul_by_rows(w, x, transpose, accumulator_dtype(out_dtype)).astype(out_dtype)
    return block_sparse_matmul(
        x, w.blocks, w.col_idx, w.transposed_idx, transpose=transpose, out_dtype=out_dtype
    )


def _matmul_by_rows(w: BlockSparseArray, x: Array, transpose: bool, dtype: np.dtype) -> Array:
    """As `_matmul`, for blocks that are Values: multiplies one block row at a time by the rules of their
    type, and accumulates in `dtype`."""
    b, columns, lead = w.block_size, w.transposed_idx.shape[0], x.shape[:-1]
    x = jnp.moveaxis(x.reshape(-1, x.shape[-1] // b, b), 1, 0)  # (features / b, rows of x, b)
    dot = functools.partial(lax.dot_general, preferred_element_type=dtype)

    def gather(x: Array, blocks: Any, col_idx: Array) -> Array:
        x = jnp.concatenate([x, jnp.zeros_like(x[:1])])

        def row(_: None, of_row: tuple[Any, Array]) -> tuple[None, Array]:
            blocks, columns = of_row
            return None, dot(x[columns], blocks, (((0, 2), (0, 2)), ((), ())))

        return lax.scan(row, None, (blocks, col_idx))[1]

    def scatter(x: Array, blocks: Any, col_idx: Array) -> Array:
        def row(acc: Array, of_row: tuple[Array, Any, Array]) -> tuple[Array, None]:
            x, blocks, columns = of_row
            y = dot(x, blocks, (((1,), (1,)), ((), ())))  # (rows of x, slots, b)
            return acc.at[columns].add(jnp.moveaxis(y, 1, 0), mode="drop"), None

        acc = varying_zeros((columns, x.shape[1], b), dtype, x, *jax.tree.leaves(w.blocks), col_idx)
        return lax.scan(row, acc, (x, blocks, col_idx))[0]

    y = quaxify(scatter if transpose else gather)(x, w.blocks, w.col_idx)
    return jnp.moveaxis(y, 0, 1).reshape(*lead, -1)
