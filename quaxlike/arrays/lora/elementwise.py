"""Scaling and addition of adapted arrays."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ..adapted import alike_in_training, with_trainable_base
from ..dot_axes import arrange, cast
from ..factors import is_infinite, multiplies_nothing, reciprocal
from .array import RANK, LoraArray, has_all_axes, labels, plainly_scaled
from .shape import alike, joined


@register_on_either_side("mul", LoraArray, other=ArrayLike)
def _mul(primitive: Primitive, x: Any, y: Any, **params: Any):
    return _times(x, y) if isinstance(x, LoraArray) else _times(y, x)


@register("div")
def _div_array(x: LoraArray, y: ArrayLike, **params: Any):
    return _times(x, reciprocal(y))


@register("neg")
def _neg(x: LoraArray, **params: Any):
    return _times(x, jnp.asarray(-1, x.dtype))


def _times(x: LoraArray, y: Any) -> Any:
    """Multiplies by a scalar, or by a number for each row or each column, which one factor absorbs."""
    if multiplies_nothing(x, y):
        return x
    if isinstance(y, LoraArray) or is_infinite(y):
        return NotImplemented
    y = jnp.asarray(y)
    if x.magnitude is not None:
        return NotImplemented if y.ndim else x.replace(magnitude=x.magnitude * cast(y, x.magnitude.dtype))
    _, a_labels, b_labels = labels(x)
    varying = [i for i, size in enumerate(y.shape) if size != 1]
    field, own = ("b", b_labels) if set(varying) <= set(b_labels) else ("a", a_labels)
    fits = set(varying) <= set(own) and all(y.shape[i] == x.shape[i] for i in varying)
    if y.ndim and not (fits and y.ndim == x.ndim and has_all_axes(x)):
        return NotImplemented
    factor = getattr(x, field)
    numbers = arrange(jax.lax.squeeze(y, [i for i in range(y.ndim) if i not in varying]), varying, own)
    w = quaxify(jnp.multiply)(x.base, y)
    return _kept(x, y).replace(w=w, **{field: factor * cast(numbers, factor.dtype)})


@register_on_either_side(["add", "sub"], LoraArray, other=ArrayLike)
def _add(primitive: Primitive, x: Any, y: Any, **params: Any):
    if primitive.name == "sub":
        y = _neg(y) if isinstance(y, LoraArray) else -jnp.asarray(y)
    if isinstance(x, LoraArray) and isinstance(y, LoraArray):
        return _sum(x, y)
    return _plus(x, y) if isinstance(x, LoraArray) else _plus(y, x)


def _plus(x: LoraArray, y: Any) -> Any:
    """Adds a scalar, or an array of the same shape, to the base."""
    if x.magnitude is not None or x.w.shape != x.shape or jnp.shape(y) not in ((), x.shape):
        return NotImplemented
    return _kept(x, y).replace(w=quaxify(jnp.add)(x.base, y))


def _kept(x: LoraArray, y: Any) -> LoraArray:
    """`x` with gradients through its base if they may have to reach `y`."""
    return with_trainable_base(x) if isinstance(y, jax.core.Tracer) else x


def _sum(x: LoraArray, y: LoraArray) -> Any:
    """Concatenates the adapters along the rank, over the sum of the bases."""
    loras = alike((x, y))
    if loras is None or x.shape != y.shape or x.magnitude is not None:
        return NotImplemented
    x, y = map(plainly_scaled, alike_in_training(loras))
    _, a_labels, b_labels = labels(x)
    return x.replace(
        w=quaxify(jnp.add)(x.base, y.base),
        a=joined([x.a, y.a], a_labels.index(RANK)),
        b=joined([x.b, y.b], b_labels.index(RANK)),
        alpha=float(x.rank + y.rank),
    )
