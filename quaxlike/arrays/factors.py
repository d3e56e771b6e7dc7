"""Factors of arrays that are made of several parts: what is known of them while tracing."""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import compat


def is_infinite(y: Any) -> bool:
    """Whether a factor is known not to be finite. Applied to each term of a sum, it could make them opposite
    infinities, and the sum NaN."""
    y = compat.literal_of(y)
    return not isinstance(y, jax.core.Tracer) and not np.isfinite(np.asarray(y)).all()


def multiplies_nothing(x: Any, y: Any) -> bool:
    """Whether `x`, and its product with `y`, have no elements. A part of `x` that has some is not to be
    multiplied then: it could become infinite, and its gradient, which is zero, NaN."""
    return 0 in x.shape and np.broadcast_shapes(x.shape, np.shape(y)) == x.shape


def reciprocal(y: Any) -> Any:
    """`1 / y`, known while tracing if `y` is."""
    y = compat.literal_of(y)
    if isinstance(y, jax.core.Tracer):
        return 1 / y
    with jax.core.eval_context():
        return 1 / jnp.asarray(y)
