"""Numbers that are shared by a whole batch."""

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_batching.custom_vmap
def largest_of_batch(x: Any) -> Any:
    """`x` itself; under `jax.vmap`, the largest `x` of the batch, for every item."""
    return x


@largest_of_batch.def_vmap
def _largest_of_batch_vmap(axis_size: int, in_batched: Any, x: Any) -> Any:
    return largest_of_batch(jnp.max(x, axis=0) if in_batched[0] else x), False
