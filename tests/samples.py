"""Random arrays, drawn by NumPy: JAX would compile a program for every shape. And a mark of tests."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

wrong_types = pytest.mark.skipif(
    os.environ.get("QUAXLIKE_CHECK_ANNOTATIONS") == "1",
    reason="Checked annotations stand between the callers and the functions, and refuse other types first.",
)


def normal(*shape: int, seed: int = 0, dtype: DTypeLike = "float32") -> jax.Array:
    """Normal numbers of a shape, the same for the same seed."""
    return jnp.asarray(np.random.default_rng([seed, *shape]).standard_normal(shape).astype(jnp.dtype(dtype)))
