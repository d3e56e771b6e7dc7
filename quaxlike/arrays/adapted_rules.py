"""Rules converting an adapter's dtype, or multiplying an adapter by factors, regardless of its type.

An adapted array always has its base's dtype, and both kinds of rule preserve this."""

from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..core.quaxify import quaxify
from ..core.rules import register, register_on_either_side
from ..core.values import is_value
from . import precedence
from .adapted import AdaptedArray, array_fields
from .factors import is_infinite, multiplies_nothing, reciprocal


@register("convert_element_type")
def _convert_element_type(x: AdaptedArray, *, new_dtype: Any, **params: Any):
    """Converts the base and all floating-point parts."""
    if not jnp.issubdtype(new_dtype, jnp.floating) or type(x).default is not AdaptedArray.default:
        return NotImplemented

    def converted(part: Any) -> Any:
        floating = jnp.issubdtype(part.dtype, jnp.floating)
        return quaxify(lambda part: part.astype(new_dtype))(part) if floating else part

    fields = {name: getattr(x, name) for name in array_fields(x) if name not in x.numbers}
    out = x.replace(**jtu.tree_map(converted, fields, is_leaf=is_value))
    # The base may not support this dtype.
    return out if out.dtype == new_dtype else NotImplemented


@register_on_either_side("mul", AdaptedArray, other=ArrayLike, precedence=precedence.ADAPTED)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any):
    return _times(x, y) if isinstance(x, AdaptedArray) else _times(y, x)


@register("div", precedence=precedence.ADAPTED)
def _div(x: AdaptedArray, y: ArrayLike, **params: Any):
    return _times(x, reciprocal(y))


@register("neg")
def _neg(x: AdaptedArray, **params: Any):
    return _times(x, jnp.asarray(-1, x.dtype))


def _times(x: AdaptedArray, y: Any) -> Any:
    if multiplies_nothing(x, y):
        return x
    if isinstance(y, AdaptedArray) or is_infinite(y):
        return NotImplemented
    return x.times(jnp.asarray(y))
