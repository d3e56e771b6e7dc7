"""8-bit integer arrays."""

import dataclasses
import numbers
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Float32, Int

from ..._checked import checked
from ...kernels import blockwise, int8_matmul
from .base import AbstractScaledArray, as_floating, quantize_stack
from .grid import Grid
from .scales import NestedScales, dense_scales

_I = TypeVar("_I", bound="Int8Array")


class Int8Array(AbstractScaledArray):
    """An 8-bit integer array: integers from -127 to 127, times a scale for each channel or block."""

    codes_per_entry = 1

    @classmethod
    @checked
    def quantize(
        cls: type[_I],
        x: ArrayLike,
        *,
        block_size: int | None = None,
        double_quant: bool = False,
        axis: int = -1,
        stacked: int = 0,
        train_scales: bool = False,
    ) -> _I:
        """Quantises an array of any shape but a scalar; needs no calibration.

        **Arguments:**

        - `x`: any floating dtype, which becomes the logical dtype; computed in float32.
        - `block_size`: how many elements along `axis` share a scale; the last block may be partial.
            None (default) for one scale a channel.
        - `double_quant`: for 4-bit types alone: there are few scales here, and they stay float32.
        - `axis`: the axis that blocks run along, the contracted one of a weight. Default -1.
        - `stacked`: how many leading axes count the arrays of a stack: those that `vmap` or `lax.scan` will
            run over. Default 0.
        - `train_scales`: whether gradients flow into the scales. Default False.

        **Returns:** `x` rounded, as an array of this type, of the same shape and dtype.

        **Raises:** `ValueError` for a block size that is not positive, a scalar, or `double_quant`;
        `TypeError` for an array that is not floating.

        !!! example

            ```python
            import jax, jax.numpy as jnp, quaxlike as ql

            w = jax.random.normal(jax.random.key(0), (32, 128))
            ql.quaxify(jnp.dot)(ql.Int8Array.quantize(w), jnp.ones(128))
            ```
        """
        if double_quant:
            raise ValueError("Int8Array keeps its scales in float32; double_quant is for 4-bit types.")
        if stacked:
            options = {"block_size": block_size, "train_scales": train_scales}
            return quantize_stack(cls, x, axis, stacked, options)
        stored, permutation = as_floating(cls, x, axis)
        if stored.ndim == 0:
            raise ValueError("Int8Array.quantize takes an array of at least one axis; found a scalar.")
        if block_size is not None and (
            isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral)
        ):
            raise TypeError(f"block_size must be a whole number or None, got {block_size!r}.")
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be positive or None, got {block_size}.")
        codes, scale = blockwise.quantize_int(stored, 127, block_size)
        out = cls(
            codes=codes,
            scale=scale,
            block_size=block_size,
            logical_dtype=stored.dtype,
            train_scales=train_scales,
        )
        return out.with_axes(permutation)

    @classmethod
    def decode(
        cls, codes: Array, scale: Array, inner: tuple[int, ...], block_size: int, dtype: np.dtype
    ) -> Array:
        return blockwise.dequantize_int(codes, scale, block_size=block_size, dtype=dtype)

    @classmethod
    def decode_at(
        cls, codes: Array, scale: Array, index: Int[Array, "*shape"], block_size: int
    ) -> Float32[Array, "*shape"]:
        return codes[index].astype(jnp.float32) * scale[index // block_size]

    def grid(self) -> Grid | None:
        return self._grid_of(np.arange(-127.0, 128.0))

    def with_codes(self: _I, codes: np.ndarray) -> _I:
        integers = (codes.astype(np.int16) - 127).astype(np.int8)
        return dataclasses.replace(self, codes=jnp.asarray(integers.reshape(self.codes.shape)))

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
        return int8_matmul(
            x,
            codes.reshape(shape),
            dense_scales(scale).reshape(shape[0], -(-shape[1] // max(self.block, 1))),
            block_size=self.block,
            transpose=transpose,
            out_dtype=out_dtype,
        )

    def joins(self, *, in_columns: bool) -> bool:
        # Rows are cut into blocks on their own, so that more of them are a larger matrix in any case.
        return not in_columns or self.codes.shape[-1] % max(self.block, 1) == 0

    def reshaped(self: _I, shape: tuple[int, ...]) -> _I | None:
        if self.axes or not shape or isinstance(self.scale, NestedScales):
            return None
        if shape[-1] == self.codes.shape[-1]:
            scale = self.scale.reshape(*shape[:-1], self.scale.shape[-1])
        elif len(shape) <= self.num_lead:
            return None
        elif shape[: self.num_lead] == self.codes.shape[:-1] and self.block_size is None:
            rows = self.scale.reshape(*shape[: self.num_lead], *[1] * (len(shape) - self.num_lead))
            scale = jnp.broadcast_to(rows, (*shape[:-1], 1))
        elif shape[: self.num_lead] == self.codes.shape[:-1] and shape[-1] % self.block == 0:
            scale = self.scale.reshape(*shape[:-1], shape[-1] // self.block)
        else:
            return None
        return dataclasses.replace(self, codes=self.codes.reshape(shape), scale=scale)
