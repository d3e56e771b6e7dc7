"""`dot_general` for sparse arrays, with any dimension numbers."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jaxtyping import Array, ArrayLike

from ...core.policy import dense
from ...core.quaxify import quaxify
from ...core.rules import register_on_either_side
from ...core.values import ArrayValue
from ...kernels import block_sparse_matmul, csr_matmul
from ...kernels.csr_matmul import coo_matmul, sum_dtype
from ...kernels.multilinear import accumulator_dtype, varying_zeros
from ...kernels.padded import add_at
from .. import precedence
from ..dot_axes import dot_axes, in_order, product_dtype
from .block import BlockSparseArray
from .stacks import AbstractSparseArray, dot_stack
from .unstructured import (
    SparseArray,
    fits_int32,
    flattened,
    known_indices,
    known_positions,
    pairs,
    unstacked,
)


@register_on_either_side("dot_general", AbstractSparseArray, other=ArrayLike)
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
    if out_sharding is not None:
        return NotImplemented
    dtype = product_dtype(x, y, preferred_element_type)
    if isinstance(x, SparseArray) and isinstance(y, SparseArray):
        return _sparse_sparse(x, y, dimension_numbers, dtype)
    if isinstance(x, AbstractSparseArray) and isinstance(y, AbstractSparseArray):
        return NotImplemented
    on_left = isinstance(x, AbstractSparseArray)
    w: Any = x if on_left else y
    x = jnp.asarray(y if on_left else x)
    if isinstance(w, BlockSparseArray):
        if not w.leaves_are_stacked or not jnp.issubdtype(dtype, jnp.floating):
            return NotImplemented  # kernels accumulate in floating point
        product = functools.partial(_by_blocks, out_dtype=dtype)
        return dot_stack(w, x, product, dimension_numbers, on_left=on_left)
    # The CSR kernels require ordered elements, and a product contracting a single axis of the matrix.
    if w.order is not None:
        product = functools.partial(_by_elements, out_dtype=dtype)
        y = dot_stack(w, x, product, dimension_numbers, on_left=on_left)
        if y is not NotImplemented:
            return y
    return _sparse_dense(w, x, dimension_numbers, on_left, dtype)


def _by_elements(w: SparseArray, x: Array, axis: int, *, out_dtype: np.dtype) -> Array:
    assert w.csr is not None
    return csr_matmul(x, w.data, w.csr, transpose=axis == w.major, out_dtype=out_dtype)


def _by_blocks(w: BlockSparseArray, x: Array, axis: int, *, out_dtype: np.dtype) -> Array:
    transpose = (axis == 0) != w.transposed
    if isinstance(w.blocks, ArrayValue):
        return _matmul_by_rows(w, x, transpose, accumulator_dtype(out_dtype)).astype(out_dtype)
    return block_sparse_matmul(
        x, w.blocks, w.col_idx, w.transposed_idx, transpose=transpose, out_dtype=out_dtype
    )


def _matmul_by_rows(w: BlockSparseArray, x: Array, transpose: bool, dtype: np.dtype) -> Array:
    """As `_by_blocks`, but for blocks that are Values: multiplies one block row at a time.

    This uses the rules for the blocks' type, and accumulates in `dtype`.
    """
    b, columns, lead = w.block_size, w.transposed_idx.shape[0], x.shape[:-1]
    x = jnp.moveaxis(x.reshape(math.prod(lead), x.shape[-1] // b, b), 1, 0)  # (features / b, rows of x, b)
    dot = functools.partial(lax.dot_general, preferred_element_type=dtype)

    def gather(x: Array, blocks: Any, col_idx: Array) -> Array:
        # Padding has a column index one past the last column, so it reads this block of zeros.
        x = jnp.concatenate([x, jnp.zeros_like(x[:1])])

        def row(_: None, of_row: tuple[Any, Array]) -> tuple[None, Array]:
            blocks, columns = of_row
            return None, dot(x[columns], blocks, (((0, 2), (0, 2)), ((), ())))

        return lax.scan(row, None, (blocks, col_idx))[1]

    def scatter(x: Array, blocks: Any, col_idx: Array) -> Array:
        def row(acc: Array, of_row: tuple[Array, Any, Array]) -> tuple[Array, None]:
            x, blocks, columns = of_row
            y = dot(x, blocks, (((1,), (1,)), ((), ())))  # (rows of x, slots, b)
            return add_at(acc, (columns,), jnp.moveaxis(y, 1, 0)), None

        acc = varying_zeros((columns, x.shape[1], b), dtype, x, *jax.tree.leaves(w.blocks), col_idx)
        return lax.scan(row, acc, (x, blocks, col_idx))[0]

    y = quaxify(scatter if transpose else gather)(x, w.blocks, w.col_idx)
    return jnp.moveaxis(y, 0, 1).reshape(*lead, y.shape[0] * b)


def _sparse_dense(w: SparseArray, x: Array, dimension_numbers: Any, on_left: bool, dtype: np.dtype) -> Any:
    """Contracts any axes, with elements in any order.

    Each element scales a row of `x`, and the scaled rows are then scattered into the result. This is slower
    than the CSR kernels, but doesn't require ordered elements.
    """
    of_w, of_x = dot_axes(w, x, dimension_numbers, on_left=on_left)
    shape, w = w.shape, unstacked(w)
    into, out_of = [*of_w.batch, *of_w.free], [*of_w.batch, *of_w.contracting]

    def sizes(axes: Any) -> Any:
        return [shape[axis] for axis in axes]

    # With this many elements, flat indices would overflow.
    if not fits_int32(sizes(into)) or not fits_int32(sizes(out_of)):
        return NotImplemented
    inside = w.is_stored

    def positions(axes: Any) -> Any:
        return flattened([w.indices[axis] for axis in axes], sizes(axes), inside)

    kept = [x.shape[axis] for axis in of_x.free]
    x = x.transpose(*of_x.batch, *of_x.contracting, *of_x.free).reshape(
        math.prod(sizes(out_of)), math.prod(kept)
    )
    sums = sum_dtype(dtype)
    y = coo_matmul(
        x.astype(sums), w.data.astype(sums), positions(into), positions(out_of), math.prod(sizes(into))
    )
    y = y.astype(dtype).reshape(*sizes(into), *kept)
    first, last = len(of_w.batch), len(into)
    return y.transpose(*range(first), *in_order(on_left, range(first, last), range(last, y.ndim)))


def _sparse_sparse(x: SparseArray, y: SparseArray, dimension_numbers: Any, dtype: np.dtype) -> Any:
    """Multiplies two sparse arrays with concrete patterns.

    All elements to be multiplied can then be paired during tracing, using NumPy.
    """
    (x_summed, y_summed), (x_batch, _) = dimension_numbers
    at_x, at_y = known_indices(x), known_indices(y)
    # The number of pairs determines a shape, so it has to be known during tracing.
    if at_x is None or at_y is None or x_batch:
        return NotImplemented
    of_x, of_y = pairs(known_positions(at_x, x_summed, x.sizes), known_positions(at_y, y_summed, y.sizes))
    sums = sum_dtype(dtype)
    terms = x.data.astype(sums)[of_x] * y.data.astype(sums)[of_y]
    kept = [
        (indices[of][:, axis], z.sizes[axis])
        for z, indices, of, summed in ((x, at_x, of_x, x_summed), (y, at_y, of_y, y_summed))
        for axis in range(len(z.sizes))
        if axis not in summed
    ]
    if not kept:
        return jnp.sum(terms).astype(dtype)
    indices, sizes = zip(*kept, strict=True)
    out = SparseArray.from_coo(terms, np.stack(indices, -1), sizes)
    return out.replace(data=out.data.astype(dtype))


@register_on_either_side(
    "dot_general",
    AbstractSparseArray,
    other=ArrayValue,
    precedence=precedence.SPARSE_BESIDE_VALUES,
)
def _one_dense(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """The fallback if the other operand, e.g. a quantised one, can only be multiplied by plain arrays.

    This is also used for two sparse arrays without any other rule. It only materialises the smaller one, so
    that the product still exploits the other's sparsity.
    """
    sparse = [v for v in (x, y) if isinstance(v, AbstractSparseArray)]
    smallest = min(sparse, key=lambda v: v.size)
    operands = [dense(v, primitive.name, (x, y)) if v is smallest else v for v in (x, y)]
    return quaxify(functools.partial(primitive.bind, **params))(*operands)
