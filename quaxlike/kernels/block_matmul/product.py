"""The description of a product with a stored weight, for kernels."""

import dataclasses

import numpy as np

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Product:
    """`x @ W.T` or `x @ W`, and how codes and scales encode the values of `W`:

        value = scale · table[code]
        value = scale · (table[code] - zero)     zeros = "points"
        value = scale · table[code] ± zero       zeros = "plus", "minus"

    **Attributes:**

    - `shape`: the shape of `W`, `(N, K)`.
    - `block_size`: how many codes share a scale.
    - `transpose`: whether `N` is contracted, as in `x @ W`.
    - `out_dtype`: the dtype of the result.
    - `bits`: the number of bits of a code, 4 or 8.
    - `bias`: the number with `code = table[code] + bias`; None if values must be looked up.
    - `low_first`: whether the first of two codes in a byte is in the low half.
    - `scales`: `"float"`, of any floating dtype; as bytes `"e4m3"`, or powers of two `"e8m0"`, and
        `"e8m0_half"` (half of it).
    - `zeros`: None, `"points"`, `"plus"` or `"minus"`.
    """

    shape: tuple[int, int]
    block_size: int
    transpose: bool = False
    out_dtype: np.dtype = _FLOAT32
    bits: int = 4
    bias: int | None = None
    low_first: bool = False
    scales: str = "float"
    zeros: str | None = None

    @property
    def contracted(self) -> int:
        """The size of the contracted axis of `x`."""
        return self.shape[not self.transpose]

    @property
    def free(self) -> int:
        """The size of the last axis of the result."""
        return self.shape[self.transpose]

    @property
    def row_bytes(self) -> int:
        """The number of bytes of codes of a row of `W`, if rows start at bytes."""
        return self.shape[1] * self.bits // 8

    @property
    def planes(self) -> int:
        """The number of codes in a byte."""
        return 8 // self.bits

    @property
    def row_blocks(self) -> int:
        """The number of scales of a row of `W`, if rows start at blocks."""
        return self.shape[1] // self.block_size

    def transposed(self, out_dtype: np.dtype) -> "Product":
        """The other contraction of the same weight."""
        return dataclasses.replace(self, transpose=not self.transpose, out_dtype=out_dtype)

    def of_dtype(self, out_dtype: np.dtype) -> "Product":
        return dataclasses.replace(self, out_dtype=out_dtype)
