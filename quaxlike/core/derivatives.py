"""Derivatives of Values as returned by JAX, without tangents for indices, codes and keys.

In place of tangents for integer leaves, JAX returns float0 arrays (or zeros, for `jax.jacfwd`). A Value with
such leaves has lost its pattern, and would silently give incorrect results as an array. So we raise an error
instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from . import compat
from .source_lines import calling_frame, is_internal


def is_derivative_alone(leaves: Sequence[Any]) -> bool:
    """Returns whether these leaves (or avals) belong to a derivative without its integer leaves."""
    return any(getattr(leaf, "dtype", None) == jax.dtypes.float0 for leaf in leaves)


def derivative_alone(cls: type) -> ValueError:
    """Returns the error for using a derivative without its pattern."""
    return ValueError(
        f"The derivative of a function that returns {cls.__qualname__} was used as an array. JAX "
        "gives leaves that are not inexact, such as indices or codes, no tangents, so it stands for none. "
        "Differentiate a function that returns an array, `quaxlike.materialise(...)`, or use the leaves of "
        "the derivative."
    )


def _is_result_for_jacfwd(frame: Any) -> bool:
    """Returns whether this frame's function returns its result directly to `jax.jacfwd`.

    There must be no frame of any other function in between, including our trace. (It's in between if a rule
    calls `quaxify` while JAX evaluates a derivative, e.g. the rule for a `NamedArray` of a quantised array.)
    """
    # JAX only fills in the zeros after this function has returned, and has no hook for it. So inspect the
    # calling frames.
    while frame is not None and is_internal(frame.f_code.co_filename):
        if compat.is_jacfwd(frame):
            return True
        if frame.f_globals.get("__name__") == f"{__package__}.trace":
            return False
        frame = frame.f_back
    return False


def check_jacobian(out: Any, is_value: Callable[[Any], bool]) -> Any:
    """Returns `out`. Raises an error if `jax.jacfwd` would destroy the pattern of any Value in it."""
    if not _is_result_for_jacfwd(calling_frame()):
        return out
    for value in filter(is_value, jtu.tree_leaves(out, is_leaf=is_value)):
        if not all(jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact) for leaf in jtu.tree_leaves(value)):
            raise TypeError(
                f"jax.jacfwd of a function that returns {type(value).__qualname__}: JAX puts zeros "
                "where leaves that are not inexact, such as indices or codes, have no tangents, so the "
                "result would stand for other numbers. Return an array: `jax.jacfwd(lambda x: "
                "quaxlike.materialise(f(x)))`."
            )
    return out
