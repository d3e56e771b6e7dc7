"""Arithmetic that is done on the scales alone."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from quaxlike.core.rules import register

from .base import AbstractQuantizedArray
from .scales import NestedScales


@register("neg")
def _neg(w: AbstractQuantizedArray, **params: Any) -> Any:
    return _scaled(w, jnp.float32(-1))


@register("mul")
def _mul(w: AbstractQuantizedArray, y: ArrayLike, **params: Any) -> Any:
    return _scaled(w, jnp.asarray(y))


@register("mul")
def _mul_left(x: ArrayLike, w: AbstractQuantizedArray, **params: Any) -> Any:
    return _scaled(w, jnp.asarray(x))


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
