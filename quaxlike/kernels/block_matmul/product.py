"""A product with a stored weight: its description, and the decoders for the weight.

One decoder is for 4-bit codes with blocks that may cross rows, another for rows of codes in any codec. A
decoder is a static parameter of the product. It decodes the arrays of a weight `W`, its leaves, to float32:

- `tiles(start, rows)` decodes `rows` rows from the even row `start`, as `stride` interleaved planes: columns
    0, stride, …; columns 1, stride + 1, …; and so on. Interleaving them would cost as much as decoding.
- `matrix`: `W`, or some rows or columns. If it is called in parts, these are multiples of `aligned`.
- `scaled_rows`: `W` as values that are exact in any floating dtype, and one scale per row; None if it is not.
- `stored`: the product with the details that kernels need, None if no kernel supports them; and `operands`:
    codes, scales, value table and zero points as it describes them. `decoded`: whether to make scales and
    zero points float32, for kernels that take nothing else.
- `dimensions`: for `Partitioning`, names for the leaves' dimensions (n and k for `W`), and the names that
    can be summed over parts; None if XLA divides the product. `local`: the product for a part.

`name` is the primitive for its products. `linear` says whether `W` is linear in each floating leaf, `fuses`
whether compilers for GPUs and TPUs fuse decoding into a product of few rows.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .. import bits as bitstream
from ..blockwise import dequantize_codebook
from .codecs import CODECS, E8M0, Codec
from .nested_scales import NestedScales, dense_scales

_FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Product:
    """`x @ W.T` or `x @ W`, and how codes and scales encode `W`:

        value = scale · table[code]
        value = scale · (table[code] - zero)     zeros = "points"
        value = scale · table[code] ± zero       zeros = "plus", "minus"

    **Attributes:**

    - `shape`: `(N, K)`, for `W`.
    - `block_size`: how many codes share a scale.
    - `transpose`: whether `N` is contracted, as in `x @ W`.
    - `out_dtype`: the result's dtype.
    - `bits`: bits per code, 4 or 8.
    - `bias`: such that `code = table[code] + bias`; None if values must be looked up.
    - `low_first`: whether the first of two codes in a byte is in the low half.
    - `scales`: `"float"` in any floating dtype; as bytes `"e4m3"`, or powers of two `"e8m0"` and
        `"e8m0_half"` (half of this).
    - `zeros`: None, `"points"`, `"plus"` or `"minus"`.
    - `compute`: `"int8"` if `x` is rounded to 8 bits, in blocks of 32 along `K` with a float32 scale each;
        None if it is not rounded. Derivatives are those of the product that does not round.
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
    compute: str | None = None

    @property
    def contracted(self) -> int:
        """The contracted axis's size."""
        return self.shape[not self.transpose]

    @property
    def free(self) -> int:
        """The size of the result's last axis."""
        return self.shape[self.transpose]

    @property
    def row_bytes(self) -> int:
        """How many bytes of codes a row has, if rows start at bytes."""
        return self.shape[1] * self.bits // 8

    @property
    def planes(self) -> int:
        """Codes per byte."""
        return 8 // self.bits

    @property
    def row_blocks(self) -> int:
        """How many scales a row has, if rows start at blocks."""
        return self.shape[1] // self.block_size

    def transposed(self, out_dtype: np.dtype) -> "Product":
        """Returns the other contraction with the same weight, which does not round."""
        return dataclasses.replace(self, transpose=not self.transpose, out_dtype=out_dtype, compute=None)

    def unrounded(self) -> "Product":
        return dataclasses.replace(self, compute=None)

    def of_dtype(self, out_dtype: np.dtype) -> "Product":
        return dataclasses.replace(self, out_dtype=out_dtype)


Leaves = Sequence[Any]
Tiles = Callable[[Array | int, int], list[Array]]
ALL = slice(None)


def join(planes: list[Array], count: int) -> Array:
    """Interleaves planes to a matrix with `count` columns."""
    if len(planes) == 1:
        return planes[0]
    width = planes[0].shape[-1]
    # If the number of columns is not a multiple of the number of planes, the last planes are shorter.
    full = [jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, width - p.shape[-1])]) for p in planes]
    return lax.collapse(jnp.stack(full, axis=-1), planes[0].ndim - 1)[..., :count]


@dataclasses.dataclass(frozen=True)
class Nibbles:
    """4-bit codes, `(packed, absmax, codebook)` as for `nf4_matmul`. Blocks may cross rows."""

    name: ClassVar[str] = "nf4_matmul"
    linear: ClassVar[bool] = True
    fuses: ClassVar[bool] = False

    def stride(self, product: Product) -> int:
        return 2

    def tiles(self, leaves: Leaves, product: Product) -> Tiles:
        """Looks each byte up in two tables with 256 entries: its two codes are adjacent in a row."""
        (n, k), block = product.shape, product.block_size
        packed, absmax = leaves[0].reshape(-1), dense_scales(leaves[1]).reshape(-1)
        code = jnp.arange(256)
        # The first code of a byte is in the high nibble, as in bitsandbytes.
        tables = [leaves[2][c] for c in (code >> 4, code & 15)]

        def look_up(pairs: Any, scale: Any) -> Any:
            return [table[pairs] * scale for table in tables]

        def paired(start: Array | int, rows: int) -> list[Array]:
            """Rows of `W` as even and odd columns, each (rows, K / 2)."""
            pairs = lax.dynamic_slice_in_dim(packed.reshape(n, k // 2), start, rows)
            span = math.gcd(k, block)  # the longest run that divides both rows and blocks
            runs = start * (k // span) + jnp.arange(rows * (k // span))
            scale = absmax[runs // (block // span)].reshape(rows, k // span)
            return look_up(pairs, jnp.repeat(scale, span // 2, axis=1))

        def unaligned(start: Array | int, rows: int) -> list[Array]:
            """Rows of `W` if rows begin in the middle of bytes; `start` is even."""
            # An even row begins at a whole byte even if `k` is odd. Therefore tiles start at even rows.
            first, count = start * k // 2, (rows * k + 1) // 2
            pairs = lax.dynamic_slice_in_dim(packed, first, count)
            scale = absmax[(first + jnp.arange(count)) // (block // 2)]
            values = jnp.stack(look_up(pairs, scale), axis=-1).reshape(-1)[: rows * k].reshape(rows, k)
            return [values[:, 0::2], values[:, 1::2]]

        return unaligned if k % 2 else paired

    def matrix(self, leaves: Leaves, product: Product, rows: slice = ALL, columns: slice = ALL) -> Array:
        (n, k), block = product.shape, product.block_size
        packed, absmax, codebook = leaves[0].reshape(-1), dense_scales(leaves[1]).reshape(-1), leaves[2]
        start, stop, _ = columns.indices(k)
        if stop - start < k:

            def part(leaf: Any, size: Any) -> Any:
                return leaf.reshape(n, -1)[:, start // size : stop // size]

            packed, absmax, k = part(packed, 2), part(absmax, block), stop - start
        else:
            start, stop, _ = rows.indices(n)
            # Callers start at multiples of `aligned`, so no byte and no block is cut in the middle.
            packed = packed[start * k // 2 : (stop * k + 1) // 2]
            absmax, n = absmax[start * k // block : -(-stop * k // block)], stop - start
        dense = dequantize_codebook(
            packed.reshape(-1), absmax.reshape(-1), codebook, n=n * k, block_size=block
        )
        return dense.reshape(n, k)

    def aligned(self, product: Product) -> tuple[int, int]:
        block = product.block_size
        return block // math.gcd(block, product.shape[1]), block

    def scaled_rows(self, leaves: Leaves) -> None:
        return None

    def stored(self, product: Product, *, decoded: bool) -> Product:
        return product

    def operands(self, leaves: Leaves, *, decoded: bool) -> tuple[Array, Any, Array, None]:
        packed, absmax, codebook = leaves
        return packed, absmax, codebook, None

    def dimensions(self, leaves: Leaves, product: Product) -> tuple[str, tuple[str, ...]]:
        if leaves[0].ndim == 2:
            return "n k, n k, codebook", ("n" if product.transpose else "k",)
        nested = isinstance(leaves[1], NestedScales)
        return f"bytes, blocks{', nested, , map' if nested else ''}, codebook", ()

    def local(self, leaves: Leaves, product: Product) -> Product:
        if leaves[0].ndim != 2:
            return product
        n, row_bytes = leaves[0].shape  # rows of codes give the shape of this part
        return dataclasses.replace(product, shape=(n, 2 * row_bytes))


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows of codes, scales and zeros, as a codec reads them: the parts that are `present`."""

    codec: Codec
    present: tuple[bool, ...]
    fuses: ClassVar[bool] = True

    @property
    def linear(self) -> bool:
        return self.codec == CODECS["int8"]

    @property
    def name(self) -> str:
        return "int8_matmul" if self.linear else "block_matmul"

    def planes(self, leaves: Leaves, product: Product) -> list[Array]:
        return self.codec.planes(product.shape[1], product.block_size, self.parts(leaves))

    def stride(self, product: Product) -> int:
        return self.codec.stride(product.shape[1], product.block_size)

    def tiles(self, leaves: Leaves, product: Product) -> Tiles:
        def part(start: Any, rows: Any) -> Any:
            return [lax.dynamic_slice_in_dim(leaf, start, rows) for leaf in leaves]

        return lambda start, rows: self.planes(part(start, rows), product)

    def matrix(self, leaves: Leaves, product: Product, rows: slice = ALL, columns: slice = ALL) -> Array:
        planes = self.planes([leaf[rows] for leaf in leaves], product)
        return join(planes, product.shape[1])[:, columns]  # the compiler decodes only these columns

    def aligned(self, product: Product) -> tuple[int, int]:
        return 1, 1

    def scaled_rows(self, leaves: Leaves) -> tuple[Array, Array] | None:
        return (leaves[0], leaves[1]) if self.linear and leaves[1].shape[1] == 1 else None

    def stored(self, product: Product, *, decoded: bool) -> Product | None:
        codec = self.codec
        if codec.bits not in (4, 8) or codec.scales == "nibbles" or self.linear:
            return None
        return dataclasses.replace(
            product,
            bits=codec.bits,
            bias=codec.bias if codec.codes == "integer" else None,
            low_first=not codec.high_first,
            scales=codec.scales if self._reads_scales(decoded) else "float",
            zeros=codec.zeros,
        )

    def operands(self, leaves: Leaves, *, decoded: bool) -> tuple[Array, Array, Array, Array | None]:
        codes, scale, outer, zero, outer_zero = self.parts(leaves)
        if not self._reads_scales(decoded):
            scale, zero = self.codec.scales_and_zeros(scale, outer, zero, outer_zero)
        elif zero is not None and str(zero.dtype) not in ("uint8", "float32", "bfloat16", "float16"):
            zero = zero.astype(jnp.float32)
        return codes.view(np.uint8), scale, jnp.asarray(self.codec.all_values), zero

    def dimensions(self, leaves: Leaves, product: Product) -> tuple[str, tuple[str, ...]] | None:
        if not self.linear:
            return None
        # A partial block at the end of rows keeps columns together; a single scale per row belongs to all.
        whole = product.shape[1] % product.block_size == 0
        k, blocks = ("k" if whole else "kept"), ("k" if whole and leaves[1].shape[1] != 1 else "blocks")
        return f"n {k}, n {blocks}", ("n",) if product.transpose else ("k",) if whole else ()

    def local(self, leaves: Leaves, product: Product) -> Product:
        (n, row_bytes), k, bits = leaves[0].shape, product.shape[1], self.codec.bits
        part = k if row_bytes == bitstream.num_bytes(k, bits) else row_bytes * 8 // bits
        return dataclasses.replace(product, shape=(n, part))

    def parts(self, leaves: Leaves) -> list[Any]:
        """Codes, scale, outer scale, zero and outer zero; None for missing ones."""
        rest = iter(leaves)
        return [next(rest) if p else None for p in self.present]

    def _reads_scales(self, decoded: bool) -> bool:
        """Returns whether kernels read stored scales directly."""
        _, _, outer, _, outer_zero = self.present
        return not (decoded or outer or outer_zero) and self.codec.scales in ("float", "e4m3", *E8M0)


Decode = Nibbles | Rows
NIBBLES, INTEGERS = Nibbles(), Rows(CODECS["int8"], (True, True, False, False, False))
