"""Factors for arrays made from several parts, and what is known about them during tracing.

Distributing a factor over an array's parts is only exact if the factor is finite, and if every part has
elements. The functions below detect when this doesn't hold.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import compat


def is_infinite(y: Any) -> bool:
    """Returns whether a factor is known to be infinite or NaN.

    Multiplying each term in a sum by this factor can give infinities with opposite signs, which add up to
    NaN.
    """
    y = compat.literal_of(y)
    return not isinstance(y, jax.core.Tracer) and not np.isfinite(np.asarray(y)).all()


def multiplies_nothing(x: Any, y: Any) -> bool:
    """Returns whether neither `x` nor its product with `y` has any elements.

    If so, we mustn't multiply any nonempty part of `x`: it may become infinite, and its gradient would then
    be NaN rather than zero.
    """
    return 0 in x.shape and np.broadcast_shapes(x.shape, np.shape(y)) == x.shape


def reciprocal(y: Any) -> Any:
    """Returns `1 / y`, with a known value during tracing if `y` has one."""
    y = compat.literal_of(y)
    if isinstance(y, jax.core.Tracer):
        return 1 / y
    # Without this, the result would be traced under `jax.jit`.
    with jax.core.eval_context():
        return 1 / jnp.asarray(y)
