"""Arithmetic that is done on the scales alone."""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.typing import ArrayLike

from ...core.rules import register, register_on_either_side
from .base import AbstractQuantizedArray


@register("neg")
def _neg(w: AbstractQuantizedArray, **params: Any) -> Any:
    return w.times(jnp.float32(-1))


@register_on_either_side("mul", AbstractQuantizedArray, other=ArrayLike)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    w, factor = (x, y) if isinstance(x, AbstractQuantizedArray) else (y, x)
    return NotImplemented if isinstance(factor, AbstractQuantizedArray) else _scaled(w, jnp.asarray(factor))


@register("div")
def _div(w: AbstractQuantizedArray, y: ArrayLike, **params: Any) -> Any:
    return _scaled(w, 1 / jnp.asarray(y))


def _scaled(w: AbstractQuantizedArray, factor: Any) -> Any:
    """`w` times a scalar. The product is rounded once for each block, not for each element.

    The scales may be frozen, but the factor need not be: it is reached through those of the result."""
    if factor.ndim or not jnp.issubdtype(factor.dtype, jnp.floating):
        return NotImplemented
    return w.opened().times(factor.astype(jnp.float32))
