"""`DiagonalMatrix`: a matrix with zeros off its diagonal."""

from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ...core.values import replace_fields
from .base import StructuredMatrix, as_part, lead, sign_of


class DiagonalMatrix(StructuredMatrix):
    """A square matrix with zeros off its diagonal.

    **Arguments:**

    - `diagonal`: shape `(*batch, n)`; the matrix has shape `(*batch, n, n)`.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.structured import DiagonalMatrix

        d = DiagonalMatrix(jnp.array([1.0, 2.0, 4.0]))
        ql.quaxify(jnp.linalg.solve)(d, jnp.ones(3))  # three divisions
        ```
    """

    diagonal: Any = eqx.field(converter=as_part)

    linear = True
    CORE: ClassVar[dict[str, int]] = {"diagonal": 1}
    FACTORS = ("diagonal",)
    OTHERS = None

    def __check_init__(self) -> None:
        if self.diagonal.ndim < 1:
            raise ValueError("DiagonalMatrix takes a diagonal of shape (*batch, n); found shape ().")

    @property
    def matrix_shape(self) -> tuple[int, int]:
        n = self.diagonal.shape[-1]
        return (n, n)

    def materialise(self) -> jax.Array:
        # Don't multiply by the identity: if any element is infinite, then multiplying it by zero gives NaNs
        # off the diagonal.
        eye = jnp.eye(self.diagonal.shape[-1], dtype=bool)
        diagonal = jnp.asarray(self.diagonal)
        return jnp.where(eye, diagonal[..., None], jnp.zeros((), diagonal.dtype))

    def places(self) -> dict[str, tuple[Any, Any]]:
        at = np.arange(self.diagonal.shape[-1])
        return {"diagonal": (at, at)}

    def diagonal_block(self, rows: slice) -> "DiagonalMatrix":
        return replace_fields(self, diagonal=self.diagonal[..., rows])

    def after_diagonal(self, diagonal: Any) -> "DiagonalMatrix":
        # Either of these may have more batch axes. Align them explicitly: users may have disabled rank
        # promotion.
        ndim = max(diagonal.ndim, self.diagonal.ndim)
        return replace_fields(self, diagonal=lead(diagonal, ndim) * lead(self.diagonal, ndim))

    def applied_to(self, x: Any, precision: Any = None, product: Callable[..., Any] = jnp.matmul) -> Any:
        return lead(jnp.expand_dims(self.diagonal, -1), x.ndim) * x

    def transposed(self) -> "DiagonalMatrix":
        return self

    def solve(self, b: Any) -> Any:
        return b / lead(jnp.expand_dims(self.diagonal, -1), b.ndim)

    def inverse(self) -> "DiagonalMatrix":
        return replace_fields(self, diagonal=1 / self.diagonal)

    def slogdet(self) -> tuple[Any, Any]:
        # Don't take the logarithm of the product: a product of many elements may overflow.
        sign = jnp.prod(sign_of(self.diagonal), axis=-1)
        return sign, jnp.sum(jnp.log(jnp.abs(self.diagonal)), axis=-1)

    def det(self) -> Any:
        return jnp.prod(self.diagonal, axis=-1)

    def diagonal_elements(self) -> Any:
        return self.diagonal
