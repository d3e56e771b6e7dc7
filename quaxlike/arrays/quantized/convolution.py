"""Convolutions with a quantised kernel, forward and backward."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jaxtyping import Array, ArrayLike

from ...core.rules import register
from .base import AbstractQuantizedArray
from .shape import with_free_axes


@register("conv_general_dilated")
def _conv(primitive: Primitive, x: ArrayLike, w: AbstractQuantizedArray, **params: Any) -> Any:
    """Decodes the kernel for the product, and again for the backward pass: only codes are residuals."""

    @jax.checkpoint
    def product(x: Array, w: AbstractQuantizedArray) -> Array:
        return primitive.bind(x, w.materialise(), **params)

    return product(jnp.asarray(x), w)


@register("rev")
def _rev(w: AbstractQuantizedArray, *, dimensions: Sequence[Any], **params: Any) -> Any:
    """Reverses the window of a kernel, as the gradient of a convolution does."""
    dimensions = [axis for axis in dimensions if w.shape[axis] != 1]
    free = with_free_axes(w, dimensions)
    if free is None:
        return NotImplemented
    return jax.tree.map(lambda leaf: lax.rev(leaf, [free.permutation[axis] for axis in dimensions]), free)
