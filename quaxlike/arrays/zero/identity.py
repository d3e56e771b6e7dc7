"""`Identity`: the identity matrix."""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..._checked import checked
from ...core.operators import ArrayOperators
from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue
from ...primitives.classes import ZERO_PRESERVING
from .. import precedence
from ..dot_axes import dot_axes
from .constants import Full, apply, as_dtype, broadcast_like, known, result

# Tried after `Zero`: zero times the identity is zero.


class Identity(ArrayOperators, ArrayValue):
    """The identity matrix.

    **Arguments:**

    - `n`: its size; the shape is `(n, n)`.
    - `dtype`: default float.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.zero import Identity

        x = jnp.ones((3, 4))
        ql.quaxify(jnp.matmul)(Identity(3), x)  # x itself
        ```
    """

    n: int = eqx.field(static=True)
    _dtype: np.dtype = eqx.field(static=True)

    @checked
    def __init__(self, n: int, dtype: Any = float) -> None:
        self.n = n
        self._dtype = as_dtype(dtype)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray((self.n, self.n), self._dtype)

    def materialise(self) -> jax.Array:
        return jnp.eye(self.n, dtype=self._dtype)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.TextDoc(f"Identity({self.aval().str_short()})")


@register_on_either_side("dot_general", Identity, precedence=precedence.IDENTITY)
def _dot_general(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    on_left = isinstance(x, Identity)
    own, other = (x, y) if on_left else (y, x)
    _, (axes, batch, _, _) = dot_axes(own, other, params["dimension_numbers"], on_left=on_left)
    if not axes or batch:
        return NotImplemented
    if type(x) is type(y) and len(axes) == 2:
        out = jnp.asarray(x.n)
    elif len(axes) == 2:
        out = quaxify(functools.partial(jnp.trace, axis1=axes[0], axis2=axes[1]))(other)
    else:  # the other axis of the identity replaces the contracted one, and comes first or last
        out = quaxify(jnp.moveaxis)(other, axes[0], 0 if on_left else -1)
    return broadcast_like(out, result(primitive, (x, y), params))


@register("transpose")
def _transpose(x: Identity, **params: Any) -> Identity:
    return x


@register(ZERO_PRESERVING)
def _elementwise(primitive: Primitive, x: Identity, **params: Any) -> Any:
    """Applies a function that maps 0 to 0 and 1 to 1."""
    one = apply(functools.partial(primitive.bind, **params), Full(1, (), x.dtype), shape=())
    return Identity(x.n, one.dtype) if known(one) == 1 else NotImplemented


@register("reduce_sum")
def _reduce_sum(x: Identity, *, axes: Sequence[int], **params: Any) -> Full | Identity:
    if not axes:
        return x
    return Full(x.n, (), x.dtype) if len(axes) == 2 else Full(1, (x.n,), x.dtype)


# The identity is its own LU factor, so `jnp.linalg.solve` and `inv` simplify as well.


@register("lu")
def _lu(x: Identity, **params: Any) -> list[Any]:
    order = jnp.arange(x.n, dtype=jnp.int32)
    return [x, order, order]


@register("triangular_solve", precedence=precedence.IDENTITY)
def _triangular_solve(x: Identity, y: ArrayLike | ArrayValue, **params: Any) -> Any:
    return y
