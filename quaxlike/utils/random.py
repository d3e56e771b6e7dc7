"""Infinite streams of random keys."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._checked import checked

_fold_in_all = jax.jit(jax.vmap(jax.random.fold_in, in_axes=(0, None)))


@checked
def key_chain(rng: jax.Array, shape: SupportsIndex | Sequence[SupportsIndex] = ()) -> Iterator[jax.Array]:
    """Returns an infinite iterator of random keys.

    Counting from zero, item `n` is `fold_in(k, n)` for each `k` in `split(rng, prod(shape))`, reshaped to
    `shape`. In particular it depends only on `rng`, `shape` and `n`. Keys are computed lazily.

    **Arguments:**

    - `rng`: a single key, either new-style (`jax.random.key`) or legacy (`jax.random.PRNGKey`).
    - `shape`: the shape of each item, as an integer or a sequence of integers. Default `()`, i.e. each item
        is a single key.

    **Returns:**

    An iterator of key arrays. These have shape `shape`, or `(*shape, *rng.shape)` for legacy keys.

    **Raises:**

    - `ValueError`: if `rng` isn't a single key, or if `shape` contains a negative number.
    - `TypeError`: if `shape` contains anything other than integers.

    !!! example

        ```python
        from quaxlike.utils import key_chain

        keys = key_chain(jax.random.key(0))
        w = jax.random.normal(next(keys), (3, 4))
        b = jax.random.normal(next(keys), (4,))
        ```
    """
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    try:
        sizes = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise TypeError(f"key_chain: `shape` must be integers, found {shape}.") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"key_chain: `shape` must have no negative number, found {sizes}.")
    is_new_style = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
    if rng.ndim != (0 if is_new_style else 1) or not (is_new_style or rng.dtype == jnp.uint32):
        raise ValueError(
            f"key_chain: `rng` must be one key, found {rng.dtype} of shape {rng.shape}. "
            "Map over several keys with jax.vmap."
        )
    return _chain(rng, sizes)


def _chain(rng: jax.Array, shape: tuple[int, ...]) -> Iterator[jax.Array]:
    if isinstance(rng, Tracer):
        keys = jax.random.split(rng, math.prod(shape))
    else:
        # The first item may be requested inside a transform. The keys outlive it, so don't let it trace them.
        with jax.ensure_compile_time_eval():
            keys = jax.random.split(rng, math.prod(shape))
    n = 0
    while True:
        yield _fold_in_all(keys, np.uint32(n)).reshape(shape + rng.shape)
        n += 1
