"""Arithmetic that is done on the scales alone."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.typing import ArrayLike

from quaxlike.core.either_side import register_on_either_side
from quaxlike.core.rules import register

from .base import AbstractQuantizedArray
from .scales import NestedScales


@register("neg")
def _neg(w: AbstractQuantizedArray, **params: Any) -> Any:
    return _scaled(w, jnp.float32(-1))


@register_on_either_side("mul", AbstractQuantizedArray, other=ArrayLike)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    w, factor = (x, y) if isinstance(x, AbstractQuantizedArray) else (y, x)
    return NotImplemented if isinstance(factor, AbstractQuantizedArray) else _scaled(w, jnp.asarray(factor))


@register("div")
def _div(w: AbstractQuantizedArray, y: ArrayLike, **params: Any) -> Any:
    return _scaled(w, 1 / jnp.asarray(y))


def _scaled(w: AbstractQuantizedArray, factor: Any) -> Any:
    """`w` times a scalar. The product is rounded once for each block, not for each element."""
    if factor.ndim or not jnp.issubdtype(factor.dtype, jnp.floating):
        return NotImplemented
    factor = factor.astype(jnp.float32)
    if isinstance(w.scale, NestedScales):
        scale = dataclasses.replace(w.scale, absmax=w.scale.absmax * factor, offset=w.scale.offset * factor)
    else:
        scale = w.scale * factor
    return dataclasses.replace(w, scale=scale)
