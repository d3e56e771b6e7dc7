"""A block-sparse weight, its dense form and its BCOO form in JAX, forward and backward."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from quaxlike.kernels import block_sparse_matmul, transposed_index

from .timing import rotations

Fn = Callable[..., Any]


class Case:
    """A random `(size, size)` weight of which a share of the blocks is stored, as many in each row."""

    def __init__(
        self, size: int, b: int, density: float, m: int, dtype: Any, rng: np.random.Generator
    ) -> None:
        self.size, self.b, self.m, self.dtype = size, b, m, dtype
        rows = size // b
        slots = max(1, round(density * rows))
        columns = [np.sort(rng.permutation(rows)[:slots]) for _ in range(rows)]
        self.col_idx = np.stack(columns).astype(np.int32)
        self.transposed_idx = transposed_index(self.col_idx, rows)
        self.count = rotations(rows * slots * b * b * dtype.itemsize)
        normal = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), dtype)
        self.blocks = [normal(rows, slots, b, b) for _ in range(self.count)]
        self.x = [normal(m, size) for _ in range(self.count)]

    def operands(self) -> list[tuple[Any, ...]]:
        return list(zip(self.x, self.blocks, strict=True))

    def dense_operands(self) -> list[tuple[Any, ...]]:
        return [(x, self._densify(w)) for x, w in self.operands()]

    def bcoo_operands(self) -> list[tuple[Any, ...]]:
        return [(x, sparse.BCOO.fromdense(self._densify(w))) for x, w in self.operands()]

    def ours(self, way: str) -> Fn:
        index = jnp.asarray(self.col_idx), jnp.asarray(self.transposed_idx)
        return _with_backward(lambda x, blocks: block_sparse_matmul(x, blocks, *index), way)

    def dense(self, way: str) -> Fn:
        return _with_backward(lambda x, w: x @ w.T, way)

    def bcoo(self, way: str) -> Fn:
        def product(x: Any, w: Any) -> Any:
            return (w @ x.T).T

        if way == "forward":
            return product

        def both(x: Any, w: Any) -> Any:
            of_data = lambda x, data: product(x, sparse.BCOO((data, w.indices), shape=w.shape))
            return _with_backward(of_data, way)(x, w.data)

        return both

    def expected(self, way: str) -> Any:
        """What `ours` gives for the first operands, by way of the dense product in float32."""
        index = np.arange(len(self.col_idx))[:, None], self.col_idx
        x, w = (z.astype(jnp.float32) for z in self.dense_operands()[0])
        with jax.default_matmul_precision("highest"):
            out = self.dense(way)(x, w)
        if way == "forward":
            return out
        y, (of_x, of_w) = out
        rows = self.size // self.b
        return y, (of_x, jnp.moveaxis(of_w.reshape(rows, self.b, rows, self.b), 2, 1)[index])

    def costs(self, way: str) -> tuple[float, float]:
        """Bytes and floating-point operations."""
        blocks = self.blocks[0].size
        passes = 1 if way == "forward" else 3
        traffic = (blocks + 2 * self.m * self.size) * self.dtype.itemsize
        return passes * traffic, passes * 2.0 * self.m * blocks

    def _densify(self, blocks: Any) -> Any:
        rows = self.size // self.b
        full = jnp.zeros((rows, rows, self.b, self.b), self.dtype)
        full = full.at[np.arange(rows)[:, None], self.col_idx].set(blocks)
        return jnp.moveaxis(full, 2, 1).reshape(self.size, self.size)


def _with_backward(fn: Fn, way: str) -> Fn:
    """A function, or its result together with both of its gradients."""
    if way == "forward":
        return fn

    def both(x: Any, w: Any) -> Any:
        y, pullback = jax.vjp(fn, x, w)
        return y, pullback(y)

    return both
