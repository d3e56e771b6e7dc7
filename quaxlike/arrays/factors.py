"""Factors for arrays that are made from several parts, and what we know about them during tracing.

If we multiply an array by a factor, then distributing this over the parts is only exact if the factor is
finite, and if every part has elements. The functions below detect the cases in which this doesn't hold.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import compat


def is_infinite(y: Any) -> bool:
    """Returns whether a factor is known to be infinite or NaN.

    Multiplying each term in a sum by such a factor could produce infinities with opposite signs, whose sum
    is NaN.
    """
    y = compat.literal_of(y)
    return not isinstance(y, jax.core.Tracer) and not np.isfinite(np.asarray(y)).all()


def multiplies_nothing(x: Any, y: Any) -> bool:
    """Returns whether neither `x` nor its product with `y` has any elements.

    In this case we mustn't multiply any nonempty part of `x`, since it might become infinite. Its gradient
    would then be NaN rather than zero.
    """
    return 0 in x.shape and np.broadcast_shapes(x.shape, np.shape(y)) == x.shape


def reciprocal(y: Any) -> Any:
    """Returns `1 / y`, whose value is known during tracing if that of `y` is."""
    y = compat.literal_of(y)
    if isinstance(y, jax.core.Tracer):
        return 1 / y
    # If we're called under `jax.jit` then the result would be traced without this.
    with jax.core.eval_context():
        return 1 / jnp.asarray(y)
