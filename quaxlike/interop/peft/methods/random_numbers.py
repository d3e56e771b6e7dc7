"""The random numbers of PyTorch's generator on CPUs, from which PEFT draws what its files leave out.

It is the Mersenne Twister of NumPy's `RandomState`. Numbers agree bit by bit.
"""

import math

import jax.numpy as jnp
import numpy as np


class Generator:
    """`torch.Generator().manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed % 2**32)

    def _words(self, count: int) -> np.ndarray:
        return self._state.randint(0, 2**32, count, dtype=np.uint32)

    def uniform(self, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        """`torch.empty(shape).uniform_(low, high)`, in float32."""
        low32, high32 = np.float32(low), np.float32(high)
        unit = (self._words(math.prod(shape)) & 0xFFFFFF) * 2.0**-24
        wide = unit * np.float64(high32 - low32) + np.float64(low32)
        return wide.astype(np.float32).reshape(shape)

    def uniform_bfloat16(self, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        """The same in bfloat16."""
        out = self.uniform(shape, low, high).astype(jnp.bfloat16)
        ends = np.asarray([low, high], np.float32).astype(jnp.bfloat16)
        return np.where(out == ends[1], ends[0], out)

    def permutation(self, n: int, first: int) -> np.ndarray:
        """The `first` entries of `torch.randperm(n)`."""
        moved: dict[int, int] = {}
        for k, word in enumerate(self._words(min(first, n - 1))):
            j = k + int(word) % (n - k)
            moved[k], moved[j] = moved.get(j, j), moved.get(k, k)
        return np.asarray([moved.get(k, k) for k in range(first)], np.int32)
