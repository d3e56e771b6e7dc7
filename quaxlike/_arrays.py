"""Conversions to JAX arrays."""

import reprlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# XLA's CPU backend copies arrays not aligned to this many bytes.
_ALIGNMENT = 64


def as_array(x: Any) -> jax.Array:
    """Converts `x` to a JAX array. Use this as the converter of a public type's field.

    **Raises:** `TypeError` if `x` cannot be converted.
    """
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        found = reprlib.repr(x)
    raise TypeError(f"expected an array or a number; found {found}, of type {type(x).__name__}.")


def from_numpy(array: np.ndarray) -> jax.Array:
    """Copies a NumPy array to the default device.

    Since JAX 0.10, `jnp.asarray` compiles a program for each shape. For most tensors in a checkpoint this
    takes longer than reading them. `jax.device_put` avoids it, but on a CPU its result shares memory with an
    aligned array. So pass it an aligned copy.
    """
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return jax.device_put(copy)
