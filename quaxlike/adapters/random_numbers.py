"""PyTorch's random number generator on CPU, and the matrices that PEFT draws with it.

PEFT can omit these matrices from VeRA and RandLoRA files, so loading these adapters must reproduce them
bitwise. PyTorch uses the same Mersenne Twister as NumPy's `RandomState`, so we can do this without PyTorch.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np


class Generator:
    """Equivalent to `torch.Generator().manual_seed(seed)`."""

    def __init__(self, seed: int) -> None:
        self._state = np.random.RandomState(seed % 2**32)

    def _words(self, count: int) -> np.ndarray:
        return self._state.randint(0, 2**32, count, dtype=np.uint32)

    def uniform(self, shape: tuple[int, ...], low: float | int, high: float | int) -> np.ndarray:
        """As `torch.empty(shape).uniform_(low, high)` in float32."""
        low32, high32 = np.float32(low), np.float32(high)
        unit = (self._words(math.prod(shape)) & 0xFFFFFF) * 2.0**-24
        wide = unit * np.float64(high32 - low32) + np.float64(low32)
        return wide.astype(np.float32).reshape(shape)

    def uniform_bfloat16(self, shape: tuple[int, ...], low: float | int, high: float | int) -> np.ndarray:
        """As `uniform`, but in bfloat16.

        Rounding to bfloat16 can produce `high` itself, which PyTorch then replaces by `low`.
        """
        out = self.uniform(shape, low, high).astype(jnp.bfloat16)
        ends = np.asarray([low, high], np.float32).astype(jnp.bfloat16)
        return np.where(out == ends[1], ends[0], out)

    def permutation(self, n: int, first: int) -> np.ndarray:
        """Returns the first `first` entries of `torch.randperm(n)`.

        `n` can be as large as a weight, so this Fisher-Yates shuffle only stores the entries swapped so far.
        """
        moved: dict[int, int] = {}
        for k, word in enumerate(self._words(min(first, n - 1))):
            j = k + int(word) % (n - k)
            moved[k], moved[j] = moved.get(j, j), moved.get(k, k)
        return np.asarray([moved.get(k, k) for k in range(first)], np.int32)


def vera_projections(generator: Generator, n: int, m: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws VeRA's matrices of shapes `(rank, n)` and `(m, rank)`, for up to `n` inputs and `m` outputs."""
    of_a, of_b = math.sqrt(6 / n), math.sqrt(6 / rank)
    return generator.uniform((rank, n), -of_a, of_a), generator.uniform((m, rank), -of_b, of_b)


def randlora_projections(
    generator: Generator, n: int, m: int, rank: int, sparsity: str
) -> tuple[np.ndarray, np.ndarray]:
    """Draws RandLoRA's matrices of shapes `(rank, 1, n)` and `(m, ceil(n / rank), rank)`.

    Here `n` and `m` are the maximum number of inputs and outputs over all layers, ordered so that `n <= m`.
    """
    bases = math.ceil(n / rank)
    if sparsity == "dense":
        a = generator.uniform_bfloat16((rank, 1, n), -1 / math.sqrt(n), 1 / math.sqrt(n))
        bound = 1 / math.sqrt(rank)
        b = np.concatenate([generator.uniform_bfloat16((m, 1, rank), -bound, bound) for _ in range(bases)], 1)

        def half(x: Any) -> Any:
            return x.astype(jnp.bfloat16).astype(np.float32)

        def normed(x: Any) -> Any:
            return half(half(x) / half(np.float32(np.std(x.astype(np.float64), ddof=1))))

        return normed(a), normed(b)
    s = math.sqrt(n) if sparsity == "very_sparse" else 3
    signs = []
    for shape in ((rank, 1, n), (m, bases, rank)):
        u = generator.uniform(shape, 0, 1)
        x = np.where(u < 1 / (2 * s), -1, np.where(u > 1 - 1 / (2 * s), 1, 0)).astype(np.float64)
        signs.append((x / np.std(x, ddof=1)).astype(np.float32))
    return signs[0], signs[1]
