"""Addition of adapted arrays."""

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register_on_either_side
from ..adapted import alike_in_training, reached_by
from ..axis_rules import concatenated
from .array import RANK, LoraArray, labels, plainly_scaled
from .shape import alike


@register_on_either_side(["add", "sub"], LoraArray, other=ArrayLike)
def _add(primitive: Primitive, x: Any, y: Any, **params: Any):
    if primitive.name == "sub":
        y = y.times(jnp.asarray(-1, y.dtype)) if isinstance(y, LoraArray) else -jnp.asarray(y)
    if isinstance(x, LoraArray) and isinstance(y, LoraArray):
        return _sum(x, y)
    return _plus(x, y) if isinstance(x, LoraArray) else _plus(y, x)


def _plus(x: LoraArray, y: Any) -> Any:
    """Adds a scalar, or an array with the same shape, to the base."""
    if x.magnitude is not None or x.w.shape != x.shape or jnp.shape(y) not in ((), x.shape):
        return NotImplemented
    return reached_by(x, y).replace(w=quaxify(jnp.add)(x.base, y))


def _sum(x: LoraArray, y: LoraArray) -> Any:
    """Adds the bases, and concatenates the adapters along the rank."""
    loras = alike((x, y))
    if loras is None or x.shape != y.shape or x.magnitude is not None:
        return NotImplemented
    x, y = map(plainly_scaled, alike_in_training(loras))
    _, a_labels, b_labels = labels(x)
    return x.replace(
        w=quaxify(jnp.add)(x.base, y.base),
        a=concatenated([x.a, y.a], a_labels.index(RANK)),
        b=concatenated([x.b, y.b], b_labels.index(RANK)),
        alpha=float(x.rank + y.rank),
    )
