"""Arithmetic on scales or on code tables: multiplication, powers, and sums (as in penalties).

The codes don't change, so the result is rounded once for each block (or table entry), rather than once for
each element. It isn't bit-for-bit identical to the dense result.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.typing import ArrayLike
from jaxtyping import Array

from ...core.rules import register, register_on_either_side
from ..factors import is_infinite, reciprocal
from .array import BlockArray
from .base import AbstractQuantizedArray
from .dot import contract
from .scales import BlockScales
from .shape import with_free_axes


@register("neg")
def _neg(w: AbstractQuantizedArray, **params: Any) -> Any:
    return w.times(jnp.float32(-1))


@register_on_either_side("mul", AbstractQuantizedArray, other=ArrayLike)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    w, factor = (x, y) if isinstance(x, AbstractQuantizedArray) else (y, x)
    return _scaled(w, factor)


@register("mul")
def _mul_quantized(x: AbstractQuantizedArray, y: AbstractQuantizedArray, **params: Any) -> Any:
    """Computes an array's square, as needed for an L2 penalty.

    (In general, codes can't represent the product of two different quantised arrays.)
    """
    leaves, others = jax.tree.leaves(x), jax.tree.leaves(y)
    # The leaves' values aren't known during tracing, so compare by identity.
    same = jax.tree.structure(x) == jax.tree.structure(y) and all(
        a is b for a, b in zip(leaves, others, strict=True)
    )
    return _on_codes_and_scales(x, np.square, jnp.square) if same else NotImplemented


@register("div")
def _div(w: AbstractQuantizedArray, y: ArrayLike, **params: Any) -> Any:
    return _scaled(w, reciprocal(y))


def _scaled(w: AbstractQuantizedArray, factor: Any) -> Any:
    """Multiplies `w` by a scalar, or by factors for whole rows of codes.

    The product is rounded once for each block, rather than for each element. Even if the scales are frozen, a
    traced factor still receives gradients through the scales of the result.
    """
    # Every term of a sum would become infinite, so the sum may be NaN where the dense array has infinity.
    if w.is_sum and is_infinite(factor):
        return NotImplemented
    factor = jnp.asarray(factor)
    if not jnp.issubdtype(factor.dtype, jnp.floating) or factor.ndim not in (0, w.ndim):
        return NotImplemented
    factor = factor.astype(jnp.float32)
    if factor.ndim:
        axes = [axis for axis, size in enumerate(factor.shape) if size != 1]
        free = with_free_axes(w.joined(), axes)
        if free is None or any(factor.shape[axis] != w.shape[axis] for axis in axes):
            return NotImplemented
        # Factors have axes in logical order, but scales in stored order.
        factor = factor.transpose([free.permutation.index(i) for i in range(w.ndim)])
        w, factor = free, factor.reshape(*factor.shape[: free.num_lead], 1)
    return (w.with_gradients("pass") if isinstance(factor, jax.core.Tracer) else w).times(factor)


@register("square")
def _square(w: AbstractQuantizedArray, **params: Any) -> Any:
    return _on_codes_and_scales(w, np.square, jnp.square)


@register("integer_pow")
def _integer_pow(w: AbstractQuantizedArray, *, y: int, **params: Any) -> Any:
    def power(x: Any) -> Any:
        return x**y

    return _on_codes_and_scales(w, power, power) if y > 0 else NotImplemented


@register("abs")
def _abs(w: AbstractQuantizedArray, **params: Any) -> Any:
    return _on_codes_and_scales(w, np.abs, jnp.abs)


def _on_codes_and_scales(
    w: AbstractQuantizedArray, of_table: Callable[..., Any], of_scale: Callable[..., Any]
) -> Any:
    """Applies an elementwise function factorising into a function of codes and one of scales.

    The codes don't change, but represent different values. Both functions are rounded separately.
    """
    # With a zero point, an element is a sum, and the square of a sum doesn't factorise in this way.
    if w.codec.zeros is not None:
        return NotImplemented
    values = of_table(w.codec.all_values).tolist()
    # Always use the same NaN object: otherwise codecs with the same table aren't equal.
    table = tuple(math.nan if value != value else value for value in values)
    codec = dataclasses.replace(w.codec, codes="table", bias=0, table=table, scales="float", group=None)
    scale, _ = w.codec.scales_and_zeros(*w.block_scales().parts())
    same = ("block_size", "inner", "axes", "logical_dtype", "gradients", "order")
    kept: Any = {name: getattr(w, name) for name in same}
    return BlockArray(w.codes.view(np.uint8), BlockScales(of_scale(scale)), codec=codec, **kept)


@register("reduce_sum")
def _reduce_sum(w: AbstractQuantizedArray, *, axes: Sequence[Any], **params: Any) -> Any:
    """Sums along blocks by multiplying by ones, without forming the dense array."""
    if params.get("out_sharding") is not None:
        return NotImplemented
    summed = sorted(w.permutation[axis] for axis in axes)
    inner = [name for name in summed if name >= w.num_lead]
    first = inner or summed
    left = [name for name in w.permutation if name not in first]
    if not first:
        return w
    ones = jnp.ones([w.stored_shape[name] for name in first])
    y: Array = contract(ones, tuple(first), w, tuple(left), np.dtype(np.float32))
    rest = [i for i, name in enumerate(left) if name in summed]
    return jnp.sum(y, axis=rest).astype(w.dtype)
