"""The description of a product with a stored weight that a kernel needs beside the arrays."""

import dataclasses

import numpy as np

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Product:
    """`x @ W.T` or `x @ W`, and how codes and scales stand for the values of `W`:

        value = scale · table[code]
        value = scale · (table[code] - zero)     zeros = "points"
        value = scale · table[code] ± zero       zeros = "plus", "minus"

    **Attributes:**

    - `shape`: `(N, K)`, of `W`.
    - `block_size`: codes that share a scale.
    - `transpose`: whether `N` is contracted, as in `x @ W`.
    - `out_dtype`: of the result.
    - `bits`: of a code, 4 or 8.
    - `bias`: where codes are the integers `table[code] + bias`; None where the table must be looked up in.
    - `low_first`: whether of two codes in a byte the first is in the low half.
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
        """How many numbers of each row of `x` are summed over."""
        return self.shape[not self.transpose]

    @property
    def free(self) -> int:
        """How many numbers each row of the result has."""
        return self.shape[self.transpose]

    @property
    def row_bytes(self) -> int:
        """Bytes of codes of a row of `W`, where rows begin with bytes."""
        return self.shape[1] * self.bits // 8

    @property
    def planes(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def row_blocks(self) -> int:
        """Scales of a row of `W`, where rows begin with blocks."""
        return self.shape[1] // self.block_size

    def transposed(self, out_dtype: np.dtype) -> "Product":
        """The other contraction of the same weight."""
        return dataclasses.replace(self, transpose=not self.transpose, out_dtype=out_dtype)

    def of_dtype(self, out_dtype: np.dtype) -> "Product":
        return dataclasses.replace(self, out_dtype=out_dtype)
