"""Products: `dot_general` with any dimension numbers contracting one axis of the matrix."""

import functools
import math
from collections.abc import Sequence
from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from ...core.policy import dense
from ...core.quaxify import quaxify, value_of
from ...core.rules import active_layers, register_on_either_side, resolver
from ...core.values import is_value
from ..dot_axes import arrange, common_dtype, dot_axes, in_order
from .base import StructuredMatrix, inside, lead
from .diagonal import DiagonalMatrix


@register_on_either_side("dot_general", StructuredMatrix)
def _dot_general(primitive: Primitive, x: Any, y: Any, **params: Any):
    if isinstance(x, StructuredMatrix) and isinstance(y, StructuredMatrix):
        return _structured_product(primitive, x, y, **params)
    on_left = isinstance(x, StructuredMatrix)
    return _product(*((x, y) if on_left else (y, x)), on_left, **params)


def _product(
    matrix: StructuredMatrix,
    x: Any,
    on_left: bool,
    *,
    dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    **params: Any,
):
    of_matrix, of_x = dot_axes(matrix, x, dimension_numbers, on_left=on_left)
    n_batch, batch = matrix.num_batch, of_matrix.batch
    rows, columns = n_batch, n_batch + 1
    if of_matrix.contracting not in {(rows,), (columns,)} or any(axis >= n_batch for axis in batch):
        return NotImplemented
    if params.get("out_sharding") is not None:
        return NotImplemented
    if of_matrix.contracting == (rows,):
        matrix = matrix.transposed()
    dtype = _computed_in(matrix.dtype, jnp.result_type(x), preferred_element_type)
    if not matrix.converts_by_parts(dtype):
        return NotImplemented

    def product(matrix: StructuredMatrix, x: Any) -> Any:
        own = dict(zip(batch, of_x.batch, strict=True))
        if isinstance(matrix, DiagonalMatrix) and len(own) == n_batch:
            axes = [*(own[i] for i in sorted(own)), *of_x.contracting]
            y = _scaled(matrix.converted(dtype), _cast(x, dtype), axes, on_left)
            y = _transposed(y, [*of_x.batch, *in_order(on_left, of_x.contracting, of_x.free)])
            return y if preferred_element_type is None else _cast(y, preferred_element_type)
        # x: (*batch, n, k), with batch axes in the matrix's order, and size 1 for those missing from x.
        x = jnp.transpose(x, [*(own[i] for i in sorted(own)), *of_x.contracting, *of_x.free])
        sizes = x.shape[len(batch) + 1 :]
        stack = [matrix.batch[i] if i in own else 1 for i in range(n_batch)]
        x = jnp.reshape(x, (*stack, x.shape[len(batch)], math.prod(sizes)))
        # If `x` is a Value itself, its type may only have a rule for one side of a product, so preserve the
        # order of the operands.
        reverse = (
            not on_left and is_value(value_of(x)) and "product" in signature(matrix.applied_to).parameters
        )
        by = {"product": _reversed} if reverse else {}
        y = matrix.converted(dtype).applied_to(_cast(x, dtype), precision, **by)
        y = jnp.broadcast_to(y, (*matrix.batch, *y.shape[-2:]))
        y = jnp.reshape(y, (*y.shape[:-1], *sizes))
        # Transpose y from (*batch, m, *free) to (*batch of the product, free axes of lhs, free axes of rhs).
        free = [*(i for i in range(n_batch) if i not in own), n_batch]
        x_free = [n_batch + 1 + i for i in range(len(sizes))]
        y = jnp.transpose(y, [*batch, *in_order(on_left, free, x_free)])
        return y if preferred_element_type is None else _cast(y, preferred_element_type)

    return inside(product, matrix, x)


def _computed_in(x: Any, y: Any, preferred: Any) -> Any:
    """Returns the dtype to multiply in. This is `preferred` if wider: the products may not fit in another."""
    dtype = jnp.promote_types(x, y)
    if preferred is None:
        return dtype
    return common_dtype(jax.ShapeDtypeStruct((), dtype), jax.ShapeDtypeStruct((), preferred))


def _scaled(matrix: DiagonalMatrix, x: Any, axes: Sequence[int], on_left: bool) -> Any:
    """Multiplies `x` by the diagonal along these axes, keeping them in the same positions."""
    scale = arrange(lead(matrix.diagonal, len(axes)), axes, range(jnp.ndim(x)))
    order = (scale, x) if on_left else (x, scale)
    values = [value_of(each) for each in order]
    if any(map(is_value, values)):
        # Elementwise multiplication is commutative, but a type may only have a rule for one order.
        rules = resolver(active_layers.get())
        here, swapped = (rules.has_rule(jax.lax.mul_p, *each) for each in (values, values[::-1]))
        order = order[::-1] if swapped and not here else order
    return order[0] * order[1]


def _transposed(x: Any, axes: Sequence[int]) -> Any:
    return x if [*axes] == [*range(len(axes))] else jnp.transpose(x, axes)


def _reversed(part: Any, x: Any, precision: Any) -> Any:
    """Computes `part @ x` as a transposed product, with `x` as its first operand."""
    out = jnp.matmul(jnp.matrix_transpose(x), jnp.matrix_transpose(part), precision=precision)
    return jnp.matrix_transpose(out)


def _cast(x: Any, dtype: Any) -> Any:
    return x if x.dtype == dtype else x.astype(dtype)


# Products of two structured matrices that are structured as well ----------------------------------


def _structured_product(primitive: Primitive, x: StructuredMatrix, y: StructuredMatrix, **params: Any) -> Any:
    (x_summed, y_summed), (x_batch, y_batch) = params["dimension_numbers"]
    n = x.num_batch
    stacked = tuple(range(n))
    if x.batch == y.batch and len(x_summed) == 1 and tuple(x_batch) == tuple(y_batch) == stacked:
        preferred = params["preferred_element_type"]
        dtype = _computed_in(x.dtype, y.dtype, preferred)
        by_parts = x.converts_by_parts(dtype) and y.converts_by_parts(dtype)
        a = x if x_summed[0] == n + 1 else x.transposed()
        b = y if y_summed[0] == n else y.transposed()
        out = NotImplemented
        if by_parts:
            out = multiply(a.converted(dtype), b.converted(dtype), params["precision"])
        if out is not NotImplemented and (preferred is None or out.converts_by_parts(preferred)):
            return out if preferred is None else out.converted(preferred)
    # Materialise only one operand, so that the product still exploits the structure of the other one.
    y = dense(y, primitive.name, (x, y), hint="Their product has no structure.")
    return quaxify(functools.partial(primitive.bind, **params))(x, y)


def multiply(x: StructuredMatrix, y: StructuredMatrix, precision: Any = None) -> Any:
    """Computes `x @ y` as a structured matrix. Returns `NotImplemented` if it isn't structured."""
    if isinstance(x, DiagonalMatrix):
        return y.after_diagonal(x.diagonal)
    out = NotImplemented if isinstance(y, DiagonalMatrix) else x.matmul(y, precision)
    if out is not NotImplemented or type(x) is type(y):
        return out
    # The product may only be implemented by the type on the right, so try its transpose.
    x, y = y.transposed(), x.transposed()
    out = y.after_diagonal(x.diagonal) if isinstance(x, DiagonalMatrix) else x.matmul(y, precision)
    return out if out is NotImplemented else out.transposed()
