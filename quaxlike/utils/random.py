"""Random keys."""

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
    """An infinite iterator of random keys.

    Item `n` (from 0) is `fold_in(k, n)` for each `k` of `split(rng, prod(shape))`, reshaped to `shape`. It
    depends only on `rng`, `shape` and `n`. Keys are computed on demand.

    **Arguments:**

    - `rng`: one key, new-style (`jax.random.key`) or legacy (`jax.random.PRNGKey`).
    - `shape`: each item's shape, as one integer or several. Default `()`: one key.

    **Returns:**

    An iterator of arrays of keys, with shape `shape`, or `(*shape, *rng.shape)` for legacy keys.

    **Raises:**

    - `ValueError`: if `rng` is not one key, or `shape` contains a negative number.
    - `TypeError`: if `shape` contains anything but integers.

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
        # The first item might be computed inside a transform, whose tracers we mustn't leak.
        with jax.ensure_compile_time_eval():
            keys = jax.random.split(rng, math.prod(shape))
    n = 0
    while True:
        yield _fold_in_all(keys, np.uint32(n)).reshape(shape + rng.shape)
        n += 1
