"""`KroneckerMatrix`: the Kronecker product of two matrices."""

from collections.abc import Callable
from types import NotImplementedType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ...core.quaxify import quaxify
from ...core.values import materialise, replace_fields
from .base import StructuredMatrix, as_part, check_batches, diagonal_of, lead, solve_part


class KroneckerMatrix(StructuredMatrix):
    """The Kronecker product of two matrices: block `(i, j)` is `a[i, j] * b`.

    Both matrices can be Values. For example, if `b` is another `KroneckerMatrix`, then this is the product of
    three matrices.

    **Arguments:**

    - `a`: shape `(*batch, p, q)`.
    - `b`: shape `(*batch, r, s)`; the matrix has shape `(*batch, p * r, q * s)`.

    **Raises:**

    `ValueError` if the batch axes are inconsistent.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.structured import KroneckerMatrix

        k = KroneckerMatrix(jnp.eye(30) + 1, jnp.eye(40) + 1)  # 1200 x 1200
        ql.quaxify(jnp.linalg.solve)(k, jnp.ones(1200))
        ```
    """

    a: Any = eqx.field(converter=as_part)
    b: Any = eqx.field(converter=as_part)

    CORE: ClassVar[dict[str, int]] = {"a": 2, "b": 2}
    FACTORS = ("a",)
    OTHERS: ClassVar[dict[str, int] | None] = {"b": 1}
    combines_parts = True

    def __check_init__(self) -> None:
        check_batches(self)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return (self.a.shape[-2] * self.b.shape[-2], self.a.shape[-1] * self.b.shape[-1])

    def materialise(self) -> jax.Array:
        whole = self.converted(self.dtype)
        a, b = materialise((whole.a, whole.b))
        n = self.num_batch + 2
        a, b = lead(a, n)[..., :, None, :, None], lead(b, n)[..., None, :, None, :]
        return jnp.reshape(a * b, self.shape)

    def _map(self, by_a: Any, by_b: Any, x: Any) -> Any:
        """Applies `by_a` along q, and `by_b` along s, to `x` with shape (..., q * s, k)."""
        *batch, _, k = x.shape
        q, s = self.a.shape[-1], self.b.shape[-1]
        # (..., s, q * k)
        x = jnp.reshape(jnp.swapaxes(jnp.reshape(x, (*batch, q, s, k)), -3, -2), (*batch, s, q * k))
        x = by_b(x)
        *batch, r, _ = x.shape
        # (..., q, r * k)
        x = jnp.reshape(jnp.swapaxes(jnp.reshape(x, (*batch, r, q, k)), -3, -2), (*batch, q, r * k))
        x = by_a(x)
        *batch, p, _ = x.shape
        return jnp.reshape(x, (*batch, p * r, k))

    def applied_to(self, x: Any, precision: Any = None, product: Callable[..., Any] = jnp.matmul) -> Any:
        def by(part: Any) -> Any:
            return lambda x: product(part, x, precision=precision)

        return self._map(by(self.a), by(self.b), x)

    def multiplied(self, other: StructuredMatrix, by: Any) -> "KroneckerMatrix | NotImplementedType":
        same = isinstance(other, KroneckerMatrix) and self.a.shape[-2:] == other.a.shape[-2:]
        return self.paired(other, by) if same else NotImplemented

    def matmul(
        self, other: StructuredMatrix, precision: Any = None
    ) -> "KroneckerMatrix | NotImplementedType":
        if not isinstance(other, KroneckerMatrix) or self.a.shape[-1] != other.a.shape[-2]:
            return NotImplemented
        by = quaxify(lambda p, q: jnp.matmul(p, q, precision=precision))
        return replace_fields(self, a=by(self.a, other.a), b=by(self.b, other.b))

    def transposed(self) -> "KroneckerMatrix":
        return self.each(lambda part, _: jnp.matrix_transpose(part))

    def solve(self, b: Any) -> Any:
        self._check_square()
        return self._map(lambda x: solve_part(self.a, x), lambda x: solve_part(self.b, x), b)

    def _check_square(self) -> None:
        for name, part in self.parts.items():
            if part.shape[-1] != part.shape[-2]:
                raise ValueError(
                    "A KroneckerMatrix of matrices that are not square is singular, or has no inverse that "
                    f"would be a Kronecker product; found {name} of shape {part.shape}."
                )

    def inverse(self) -> Any:
        self._check_square()
        return self.each(lambda part, _: jnp.linalg.inv(part))

    def slogdet(self) -> tuple[Any, Any]:
        self._check_square()
        m, n = self.a.shape[-1], self.b.shape[-1]
        (sign_a, log_a), (sign_b, log_b) = jnp.linalg.slogdet(self.a), jnp.linalg.slogdet(self.b)
        sign_a, log_a, sign_b, log_b = (
            jnp.broadcast_to(x, self.batch) for x in (sign_a, log_a, sign_b, log_b)
        )
        # det(a ⊗ b) = det(a)ⁿ det(b)ᵐ
        return sign_a**n * sign_b**m, n * log_a + m * log_b

    def det(self) -> Any:
        self._check_square()
        m, n = self.a.shape[-1], self.b.shape[-1]
        of_a, of_b = (jnp.broadcast_to(jnp.linalg.det(x), self.batch) for x in (self.a, self.b))
        return of_a**n * of_b**m

    def diagonal_elements(self) -> Any:
        (p, q), (r, s) = self.a.shape[-2:], self.b.shape[-2:]
        ndim = self.num_batch + 1
        if p == q and r == s:
            a, b = lead(diagonal_of(self.a), ndim), lead(diagonal_of(self.b), ndim)
            return jnp.reshape(jnp.expand_dims(a, -1) * jnp.expand_dims(b, -2), (*self.batch, p * r))
        i = jnp.arange(min(self.matrix_shape))
        return lead(self.a[..., i // r, i // s], ndim) * lead(self.b[..., i % r, i % s], ndim)
