"""Factors of arrays made from several parts: what we know about them during tracing.

Distributing a product over parts is exact only for finite factors, and only if every part has elements. These
functions say when it is not.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..core import compat


def is_infinite(y: Any) -> bool:
    """Returns whether a factor is known to be infinite or NaN.

    Applied to each term of a sum, it could turn them into opposite infinities, and the sum into NaN.
    """
    y = compat.literal_of(y)
    return not isinstance(y, jax.core.Tracer) and not np.isfinite(np.asarray(y)).all()


def multiplies_nothing(x: Any, y: Any) -> bool:
    """Returns whether neither `x` nor its product with `y` has any elements.

    Then we may not multiply any nonempty part of `x`: it could become infinite, and its gradient, which is
    zero, NaN.
    """
    return 0 in x.shape and np.broadcast_shapes(x.shape, np.shape(y)) == x.shape


def reciprocal(y: Any) -> Any:
    """`1 / y`, known during tracing if `y` is."""
    y = compat.literal_of(y)
    if isinstance(y, jax.core.Tracer):
        return 1 / y
    with jax.core.eval_context():
        return 1 / jnp.asarray(y)
