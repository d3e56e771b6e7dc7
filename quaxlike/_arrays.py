"""Moves NumPy arrays to devices."""

import jax
import numpy as np

# XLA's CPU backend copies an array whose memory isn't aligned to this many bytes.
_ALIGNMENT = 64


def from_numpy(array: np.ndarray) -> jax.Array:
    """Copies a NumPy array to the default device.

    Since JAX 0.10, `jnp.asarray` compiles a program for each shape. For most of the tensors in a checkpoint
    this takes longer than reading them. We can avoid it by using `jax.device_put`, except that on a CPU its
    result shares memory with an aligned array. So we make an aligned copy and pass this instead.
    """
    room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return jax.device_put(copy)
