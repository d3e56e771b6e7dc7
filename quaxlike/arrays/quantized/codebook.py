"""4-bit arrays: two codes a byte, each an index into a table of 16 values."""

import dataclasses
import math
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Float32, Int, UInt8

from ..._checked import checked
from ...kernels import blockwise
from ...kernels.nf4_matmul import nf4_matmul
from .base import AbstractScaledArray, as_floating, quantize_stack
from .grid import Grid
from .scales import NestedScales, dense_scales

_C = TypeVar("_C", bound="AbstractCodebookArray")


class AbstractCodebookArray(AbstractScaledArray):
    """A 4-bit array: `codebook[codes] * scale`."""

    codes_per_entry = 2

    codebook: ClassVar[np.ndarray]
    """The 16 values that codes stand for."""

    largest: ClassVar[float] = 1.0
    """The value that a block's largest magnitude is stored as."""

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
        - `axis`: the axis that blocks run along, last where the array is flattened. Default -1.
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
        largest = np.float32(cls.largest)
        codes, scale = blockwise.quantize_codebook(stored, cls.codebook / largest, block_size)
        scale = scale / largest
        out = cls.from_flat(
            codes,
            NestedScales.quantize(scale) if double_quant else scale,
            shape=stored.shape,
            block_size=block_size,
            dtype=stored.dtype,
            train_scales=train_scales,
        )
        return out.with_axes(permutation)

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
        """An array of given codes and scales, as they are stored in files: without leading axes.

        **Arguments:**

        - `codes`: `ceil(prod(shape) / 2)` bytes, row-major, high nibble first.
        - `scale`: one for each block of `block_size` codes.
        - `shape`: of the array.
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
        return out._with_inner(shape)

    def _with_inner(self: _C, shape: tuple[int, ...]) -> _C:
        """The inner axes in another shape, as few of them as possible left inner: those that whole blocks
        cannot be cut along. Nested scales tie all of them, since their own blocks cross rows."""
        tied = len(shape)
        if not isinstance(self.scale, NestedScales):
            whole = (n for n in range(1, tied) if math.prod(shape[tied - n :]) % self.block == 0)
            tied = next(whole, tied)
        lead, inner = shape[: len(shape) - tied], shape[len(shape) - tied :]
        one_axis = len(inner) == 1 and inner[0] % 2 == 0
        inner_or_none = None if one_axis else inner
        if not lead or isinstance(self.scale, NestedScales):
            return dataclasses.replace(self, inner=inner_or_none)
        kept, size = self.codes.shape[:-1], math.prod(inner)
        return dataclasses.replace(
            self,
            codes=self.codes.reshape(*kept, *lead, -(-size // 2)),
            scale=self.scale.reshape(*kept, *lead, -(-size // self.block)),
            inner=inner_or_none,
        )

    def untied(self: _C) -> _C:
        dense = dataclasses.replace(self, scale=dense_scales(self.scale))
        return dense._with_inner(self.inner_shape)

    def flattened(self: _C) -> _C | None:
        """The same codes as one row of bytes, as `from_flat` takes them; None if they do not form one."""
        if self.axes or (self.num_lead and not self.joins(in_columns=True)):
            return None
        if not self.num_lead:
            return self
        if isinstance(self.scale, NestedScales):
            return None
        return jax.tree.map(lambda leaf: leaf.reshape(-1), self)

    def reshaped(self: _C, shape: tuple[int, ...]) -> _C | None:
        if self.axes:
            return None
        kept, cut = shape[: self.num_lead], shape[self.num_lead :]
        if kept == self.codes.shape[:-1] and math.prod(cut) == math.prod(self.inner_shape):
            return self._with_inner(cut)
        dense = dataclasses.replace(self, scale=dense_scales(self.scale))
        flat = dense.flattened()
        return None if flat is None else flat._with_inner(shape)

    @classmethod
    def decode(
        cls, codes: Array, scale: Array, inner: tuple[int, ...], block_size: int, dtype: np.dtype
    ) -> Array:
        dense = blockwise.dequantize_codebook(
            codes, scale, cls.codebook, n=math.prod(inner), block_size=block_size, dtype=dtype
        )
        return dense.reshape(inner)

    @classmethod
    def decode_at(
        cls, codes: Array, scale: Array, index: Int[Array, "*shape"], block_size: int
    ) -> Float32[Array, "*shape"]:
        pair = codes[index // 2]
        code = jnp.where(index % 2 == 0, pair >> 4, pair & 15)
        return jnp.asarray(cls.codebook)[code] * scale[index // block_size]

    def grid(self) -> Grid | None:
        return self._grid_of(self.codebook)

    def with_codes(self: _C, codes: np.ndarray) -> _C:
        pairs = np.pad(codes.reshape(-1), (0, codes.size % 2)).reshape(-1, 2)
        packed = pairs[:, 0] << 4 | pairs[:, 1]
        return dataclasses.replace(self, codes=jnp.asarray(packed.reshape(self.codes.shape)))

    def matmul(
        self,
        x: Float[Array, "*batch contracted"],
        parts: Any,
        *,
        shape: tuple[int, int],
        transpose: bool,
        out_dtype: np.dtype,
    ) -> Float[Array, "*batch free"]:
        codes, scale = parts
        # Rows of codes where blocks do not cross them, so that devices can share them.
        rows = (shape[0],) if codes.ndim > 1 and shape[1] % self.block == 0 else ()
        return nf4_matmul(
            x,
            codes.reshape(*rows, -1),
            scale.for_kernels() if isinstance(scale, NestedScales) else scale.reshape(*rows, -1),
            self.codebook,
            shape=shape,
            block_size=self.block,
            transpose=transpose,
            out_dtype=out_dtype,
        )


class NF4Array(AbstractCodebookArray):
    """A 4-bit NormalFloat array, bit for bit as bitsandbytes makes it.

    Source: Dettmers et al., QLoRA, <https://arxiv.org/abs/2305.14314>.
    """

    codebook = blockwise.NF4


class FP4Array(AbstractCodebookArray):
    """A 4-bit floating-point array (1 sign, 2 exponent, 1 mantissa bit), bit for bit as bitsandbytes
    makes it."""

    codebook = blockwise.FP4


class Int4Array(AbstractCodebookArray):
    """A 4-bit integer array: integers from -7 to 7, times a scale for each block."""

    codebook = blockwise.INT4
    largest = 7.0
