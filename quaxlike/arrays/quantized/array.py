"""The quantised types: NF4, FP4, int4, int8, arbitrary block formats, and an updatable cache.

NF4 and FP4 are bit-for-bit identical to bitsandbytes, so that files can be exchanged. Changing rounding,
nibble order or block layout breaks this.
"""

from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Int, Int8, UInt8

from ..._checked import checked
from ...kernels import blockwise
from ...kernels.block_matmul import CODECS, Codec
from ..batch_axes import mapped
from ..gradients import trained_if
from .base import AbstractQuantizedArray, shortest
from .scales import BlockScales, NestedScales, encode, find_codec
from .search import SEARCHED

_C = TypeVar("_C", bound="AbstractCodebookArray")
_B = TypeVar("_B", bound=AbstractQuantizedArray)


class AbstractCodebookArray(AbstractQuantizedArray):
    """A 4-bit array: `codebook[codes] * scale`."""

    order = None
    flattens = True

    codebook: ClassVar[np.ndarray]
    """The 16 values that codes represent, before multiplying by the scale."""

    largest: ClassVar[float] = 1.0
    """The value in the codebook to which a block's largest magnitude is mapped."""

    @classmethod
    def from_flat(
        cls: type[_C],
        codes: UInt8[Array, " bytes"],
        scale: Float32[Array, " blocks"] | NestedScales,
        *,
        shape: tuple[int, ...],
        block_size: int,
        dtype: DTypeLike = jnp.float32,
        train_scales: bool = False,
    ) -> _C:
        """Creates an array from codes and scales as stored in files, i.e. without leading axes.

        **Arguments:**

        - `codes`: `ceil(prod(shape) / 2)` bytes, row-major, high nibble first.
        - `scale`: one scale for each block of `block_size` codes.
        - `shape`: the shape of the array.
        - `block_size`: the number of codes sharing a scale.
        - `dtype`: the logical dtype.
        - `train_scales`: whether the scales should be trained.
        """
        options: Any = {"logical_dtype": jnp.dtype(dtype), "gradients": trained_if(train_scales)}
        return cls(codes, scale, block_size, shape, **options).cut((), shape)

    @classmethod
    def _encode(
        cls, x: Array, codec: Codec, block: Any, nested: bool, like: Any, importance: Array | None
    ) -> tuple[Array, Any]:
        largest = np.float32(cls.largest)

        def encode(row: Array) -> tuple[Array, Any]:
            # The kernel quantises to values of magnitude at most 1, so normalise tables with larger values,
            # and adjust the scales accordingly.
            codes, scale = blockwise.quantize_codebook(row, cls.codebook / largest, block)
            return codes, NestedScales.quantize(scale / largest) if nested else scale / largest

        return mapped(encode, x.ndim - 1)(x)

    def flattened(self: _C) -> _C | None:
        """Inverts `from_flat`: converts the codes to a single row of bytes.

        Returns None if this isn't possible, e.g. because nested scales can't be merged.
        """
        if self.axes or (self.num_lead and not self.joins(in_columns=True)):
            return None
        if not self.num_lead:
            return self
        if isinstance(self.scale, NestedScales):
            return None
        return jax.tree.map(lambda leaf: leaf.reshape(-1), self)


class NF4Array(AbstractCodebookArray):
    """A 4-bit NormalFloat array, bit-for-bit identical to bitsandbytes.

    Source: Dettmers et al., QLoRA, <https://arxiv.org/abs/2305.14314>.
    """

    codec, codebook = CODECS["nf4"], blockwise.NF4


class FP4Array(AbstractCodebookArray):
    """A 4-bit floating-point array (1 sign bit, 2 exponent bits, 1 mantissa bit).

    This is bit-for-bit identical to bitsandbytes.
    """

    codec, codebook = CODECS["fp4"], blockwise.FP4


class Int4Array(AbstractCodebookArray):
    """A 4-bit integer array: integers from -7 to 7, and one scale per block."""

    codec, codebook = CODECS["int4"], blockwise.INT4
    largest = 7.0


class Int8Array(AbstractQuantizedArray):
    """An 8-bit integer array: integers from -127 to 127, and one scale per channel or block."""

    codec, order = CODECS["int8"], None

    @classmethod
    def _encode(
        cls, x: Array, codec: Codec, block: Any, nested: bool, like: Any, importance: Array | None
    ) -> tuple[Array, Any]:
        return blockwise.quantize_int(x, 127, block)


class BlockArray(AbstractQuantizedArray):
    """An array in any published block format. A codec specifies how to decode the codes and scales.

    This is usually created by `quantize`, or read from a file by `quaxlike.lm.read`. As for all quantised
    arrays, products on either side, transposing, slicing and stacking don't change the codes.

    **Arguments:**

    - `codes`: `(*lead, bytes)` uint8, a little-endian stream of codes; or int8 for the codec `int8`.
    - `scale`: `BlockScales` with the same leading axes.
    - `order`: if columns are sorted (as for GPTQ's act-order, which makes each block contiguous), each stored
        column's logical column, `(*lead, columns)`. The array's first inner axis is then an axis of rows,
        which share this order and can't be separated. None if columns are in their original order.
    - `codec`: the format of codes, scales and zeros.
    - `block_size`, `inner`, `axes`, `logical_dtype`, `gradients`: as for all quantised arrays.
    """

    codes: UInt8[Array, "*lead n"] | Int8[Array, "*lead n"]
    scale: BlockScales
    order: Int[Array, "*lead columns"] | None = None
    codec: Codec = eqx.field(static=True, default=CODECS["int4_block"])

    @classmethod
    def from_codes(
        cls: type[_B],
        codes: Any,
        scale: BlockScales,
        *,
        codec: Codec,
        block_size: int | None,
        order: Any = None,
        count: int | None = None,
        dtype: DTypeLike = jnp.float32,
        train_scales: bool = False,
    ) -> _B:
        """Creates an array from scales and codes, with one code per byte. For reading files.

        **Arguments:**

        - `codes`: `(*lead, n)` uint8; with `order`, `(*lead, rows, n)`.
        - `scale`: scales with the same leading axes as `codes`, including rows.
        - `codec`, `block_size`: the format of these.
        - `order`: `(*lead, n)`, each stored column's logical column.
        - `count`: the number of codes per row, if `codes` are already packed.
        - `dtype`: the logical dtype.
        - `train_scales`: whether floating-point scales should be trained.
        """
        # Rows sharing an order have to stay together, so they become an inner axis, which can't be sliced.
        inner = (*codes.shape[-1 if order is None else -2 : -1], codes.shape[-1] if count is None else count)
        packed = codes if count is not None else codec.pack(codes)
        if order is not None:

            def flat(leaf: Any) -> Any:
                return jax.lax.collapse(leaf, leaf.ndim - 2)

            packed, scale = flat(packed), jax.tree.map(flat, scale)
        return cls(
            codes=jnp.asarray(packed),
            scale=jax.tree.map(jnp.asarray, scale),
            order=None if order is None else jnp.asarray(order),
            codec=codec,
            block_size=block_size,
            inner=shortest(inner, codec),
            logical_dtype=jnp.dtype(dtype),
            gradients=trained_if(train_scales),
        )

    @classmethod
    def _encode(
        cls, x: Array, codec: Codec, block: Any, nested: bool, like: Any, importance: Array | None
    ) -> tuple[Array, Any]:
        searches = codec in SEARCHED
        return _packed(x, codec, block, like, searches=searches, importance=importance)


class CacheArray(AbstractQuantizedArray):
    """An updatable quantised array, such as a key cache.

    `dynamic_update_slice` only rounds the update. All other codes and scales remain unchanged, so rounding
    errors don't accumulate as you append to a cache. If the update only covers part of the last axis (along
    which elements share scales) then the array is materialised, as for all other quantised arrays. Use
    `empty` to create one.

    **Arguments:** as for [`quaxlike.BlockArray`][].
    """

    codes: UInt8[Array, "*lead n"] | Int8[Array, "*lead n"]
    scale: BlockScales
    codec: Codec = eqx.field(static=True, default=CODECS["int8"])

    order = None

    @classmethod
    @checked
    def empty(
        cls: type[_B], shape: tuple[int, ...], codec: str | Codec, *, dtype: DTypeLike = jnp.float32
    ) -> _B:
        """Creates an array of zeros.

        **Arguments:**

        - `shape`: the shape of the array. Blocks run along the last axis.
        - `codec`: the storage format, as for `quantize`.
        - `dtype`: the logical dtype.

        !!! example

            ```python
            import jax.numpy as jnp, quaxlike as ql
            from jax import lax
            from quaxlike.arrays.quantized import CacheArray

            keys = CacheArray.empty((512, 8, 64), "int8")
            write = ql.quaxify(lax.dynamic_update_slice)
            keys = write(keys, jnp.ones((1, 8, 64)), (jnp.int32(3), 0, 0))
            ```
        """
        block = find_codec(cls, codec).block
        # If the axis is smaller than the codec's block size then a single block covers all of it.
        block = None if block is None or block >= shape[-1] else block

        def make(x: Any) -> Any:
            return cls.quantize(x, codec=codec, block_size=block)

        # Only compute shapes: the dense array of a long cache may not fit into memory.
        of = jax.eval_shape(make, jax.ShapeDtypeStruct(shape, dtype))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), of)

    @classmethod
    def _encode(
        cls, x: Array, codec: Codec, block: Any, nested: bool, like: Any, importance: Array | None
    ) -> tuple[Array, Any]:
        return _packed(x, codec, block, like)


def _packed(
    x: Array, codec: Codec, block: int | None, like: Any, **options: Any
) -> tuple[Array, BlockScales]:
    codes, scales = encode(x, codec, max(x.shape[-1], 1) if block is None else block, like=like, **options)
    return codec.pack(codes), scales
