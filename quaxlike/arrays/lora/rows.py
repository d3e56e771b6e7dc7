"""Rows of an embedding that are trained, beside the adapters."""

from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
from jax import lax
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify
from ...core.rules import register
from ...core.values import is_value, materialise
from .array import frozen
from .beside import Beside


class TrainableRows(Beside):
    """A frozen matrix, some of whose rows are replaced by others, which are trained.

    `loraify(..., trainable_token_indices=...)` puts it in place: embeddings of a few tokens are trained, and
    an adapter's file holds these alone. Looking rows up reads no more of the matrix than without it; all
    other computations take it as the array that it is.

    **Arguments:**

    - `w`: the matrix, `(n, size)`.
    - `rows`: the trained ones, `(len(indices), size)`.
    - `indices`: which rows of the matrix these stand for; each once.
    """

    w: Any
    rows: jax.Array
    indices: tuple[int, ...] = eqx.field(static=True)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.w.shape, self.w.dtype)

    def materialise(self) -> jax.Array:
        w = frozen(self.w)
        return _replaced(materialise(w) if is_value(w) else w, self)

    def merged(self) -> jax.Array:
        """The matrix with the trained rows in it."""
        return self.materialise()


def _replaced(w: Any, x: TrainableRows) -> jax.Array:
    return w.at[jnp.asarray(x.indices)].set(x.rows.astype(w.dtype))


@register("gather")
def _gather(x: TrainableRows, start: ArrayLike, *, dimension_numbers: Any, slice_sizes: Any, **params: Any):
    d, (n, size) = dimension_numbers, x.shape
    whole_rows = tuple(slice_sizes) == (1, size) and tuple(d.collapsed_slice_dims) == (0,)
    if not whole_rows or tuple(d.start_index_map) != (0,) or d.operand_batching_dims:
        return NotImplemented
    look_up = lambda w, at: lax.gather_p.bind(w, at, dimension_numbers=d, slice_sizes=slice_sizes, **params)
    start = jnp.asarray(start)
    known = jnp.asarray(x.indices, start.dtype).reshape((1,) * (start.ndim - 1) + (-1,))
    at = jnp.clip(start, 0, n - 1) if params["mode"] == lax.GatherScatterMode.CLIP else start
    same = at == known  # the last axis of `start` has one entry
    own = look_up(x.rows.astype(x.dtype), jnp.argmax(same, axis=-1, keepdims=True).astype(start.dtype))
    found = jnp.expand_dims(jnp.any(same, axis=-1), d.offset_dims)
    return jnp.where(found, own, quaxify(look_up)(frozen(x.w), start))
