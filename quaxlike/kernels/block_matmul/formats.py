"""The weights that products decode: 4-bit codes whose blocks may cross rows, and rows of any codec."""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from .. import bits as bitstream
from ..blockwise import NestedScales, dense_scales, dequantize_codebook
from ..product import Product
from .codecs import CODECS, E8M0, Codec

Leaves = Sequence[Any]
Tiles = Callable[[Array | int, int], list[Array]]
ALL = slice(None)


def join(planes: list[Array], count: int) -> Array:
    """Interleaves the planes of a matrix, and returns its first `count` columns."""
    if len(planes) == 1:
        return planes[0]
    width = planes[0].shape[-1]
    full = [jnp.pad(p, [(0, 0)] * (p.ndim - 1) + [(0, width - p.shape[-1])]) for p in planes]
    return jnp.stack(full, axis=-1).reshape(*planes[0].shape[:-1], -1)[..., :count]


class Decode(abc.ABC):
    """Decodes the arrays of a stored weight `W`, `leaves`, to float32; hashable.

    A tile of rows comes in `stride` planes: columns 0, stride, …; columns 1, stride + 1, …; and so on, since
    interleaving them costs as much as decoding.
    """

    fuses: ClassVar[bool] = True
    """Whether compilers for GPUs and TPUs fuse decoding with a product of few rows."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The primitive of products with such a weight."""

    @property
    @abc.abstractmethod
    def linear(self) -> bool:
        """Whether the weight is linear in each of its floating leaves."""

    @abc.abstractmethod
    def stride(self, product: Product) -> int:
        """The number of planes of a tile."""

    @abc.abstractmethod
    def tiles(self, leaves: Leaves, product: Product) -> Tiles:
        """A function that decodes the tile of so many rows from an even row on."""

    @abc.abstractmethod
    def matrix(self, leaves: Leaves, product: Product, rows: slice = ALL, columns: slice = ALL) -> Array:
        """`W`, or some of its rows, or of its columns."""

    def aligned(self, product: Product) -> tuple[int, int]:
        """Of how many rows, and of how many columns, the parts that `matrix` decodes are multiples."""
        return 1, 1

    def scaled_rows(self, leaves: Leaves) -> tuple[Array, Array] | None:
        """`W` as values that are exact in any floating dtype and one scale for each row, if it is that."""
        return None

    def stored(self, product: Product, *, decoded: bool) -> Product | None:
        """The product with the details of the codes that kernels need; None if no kernel supports them.

        `decoded`: whether to make scales and zero points float32, for kernels that take no others.
        """
        return None

    def operands(self, leaves: Leaves, *, decoded: bool) -> tuple[Array, Any, Array, Array | None]:
        """Codes, scales, the table of values, and zero points if there are any, as `stored` describes."""
        raise NotImplementedError

    def dimensions(self, leaves: Leaves, product: Product) -> tuple[str, tuple[str, ...]] | None:
        """For `Partitioning`, the names of the dimensions of the leaves, where those of `W` are n and k, and
        the ones that can be summed over parts; None if each device takes the whole weight."""
        return None

    def local(self, leaves: Leaves, product: Product) -> Product:
        """The product with a part of the weight."""
        return product


@dataclasses.dataclass(frozen=True)
class Nibbles(Decode):
    """4-bit codes, `(packed, absmax, codebook)` as of `nf4_matmul`; blocks may cross rows."""

    fuses = False

    @property
    def name(self) -> str:
        return "nf4_matmul"

    @property
    def linear(self) -> bool:
        return True

    def stride(self, product: Product) -> int:
        return 2

    def tiles(self, leaves: Leaves, product: Product) -> Tiles:
        """A byte is looked up in two tables of 256 entries, one for each of its codes. The two values are
        neighbours within a row."""
        (n, k), block = product.shape, product.block_size
        packed, absmax = leaves[0].reshape(-1), dense_scales(leaves[1]).reshape(-1)
        code = jnp.arange(256)
        tables = [leaves[2][c] for c in (code >> 4, code & 15)]
        look_up = lambda pairs, scale: [table[pairs] * scale for table in tables]

        def paired(start: Array | int, rows: int) -> list[Array]:
            """Rows of `W` as its even and its odd columns, each (rows, K / 2)."""
            pairs = lax.dynamic_slice_in_dim(packed.reshape(n, k // 2), start, rows)
            span = math.gcd(k, block)  # the longest run that divides rows and blocks alike
            runs = start * (k // span) + jnp.arange(rows * (k // span))
            scale = absmax[runs // (block // span)].reshape(rows, k // span)
            return look_up(pairs, jnp.repeat(scale, span // 2, axis=1))

        def unaligned(start: Array | int, rows: int) -> list[Array]:
            """Rows of `W` where rows begin in the middle of bytes; `start` is even."""
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
            part = lambda leaf, size: leaf.reshape(n, -1)[:, start // size : stop // size]
            packed, absmax, k = part(packed, 2), part(absmax, block), stop - start
        else:
            start, stop, _ = rows.indices(n)
            packed = packed[start * k // 2 : (stop * k + 1) // 2]
            absmax, n = absmax[start * k // block : -(-stop * k // block)], stop - start
        dense = dequantize_codebook(
            packed.reshape(-1), absmax.reshape(-1), codebook, n=n * k, block_size=block
        )
        return dense.reshape(n, k)

    def aligned(self, product: Product) -> tuple[int, int]:
        block = product.block_size
        return block // math.gcd(block, product.shape[1]), block

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
        n, row_bytes = leaves[0].shape  # rows of codes say of which shape the part is
        return dataclasses.replace(product, shape=(n, 2 * row_bytes))


@dataclasses.dataclass(frozen=True)
class Rows(Decode):
    """Rows of codes, scales and zeros, as a codec reads them: those of its five parts that are `present`."""

    codec: Codec
    present: tuple[bool, ...]

    @property
    def name(self) -> str:
        return "int8_matmul" if self.codec.codes == "signed" else "block_matmul"

    @property
    def linear(self) -> bool:
        return self.name == "int8_matmul"

    def planes(self, leaves: Leaves, product: Product) -> list[Array]:
        return self.codec.planes(product.shape[1], product.block_size, self._all(leaves))

    def stride(self, product: Product) -> int:
        return self.codec.stride(product.shape[1], product.block_size)

    def tiles(self, leaves: Leaves, product: Product) -> Tiles:
        part = lambda start, rows: [lax.dynamic_slice_in_dim(leaf, start, rows) for leaf in leaves]
        return lambda start, rows: self.planes(part(start, rows), product)

    def matrix(self, leaves: Leaves, product: Product, rows: slice = ALL, columns: slice = ALL) -> Array:
        planes = self.planes([leaf[rows] for leaf in leaves], product)
        return join(planes, product.shape[1])[:, columns]  # the compiler decodes only these columns

    def scaled_rows(self, leaves: Leaves) -> tuple[Array, Array] | None:
        codes, scale, *more = leaves
        whole = self.codec.codes == "signed" and scale.shape[1] == 1 and not more
        return (codes, scale) if whole else None

    def stored(self, product: Product, *, decoded: bool) -> Product | None:
        codec = self.codec
        if codec.bits not in (4, 8) or codec.scales == "nibbles" or codec.codes == "signed":
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
        codes, scale, outer, zero, outer_zero = self._all(leaves)
        if not self._reads_scales(decoded):
            scale, zero = self.codec.scales_and_zeros(scale, outer, zero, outer_zero)
        elif zero is not None and str(zero.dtype) not in ("uint8", "float32", "bfloat16", "float16"):
            zero = zero.astype(jnp.float32)
        return codes.view(np.uint8), scale, jnp.asarray(self.codec.all_values()), zero

    def dimensions(self, leaves: Leaves, product: Product) -> tuple[str, tuple[str, ...]] | None:
        if self.codec.codes != "signed" or len(leaves) != 2:
            return None
        # A partial block at the end of rows keeps columns together; one scale a row goes with all of them.
        whole = product.shape[1] % product.block_size == 0
        k, blocks = ("k" if whole else "kept"), ("k" if whole and leaves[1].shape[1] != 1 else "blocks")
        return f"n {k}, n {blocks}", ("n",) if product.transpose else ("k",) if whole else ()

    def local(self, leaves: Leaves, product: Product) -> Product:
        (n, row_bytes), k, bits = leaves[0].shape, product.shape[1], self.codec.bits
        part = k if row_bytes == bitstream.num_bytes(k, bits) else row_bytes * 8 // bits
        return dataclasses.replace(product, shape=(n, part))

    def _all(self, leaves: Leaves) -> list[Any]:
        rest = iter(leaves)
        return [next(rest) if p else None for p in self.present]

    def _reads_scales(self, decoded: bool) -> bool:
        """Whether kernels read stored scales directly."""
        _, _, outer, _, outer_zero = self.present
        return not (decoded or outer or outer_zero) and self.codec.scales in ("float", "e4m3", *E8M0)


NIBBLES, INTEGERS = Nibbles(), Rows(CODECS["int8"], (True, True, False, False, False))
