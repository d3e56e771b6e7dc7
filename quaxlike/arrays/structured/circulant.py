"""`BlockCirculantMatrix`: a matrix of circulant blocks, in which rows are cyclic shifts of each other."""

from collections.abc import Callable
from types import NotImplementedType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ...core.values import materialise
from ..dot_axes import in_float32
from .base import StructuredMatrix, as_part


class BlockCirculantMatrix(StructuredMatrix):
    """A matrix of square circulant blocks, in which each row is the previous one shifted by one.

    Block `(m, n)` has element `kernel[m, n, (j - k) % b]` in row `k` and column `j`. The Fourier transform
    diagonalises circulant matrices, so products are computed using FFTs, and linear systems decompose into
    one small system per frequency.

    **Arguments:**

    - `kernel`: shape `(*batch, rows, columns, b)`; the matrix has shape `(*batch, rows * b, columns * b)`.

    **Raises:**

    `ValueError` if the kernel has fewer than three axes.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.structured import BlockCirculantMatrix

        c = BlockCirculantMatrix(jnp.ones((2, 3, 128)))  # 256 x 384
        ql.quaxify(jnp.matmul)(c, jnp.ones(384))
        ```
    """

    kernel: Any = eqx.field(converter=as_part)

    CORE: ClassVar[dict[str, int]] = {"kernel": 3}
    FACTORS = ("kernel",)
    OTHERS: ClassVar[dict[str, int] | None] = {}

    def __check_init__(self) -> None:
        if self.kernel.ndim < 3:
            raise ValueError(
                "BlockCirculantMatrix takes a kernel of shape (*batch, rows, columns, b); found "
                f"{self.kernel.shape}."
            )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        rows, columns, b = self.kernel.shape[-3:]
        return (rows * b, columns * b)

    def materialise(self) -> jax.Array:
        kernel = materialise(self.kernel)
        at = jnp.arange(kernel.shape[-1])
        blocks = kernel[..., (at[None, :] - at[:, None]) % max(len(at), 1)]
        return jnp.reshape(jnp.swapaxes(blocks, -3, -2), self.shape)

    def applied_to(self, x: Any, precision: Any = None, product: Callable[..., Any] = jnp.matmul) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            # Products of integers should be exact, whereas a Fourier transform introduces rounding errors.
            return product(self.materialise(), x, precision=precision)

        def by(blocks: Any, x: Any) -> Any:
            return product(blocks, x, precision=precision)

        return self._by_frequency(by, x, self.kernel.shape[-3])

    def _by_frequency(self, by: Any, x: Any, rows: int) -> Any:
        """Applies `by` to each frequency of the blocks and `x`, which has shape `(..., columns * b, k)`.

        This is used for products as well as for linear systems.
        """
        *batch, m, k = x.shape
        b, dtype = self.kernel.shape[-1], x.dtype
        wide = in_float32(dtype)  # Fourier transforms don't support 16-bit types
        x = jnp.reshape(x.astype(wide), (*batch, m // b, b, k))
        x = jnp.moveaxis(jnp.fft.fft(x, axis=-2), -2, -3)  # (..., b, columns, k)
        y = jnp.moveaxis(by(self._spectrum(), x), -3, -2)
        y = jnp.fft.ifft(y, axis=-2)
        y = y if jnp.iscomplexobj(jnp.zeros((), dtype)) else y.real
        return jnp.reshape(y, (*y.shape[:-3], rows * b, k)).astype(dtype)

    def _spectrum(self) -> Any:
        """Returns the matrix for each frequency, `(..., b, rows, columns)`."""
        b = self.kernel.shape[-1]
        kernel = self.kernel.astype(in_float32(self.kernel.dtype))
        return jnp.moveaxis(jnp.fft.ifft(kernel, axis=-1) * b, -1, -3)

    def multiplied(self, other: StructuredMatrix, by: Any) -> "BlockCirculantMatrix | NotImplementedType":
        return self.paired(other, by) if self._fits(other) else NotImplemented

    def plus(self, other: StructuredMatrix, add: Any) -> "BlockCirculantMatrix | NotImplementedType":
        return self.paired(other, add) if self._fits(other) else NotImplemented

    def _fits(self, other: StructuredMatrix) -> bool:
        return isinstance(other, BlockCirculantMatrix) and self.kernel.shape[-3:] == other.kernel.shape[-3:]

    def transposed(self) -> "BlockCirculantMatrix":
        # Transposing a circulant block reverses its first row, except for the element on the diagonal.
        return self.each(lambda x, _: jnp.roll(jnp.flip(jnp.swapaxes(x, -3, -2), -1), 1, -1))

    def _check_square(self) -> None:
        rows, columns, _ = self.kernel.shape[-3:]
        if rows != columns:
            raise ValueError(
                f"A BlockCirculantMatrix that is not square has no inverse; found {rows} x {columns} blocks."
            )

    def solve(self, b: Any) -> Any:
        self._check_square()

        def solved(blocks: Any, x: Any) -> Any:
            return jnp.linalg.solve(jnp.broadcast_to(blocks, (*x.shape[:-2], *blocks.shape[-2:])), x)

        return self._by_frequency(solved, b, self.kernel.shape[-2])

    def inverse(self) -> "BlockCirculantMatrix":
        self._check_square()
        spectrum = jnp.moveaxis(jnp.linalg.inv(self._spectrum()), -3, -1)
        kernel = jnp.fft.fft(spectrum, axis=-1) / self.kernel.shape[-1]
        kernel = kernel if jnp.iscomplexobj(jnp.zeros((), self.dtype)) else kernel.real
        return self.with_parts({"kernel": kernel.astype(self.dtype)})

    def slogdet(self) -> tuple[Any, Any]:
        self._check_square()
        sign, log = jnp.linalg.slogdet(self._spectrum())
        sign = jnp.prod(sign, -1)
        # For a real kernel, frequencies come in complex conjugate pairs, so the product is real. Drop its
        # small imaginary part, which is due to rounding.
        sign = sign if jnp.iscomplexobj(jnp.zeros((), self.dtype)) else jnp.sign(sign.real)
        return sign.astype(self.dtype), jnp.sum(log, -1)

    def det(self) -> Any:
        self._check_square()
        det = jnp.prod(jnp.linalg.det(self._spectrum()), -1)
        return (det if jnp.iscomplexobj(jnp.zeros((), self.dtype)) else det.real).astype(self.dtype)

    def diagonal_elements(self) -> Any:
        b = self.kernel.shape[-1]
        # The diagonal of each circulant block is constant.
        first = jnp.diagonal(self.kernel[..., 0], axis1=-2, axis2=-1)
        return jnp.repeat(first, b, axis=-1)
