"""Random arrays, drawn by NumPy: JAX would compile a program for every shape."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def normal(*shape: int, seed: int = 0, dtype: DTypeLike = "float32") -> jax.Array:
    """Normal numbers of a shape, the same for the same seed."""
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype)))
