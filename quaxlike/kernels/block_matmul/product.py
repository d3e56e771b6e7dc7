"""Describes a product with a stored weight, and decodes the weight.

There are two decoders: `Nibbles` for 4-bit codes with blocks that can cross rows, and `Rows` for rows of
codes in any codec. A decoder is a static parameter of the primitive, decoding a weight `W`'s leaves to
float32. It has the following methods and attributes:

- `tiles(start, rows)` decodes `rows` rows, starting at row `start` (which must be even), as `stride`
    interleaved planes: columns 0, stride, …; columns 1, stride + 1, …; and so on. The planes stay separate:
    interleaving them would be as expensive as decoding.
- `matrix` decodes `W`, or a slice of its rows. `aligned` must divide the slice's bounds.
- `scaled_rows` returns `W` as values exactly representable in any floating dtype, together with one scale per
    row, or `None` if this isn't possible.
- `stored` returns the product along with the layout details needed by kernels, or `None` if no kernel
    supports it. `operands` returns the corresponding codes, scales, value table and zero points. Passing
    `decoded` converts scales and zero points to float32, for kernels supporting nothing else.
- `dimensions` is used for `Partitioning`. It returns a name for each leaf dimension (n and k if it is a
    dimension of `W`), and the names over which shards can be summed. `None` leaves partitioning to XLA.
    `local` returns the product for a single shard.
- `name` is the primitive's name. `linear` is whether `W` is linear in each of its floating-point leaves.
    `fuses` is whether the compilers for GPUs and TPUs fuse decoding into a product with few rows.
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
    """Either `x @ W.T` or `x @ W`, along with how codes and scales encode `W`:

        value = scale · table[code]
        value = scale · (table[code] - zero)     zeros = "points"
        value = scale · table[code] ± zero       zeros = "plus", "minus"

    **Attributes:**

    - `shape`: `W`'s shape `(N, K)`.
    - `block_size`: how many codes share a scale.
    - `transpose`: whether to contract over `N`, as in `x @ W`.
    - `out_dtype`: the result's dtype.
    - `bits`: bits per code, either 4 or 8.
    - `bias`: the offset for which `code = table[code] + bias`, or `None` if values must be looked up in the
        table.
    - `low_first`: whether a byte's first code is in its low nibble.
    - `scales`: `"float"` for scales in any floating dtype. For scales stored as bytes: `"e4m3"`, or for
        powers of two `"e8m0"` or `"e8m0_half"` (half the value of `"e8m0"`).
    - `zeros`: None, `"points"`, `"plus"` or `"minus"`.
    - `compute`: `"int8"` to round `x` to 8 bits, in blocks of 32 along `K` with a float32 scale each,
        `"bfloat16"` to round it to that dtype, or None to use it as it is. Derivatives are those of the
        product without rounding.
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
        """The size of the contracted axis."""
        return self.shape[not self.transpose]

    @property
    def free(self) -> int:
        """The size of the result's last axis."""
        return self.shape[self.transpose]

    @property
    def row_bytes(self) -> int:
        """The number of bytes per row, if each row starts on a byte boundary."""
        return self.shape[1] * self.bits // 8

    @property
    def planes(self) -> int:
        """The number of codes per byte."""
        return 8 // self.bits

    @property
    def row_blocks(self) -> int:
        """How many scales each row has, if each row starts on a block boundary."""
        return self.shape[1] // self.block_size

    def transposed(self, out_dtype: np.dtype) -> "Product":
        """Returns the other contraction with the same weight, without rounding."""
        return dataclasses.replace(self, transpose=not self.transpose, out_dtype=out_dtype, compute=None)

    def unrounded(self) -> "Product":
        return dataclasses.replace(self, compute=None)

    def of_dtype(self, out_dtype: np.dtype) -> "Product":
        return dataclasses.replace(self, out_dtype=out_dtype)


Leaves = Sequence[Any]
Tiles = Callable[[Array | int, int], list[Array]]
ALL = slice(None)


def join(planes: list[Array], count: int) -> Array:
    """Interleaves planes into a matrix with `count` columns."""
    if len(planes) == 1:
        return planes[0]
    width = planes[0].shape[-1]
    # The last planes are shorter if the number of columns isn't a multiple of the number of planes.
    full = [jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, width - p.shape[-1])]) for p in planes]
    return lax.collapse(jnp.stack(full, axis=-1), planes[0].ndim - 1)[..., :count]


@dataclasses.dataclass(frozen=True)
class Nibbles:
    """The decoder for 4-bit codes `(packed, absmax, codebook)`, as in `nf4_matmul`. Blocks can cross rows."""

    name: ClassVar[str] = "nf4_matmul"
    linear: ClassVar[bool] = True
    fuses: ClassVar[bool] = False

    def stride(self, product: Product) -> int:
        return 2

    def tiles(self, leaves: Leaves, product: Product) -> Tiles:
        """Looks up each byte in two tables of 256 entries, one for each of its (adjacent) codes."""
        (n, k), block = product.shape, product.block_size
        packed, absmax = leaves[0].reshape(-1), dense_scales(leaves[1]).reshape(-1)
        code = jnp.arange(256)
        # bitsandbytes stores the first code of a byte in its high nibble.
        tables = [leaves[2][c] for c in (code >> 4, code & 15)]

        def look_up(pairs: Any, scale: Any) -> Any:
            return [table[pairs] * scale for table in tables]

        def paired(start: Array | int, rows: int) -> list[Array]:
            """Returns rows of `W` as their even and odd columns, each with shape (rows, K / 2)."""
            pairs = lax.dynamic_slice_in_dim(packed.reshape(n, k // 2), start, rows)
            span = math.gcd(k, block)  # the longest run that divides both rows and blocks
            runs = start * (k // span) + jnp.arange(rows * (k // span))
            scale = absmax[runs // (block // span)].reshape(rows, k // span)
            return look_up(pairs, jnp.repeat(scale, span // 2, axis=1))

        def unaligned(start: Array | int, rows: int) -> list[Array]:
            """Returns rows of `W` that can begin halfway through a byte. `start` must be even."""
            # If `k` is odd, only even rows begin on a byte boundary, so tiles start at them.
            first, count = start * k // 2, (rows * k + 1) // 2
            pairs = lax.dynamic_slice_in_dim(packed, first, count)
            scale = absmax[(first + jnp.arange(count)) // (block // 2)]
            values = jnp.stack(look_up(pairs, scale), axis=-1).reshape(-1)[: rows * k].reshape(rows, k)
            return [values[:, 0::2], values[:, 1::2]]

        return unaligned if k % 2 else paired

    def matrix(self, leaves: Leaves, product: Product, rows: slice = ALL) -> Array:
        (n, k), block = product.shape, product.block_size
        packed, absmax, codebook = leaves[0].reshape(-1), dense_scales(leaves[1]).reshape(-1), leaves[2]
        start, stop, _ = rows.indices(n)
        # Callers only use multiples of `aligned`, so this never slices through a byte or a block.
        packed = packed[start * k // 2 : (stop * k + 1) // 2]
        absmax, n = absmax[start * k // block : -(-stop * k // block)], stop - start
        return dequantize_codebook(packed, absmax, codebook, n=n * k, block_size=block).reshape(n, k)

    def aligned(self, product: Product) -> int:
        return product.block_size // math.gcd(product.block_size, product.shape[1])

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
        n, row_bytes = leaves[0].shape  # rows of codes determine this shard's shape
        return dataclasses.replace(product, shape=(n, 2 * row_bytes))


@dataclasses.dataclass(frozen=True)
class Rows:
    """The decoder for rows of codes, scales and zeros in a codec, if `present`."""

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

    def matrix(self, leaves: Leaves, product: Product, rows: slice = ALL) -> Array:
        return join(self.planes([leaf[rows] for leaf in leaves], product), product.shape[1])

    def aligned(self, product: Product) -> int:
        return 1

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
        # If rows end in a partial block, columns can't be sharded. A single scale per row is replicated
        # across all shards of the columns.
        whole = product.shape[1] % product.block_size == 0
        k, blocks = ("k" if whole else "kept"), ("k" if whole and leaves[1].shape[1] != 1 else "blocks")
        return f"n {k}, n {blocks}", ("n",) if product.transpose else ("k",) if whole else ()

    def local(self, leaves: Leaves, product: Product) -> Product:
        (n, row_bytes), k, bits = leaves[0].shape, product.shape[1], self.codec.bits
        part = k if row_bytes == bitstream.num_bytes(k, bits) else row_bytes * 8 // bits
        return dataclasses.replace(product, shape=(n, part))

    def parts(self, leaves: Leaves) -> list[Any]:
        """Returns the codes, scale, outer scale, zero and outer zero, each `None` if absent."""
        rest = iter(leaves)
        return [next(rest) if p else None for p in self.present]

    def _reads_scales(self, decoded: bool) -> bool:
        """Returns whether kernels read the scales directly, as stored."""
        _, _, outer, _, outer_zero = self.present
        return not (decoded or outer or outer_zero) and self.codec.scales in ("float", "e4m3", *E8M0)


Decode = Nibbles | Rows
NIBBLES, INTEGERS = Nibbles(), Rows(CODECS["int8"], (True, True, False, False, False))
