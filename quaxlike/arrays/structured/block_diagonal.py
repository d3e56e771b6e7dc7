"""`BlockDiagonalMatrix`: a matrix with equally sized blocks along its diagonal."""

from collections.abc import Callable
from types import NotImplementedType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ...core.values import materialise, replace_fields
from .base import StructuredMatrix, as_part, diagonal_of, lead


class BlockDiagonalMatrix(StructuredMatrix):
    """A matrix with blocks of equal shape along its diagonal, and zeros elsewhere.

    Products take time proportional to the size of the blocks, rather than that of the whole matrix.

    **Arguments:**

    - `blocks`: shape `(*batch, n, p, q)`; the matrix has shape `(*batch, n * p, n * q)`.

    **Raises:**

    `ValueError` if the blocks have fewer than three axes.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.structured import BlockDiagonalMatrix

        b = BlockDiagonalMatrix(jnp.ones((100, 4, 4)))  # 400 x 400
        ql.quaxify(jnp.matmul)(b, jnp.ones(400))
        ```
    """

    blocks: Any = eqx.field(converter=as_part)

    CORE: ClassVar[dict[str, int]] = {"blocks": 3}
    FACTORS = ("blocks",)
    OTHERS = None

    def __check_init__(self) -> None:
        if self.blocks.ndim < 3:
            raise ValueError(
                f"BlockDiagonalMatrix takes blocks of shape (*batch, n, p, q); found {self.blocks.shape}."
            )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        n, p, q = self.blocks.shape[-3:]
        return (n * p, n * q)

    def materialise(self) -> jax.Array:
        blocks = materialise(self.blocks)
        same = jnp.eye(blocks.shape[-3], dtype=bool)[:, None, :, None]
        rows = jnp.where(same, blocks[..., :, :, None, :], jnp.zeros((), blocks.dtype))
        return jnp.reshape(rows, self.shape)

    def _by_block(self, apply: Any, x: Any) -> Any:
        """Applies `apply` to the row blocks of `x`, which has shape (..., n * q, k)."""
        *batch, m, k = x.shape
        n = self.blocks.shape[-3]
        y = apply(jnp.reshape(x, (*batch, n, m // max(n, 1), k)))
        return jnp.reshape(y, (*y.shape[:-3], n * y.shape[-2], k))

    def applied_to(self, x: Any, precision: Any = None, product: Callable[..., Any] = jnp.matmul) -> Any:
        return self._by_block(lambda x: product(self.blocks, x, precision=precision), x)

    def matmul(
        self, other: StructuredMatrix, precision: Any = None
    ) -> "BlockDiagonalMatrix | NotImplementedType":
        p, q = self.blocks.shape[-3:-1], self.blocks.shape[-1]
        if not isinstance(other, BlockDiagonalMatrix) or other.blocks.shape[-3:-1] != (p[0], q):
            return NotImplemented
        return replace_fields(self, blocks=jnp.matmul(self.blocks, other.blocks, precision=precision))

    def multiplied(self, other: StructuredMatrix, by: Any) -> "BlockDiagonalMatrix | NotImplementedType":
        same = isinstance(other, BlockDiagonalMatrix) and self.blocks.shape[-3:] == other.blocks.shape[-3:]
        return self.paired(other, by) if same else NotImplemented

    def plus(self, other: StructuredMatrix, add: Any) -> "BlockDiagonalMatrix | NotImplementedType":
        same = isinstance(other, BlockDiagonalMatrix) and self.blocks.shape[-3:] == other.blocks.shape[-3:]
        return self.paired(other, add) if same else NotImplemented

    def after_diagonal(self, diagonal: Any) -> "BlockDiagonalMatrix":
        by_row = jnp.reshape(diagonal, (*diagonal.shape[:-1], *self.blocks.shape[-3:-1], 1))
        # Either of these may have more batch axes. Align them explicitly: users may have disabled rank
        # promotion.
        ndim = max(by_row.ndim, self.blocks.ndim)
        return replace_fields(self, blocks=lead(by_row, ndim) * lead(self.blocks, ndim))

    def transposed(self) -> "BlockDiagonalMatrix":
        return self.each(lambda blocks, _: jnp.matrix_transpose(blocks))

    def solve(self, b: Any) -> Any:
        n, p, q = self._square()

        def solved(b: Any) -> Any:
            blocks = jnp.broadcast_to(self.blocks, (*b.shape[:-3], n, p, q))
            return jnp.linalg.solve(blocks, b)

        return self._by_block(solved, b)

    def _square(self) -> tuple[int, int, int]:
        n, p, q = self.blocks.shape[-3:]
        if p != q:
            raise ValueError(
                f"A BlockDiagonalMatrix of blocks that are not square has no inverse; found {p} x {q}."
            )
        return n, p, q

    def inverse(self) -> "BlockDiagonalMatrix":
        self._square()
        return self.each(lambda blocks, _: jnp.linalg.inv(blocks))

    def slogdet(self) -> tuple[Any, Any]:
        self._square()
        sign, log = jnp.linalg.slogdet(self.blocks)
        return jnp.prod(sign, -1), jnp.sum(log, -1)

    def det(self) -> Any:
        self._square()
        return jnp.prod(jnp.linalg.det(self.blocks), -1)

    def diagonal_elements(self) -> Any:
        n, p, q = self.blocks.shape[-3:]
        if p == q:
            return jnp.reshape(diagonal_of(self.blocks), (*self.batch, n * p))
        # If the blocks aren't square, some of the diagonal is outside them.
        i = jnp.arange(min(self.matrix_shape))
        inside = self.blocks[..., i // p, i % p, i % q]
        return jnp.where(i // p == i // q, inside, jnp.zeros_like(inside))
