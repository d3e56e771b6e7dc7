"""4-bit arrays: two codes per byte, each an index into a table of 16 values."""

from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Float32, UInt8

from ..._checked import checked
from ...kernels import blockwise
from ...kernels.nf4_matmul import nf4_matmul
from .base import AbstractQuantizedArray, as_floating, quantize_stack
from .codecs import CODECS
from .layout import cut
from .scales import NestedScales

_C = TypeVar("_C", bound="AbstractCodebookArray")


class AbstractCodebookArray(AbstractQuantizedArray):
    """A 4-bit array: `codebook[codes] * scale`."""

    order = None

    codebook: ClassVar[np.ndarray]
    """The 16 values that codes stand for."""

    largest: ClassVar[float] = 1.0
    """The value as which the largest magnitude of a block is stored."""

    @classmethod
    @checked
    def quantize(
        cls: type[_C],
        x: ArrayLike,
        *,
        block_size: int = 64,
        double_quant: bool = False,
        axis: int = -1,
        stacked: int = 0,
        train_scales: bool = False,
    ) -> _C:
        """Quantises an array of any shape.

        **Arguments:**

        - `x`: any floating dtype, which becomes the logical dtype; computed in float32.
        - `block_size`: how many elements share a scale, a power of two from 32 to 4096. The array is
            flattened, so that blocks may cross rows and the last one may be partial. Default 64.
        - `double_quant`: stores the scales in 8 bits as well. Default False.
        - `axis`: the axis that blocks run along, last when the array is flattened. Default -1.
        - `stacked`: how many leading axes count the arrays of a stack, each quantised on its own: those
            that `vmap` or `lax.scan` will run over. Default 0.
        - `train_scales`: whether gradients flow into the scales. Default False.

        **Returns:** `x` rounded, as an array of this type, of the same shape and dtype.

        **Raises:** `ValueError` for a block size that is not allowed, `TypeError` for an array that is
        not floating.

        !!! example

            ```python
            import jax, jax.numpy as jnp, quaxlike as ql

            w = jax.random.normal(jax.random.key(0), (32, 128))
            ql.quaxify(jnp.dot)(ql.NF4Array.quantize(w), jnp.ones(128))
            ```
        """
        options = {"block_size": block_size, "double_quant": double_quant, "train_scales": train_scales}
        if stacked:
            return quantize_stack(cls, x, axis, stacked, options)
        stored, permutation = as_floating(cls, x, axis)
        codes, scale = cls._encode(stored, block_size, double_quant)
        out = cls.from_flat(
            codes,
            scale,
            shape=stored.shape,
            block_size=block_size,
            dtype=stored.dtype,
            train_scales=train_scales,
        )
        return out.with_axes(permutation)

    @classmethod
    def _encode(cls, x: Array, block_size: int, nested: bool) -> tuple[Array, Any]:
        largest = np.float32(cls.largest)
        codes, scale = blockwise.quantize_codebook(x, cls.codebook / largest, block_size)
        scale = scale / largest
        return codes, NestedScales.quantize(scale) if nested else scale

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
        """Makes an array from codes and scales without leading axes, as files store them.

        **Arguments:**

        - `codes`: `ceil(prod(shape) / 2)` bytes, row-major, high nibble first.
        - `scale`: one for each block of `block_size` codes.
        - `shape`: the shape of the array.
        - `block_size`: how many codes share a scale.
        - `dtype`: the logical dtype.
        - `train_scales`: whether gradients flow into the scales.
        """
        out = cls(
            codes=codes,
            scale=scale,
            block_size=block_size,
            inner=shape,
            logical_dtype=jnp.dtype(dtype),
            train_scales=train_scales,
        )
        return cut(out, (), shape)

    def encoded(self, rows: Float[Array, "*lead n"]) -> tuple[Array, Any]:
        nested = isinstance(self.scale, NestedScales)
        encode = lambda row: self._encode(row, self.block, nested)
        for _ in rows.shape[:-1]:
            encode = jax.vmap(encode)
        return encode(rows)

    def flattened(self: _C) -> _C | None:
        """The same codes as one row of bytes, as `from_flat` takes them; None if they do not form one."""
        if self.axes or (self.num_lead and not self.joins(in_columns=True)):
            return None
        if not self.num_lead:
            return self
        if isinstance(self.scale, NestedScales):
            return None
        return jax.tree.map(lambda leaf: leaf.reshape(-1), self)

    def matmul(
        self,
        x: Float[Array, "*batch contracted"],
        parts: Any,
        *,
        shape: tuple[int, int],
        transpose: bool,
        out_dtype: np.dtype,
    ) -> Float[Array, "*batch free"]:
        codes, scale, _ = parts
        # Keeps rows of codes if no block crosses them, so that they can be sharded.
        by_rows = codes.ndim > 1 and shape[1] % self.block == 0
        flat = lambda leaf, size: leaf.reshape((shape[0], shape[1] // size) if by_rows else -1)
        return nf4_matmul(
            x,
            flat(codes, 2),
            scale.for_kernels() if isinstance(scale, NestedScales) else flat(scale, self.block),
            self.codebook,
            shape=shape,
            block_size=self.block,
            transpose=transpose,
            out_dtype=out_dtype,
        )


class NF4Array(AbstractCodebookArray):
    """A 4-bit NormalFloat array, identical to that of bitsandbytes bit for bit.

    Source: Dettmers et al., QLoRA, <https://arxiv.org/abs/2305.14314>.
    """

    codec, codebook = CODECS["nf4"], blockwise.NF4


class FP4Array(AbstractCodebookArray):
    """A 4-bit floating-point array (1 sign, 2 exponent, 1 mantissa bit), identical to that of bitsandbytes
    bit for bit."""

    codec, codebook = CODECS["fp4"], blockwise.FP4


class Int4Array(AbstractCodebookArray):
    """A 4-bit integer array: integers from -7 to 7, times a scale for each block."""

    codec, codebook = CODECS["int4"], blockwise.INT4
    largest = 7.0
