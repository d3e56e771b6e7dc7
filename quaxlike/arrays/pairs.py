"""Rules fusing two array types into a single product, if a kernel supports this.

They are purely an optimisation: without them, redispatch computes the same result by separate products.
Nothing else may rely on them.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..core.jaxprs.evaluate import cached_trace
from ..core.rules import register_on_either_side
from ..core.values import is_value
from ..kernels.block_matmul import to_ranks
from . import precedence
from .dot_axes import dot_axes, placed, product_dtype
from .lora.array import LoraArray, drops, warn_of_dropout
from .quantized.base import AbstractQuantizedArray


@register_on_either_side("dot_general", LoraArray, other=ArrayLike, precedence=precedence.LORA_OF_CODES)
def _dot_general_adapted_codes(primitive: Primitive, lhs: Any, rhs: Any, **params: Any) -> Any:
    """Multiplies by a quantised weight with an adapter, adding its term to the kernel's accumulator."""
    on_left = isinstance(lhs, LoraArray)
    lora, x = (lhs, rhs) if on_left else (rhs, lhs)
    if not isinstance(lora.w, AbstractQuantizedArray) or isinstance(x, LoraArray):
        return NotImplemented
    if lora.dropout:
        warn_of_dropout(lora)
    return _fused_product(lora, x, on_left=on_left, **params)


@cached_trace
def _fused_product(lora: LoraArray, x: Any, *, on_left: bool, dimension_numbers: Any, **params: Any) -> Any:
    x = jnp.asarray(x)
    of_lora, of_x = dot_axes(lora, x, dimension_numbers, on_left=on_left)
    if of_lora.batch or not _fused(lora, of_lora.contracting, x):
        return NotImplemented
    w = lora.base if lora.w.has_gradients else lora.w
    w = (w.joined() if w.num_lead else w).with_axes(range(2))
    x = jnp.moveaxis(x, of_x.contracting[0], -1)
    y = w.matmul(
        x,
        w.parts,
        shape=w.stored_shape,
        transpose=False,
        low_rank=(to_ranks(x, lora.a[None], lora.scaling), lora.b[None]),
        out_dtype=product_dtype(x, w, params.get("preferred_element_type")),
    )
    return placed(jnp.moveaxis(y, -1, 0) if on_left else y, params)


def _fused(lora: LoraArray, summed: tuple[int, ...], x: Any) -> bool:
    """Returns whether the kernel supports this product: `x @ W.T` for a single matrix, with activations and
    factors of the same dtype.
    """
    if is_value(lora.a) or is_value(lora.b):
        return False
    one_matrix = lora.ndim == lora.a.ndim == lora.b.ndim == 2 and len(summed) == 1
    plain = lora.rank > 0 and lora.magnitude is None and not drops(lora)
    if not (one_matrix and plain and lora.a.dtype == lora.b.dtype == x.dtype):
        return False
    # The stored array must have contiguous rows, so the summed axis (which belongs to `a`) has to be stored
    # last.
    (axis,) = summed
    w = lora.w
    by_rows = w.num_lead == 0 or (w.num_lead == 1 and w.joins(in_columns=False))
    return by_rows and lora.in_axes == (axis - 2,) and w.permutation[axis] == 1
