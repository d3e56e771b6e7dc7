"""Moves NumPy arrays to devices."""

import jax
import numpy as np

# XLA's CPU backend copies arrays that aren't aligned like this.
_ALIGNMENT = 64


def from_numpy(array: np.ndarray) -> jax.Array:
    """Copies a NumPy array to the default device.

    Since JAX 0.10, `jnp.asarray` compiles a program for each shape, which takes longer than reading most of a
    checkpoint's tensors. `jax.device_put` doesn't, but on a CPU its result shares memory with an aligned
    array, so we give it an aligned copy of our own.
    """
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return jax.device_put(copy)
