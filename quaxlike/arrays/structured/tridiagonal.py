"""`TridiagonalMatrix`: a matrix with nonzeros only on its diagonal and the two adjacent diagonals."""

from collections.abc import Callable
from types import NotImplementedType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...core.values import replace_fields
from .base import StructuredMatrix, as_part, check_batches, lead, sign_of


class TridiagonalMatrix(StructuredMatrix):
    """A square matrix with nonzeros only on its diagonal and the two adjacent diagonals.

    **Arguments:**

    - `lower`: the subdiagonal; shape `(*batch, n - 1)`.
    - `diagonal`: shape `(*batch, n)`.
    - `upper`: the superdiagonal; shape `(*batch, n - 1)`.

    **Raises:**

    `ValueError` if the shapes are inconsistent.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.structured import TridiagonalMatrix

        n = 1000  # one implicit step of heat conduction
        heat = TridiagonalMatrix(-jnp.ones(n - 1), 3 * jnp.ones(n), -jnp.ones(n - 1))
        ql.quaxify(jnp.linalg.solve)(heat, jnp.ones(n))
        ```
    """

    lower: Any = eqx.field(converter=as_part)
    diagonal: Any = eqx.field(converter=as_part)
    upper: Any = eqx.field(converter=as_part)

    linear = True
    CORE: ClassVar[dict[str, int]] = {"lower": 1, "diagonal": 1, "upper": 1}
    FACTORS = ("lower", "diagonal", "upper")
    OTHERS = None

    def __check_init__(self) -> None:
        check_batches(self)
        n = self.diagonal.shape[-1]
        if not self.lower.shape[-1] == self.upper.shape[-1] == max(n - 1, 0):
            raise ValueError(
                f"TridiagonalMatrix with a diagonal of length {n} takes lower and upper of length {n - 1}; "
                f"found {self.lower.shape[-1]} and {self.upper.shape[-1]}."
            )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        n = self.diagonal.shape[-1]
        return (n, n)

    def materialise(self) -> jax.Array:
        parts, out = self.stacked().parts, jnp.zeros(self.shape, self.dtype)
        for name, place in self.places().items():
            out = out.at[..., *place].set(parts[name].astype(self.dtype), unique_indices=True)
        return out

    def places(self) -> dict[str, tuple[Any, Any]]:
        at = np.arange(self.diagonal.shape[-1])
        return {"lower": (at[1:], at[:-1]), "diagonal": (at, at), "upper": (at[:-1], at[1:])}

    def diagonal_block(self, rows: slice) -> "TridiagonalMatrix | NotImplementedType":
        if rows.step != 1 or rows.stop <= rows.start:
            return NotImplemented
        beside = slice(rows.start, rows.stop - 1)
        lower, diagonal, upper = self.lower[..., beside], self.diagonal[..., rows], self.upper[..., beside]
        return replace_fields(self, lower=lower, diagonal=diagonal, upper=upper)

    def applied_to(self, x: Any, precision: Any = None, product: Callable[..., Any] = jnp.matmul) -> Any:
        lower, diagonal, upper = (lead(jnp.expand_dims(part, -1), x.ndim) for part in self.parts.values())
        if x.shape[-2] < 2:
            return diagonal * x
        # The elements below and above the diagonal multiply the previous and the next row of `x`.
        below, above = lower * x[..., :-1, :], upper * x[..., 1:, :]
        rows = [(0, 0)] * (below.ndim - 2)
        below, above = jnp.pad(below, [*rows, (1, 0), (0, 0)]), jnp.pad(above, [*rows, (0, 1), (0, 0)])
        return diagonal * x + below + above

    def transposed(self) -> "TridiagonalMatrix":
        return replace_fields(self, lower=self.upper, upper=self.lower)

    def solve(self, b: Any) -> Any:
        if self.diagonal.shape[-1] < 2:
            return b / lead(jnp.expand_dims(self.diagonal, -1), b.ndim)
        lower, diagonal, upper = self._padded(b.shape[:-2])
        return lax.linalg.tridiagonal_solve(lower, diagonal, upper, b)

    def _padded(self, batch: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Returns all three diagonals, padded to one element per row."""
        full = self.stacked(batch)
        zero = jnp.zeros((*batch, 1), self.dtype)
        lower = jnp.concatenate([zero, full.lower], -1)
        return lower, full.diagonal, jnp.concatenate([full.upper, zero], -1)

    def inverse(self) -> Any:
        return self.solve(jnp.broadcast_to(jnp.eye(self.diagonal.shape[-1], dtype=self.dtype), self.shape))

    def slogdet(self) -> tuple[Any, Any]:
        """Eliminates with partial pivoting between adjacent rows, like LAPACK's `gttrf`, in O(n)."""
        if self.diagonal.shape[-1] == 0:
            return jnp.ones(self.batch, self.dtype), jnp.zeros(self.batch, jnp.finfo(self.dtype).dtype)
        lower, diagonal, upper = (jnp.moveaxis(x, -1, 0) for x in self._padded(self.batch))

        def eliminate(row: tuple[Any, Any, Any], below: tuple[Any, Any, Any]) -> Any:
            # `row` is (pivot, next), starting at the pivot. The row below is (first, d, u).
            pivot, after, sign = row
            first, d, u = below
            swap = jnp.abs(first) > jnp.abs(pivot)
            chosen = jnp.where(swap, first, pivot)
            # If the pivot is zero then so is the determinant, and the remaining rows don't matter. So just
            # make sure not to divide by zero.
            ratio = jnp.where(swap, pivot, first) / jnp.where(chosen == 0, 1, chosen)
            kept = (jnp.where(swap, after - ratio * d, d - ratio * after), jnp.where(swap, -ratio * u, u))
            return (*kept, jnp.where(swap, -sign, sign) * sign_of(chosen)), jnp.abs(chosen)

        start = (diagonal[0], upper[0], jnp.ones(self.batch, self.dtype))
        (last, _, sign), pivots = lax.scan(eliminate, start, (lower[1:], diagonal[1:], upper[1:]))
        return sign * sign_of(last), jnp.sum(jnp.log(pivots), 0) + jnp.log(jnp.abs(last))

    def det(self) -> Any:
        """Uses the recurrence relation for leading principal minors.

        Without divisions, this is differentiable for singular matrices, unlike elimination.
        """
        if self.diagonal.shape[-1] == 0:
            return jnp.ones(self.batch, self.dtype)
        lower, diagonal, upper = (jnp.moveaxis(x, -1, 0) for x in self._padded(self.batch))

        def minor(last: tuple[Any, Any], row: tuple[Any, Any]) -> Any:
            # Each leading minor is determined by the two preceding ones.
            d, beside = row
            return (d * last[0] - beside * last[1], last[0]), None

        start = (diagonal[0], jnp.ones(self.batch, self.dtype))
        return lax.scan(minor, start, (diagonal[1:], lower[1:] * upper[:-1]))[0][0]

    def diagonal_elements(self) -> Any:
        return self.stacked().diagonal
