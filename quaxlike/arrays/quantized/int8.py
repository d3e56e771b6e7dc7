"""8-bit integer arrays."""

from typing import Any, TypeVar

import numpy as np
from jaxtyping import Array, ArrayLike, Float

from ..._checked import checked
from ...kernels import blockwise, int8_matmul
from .base import AbstractQuantizedArray, as_floating, check_block_size, quantize_stack
from .codecs import CODECS

_I = TypeVar("_I", bound="Int8Array")


class Int8Array(AbstractQuantizedArray):
    """An 8-bit integer array: integers from -127 to 127, times a scale for each channel or block."""

    codec, order = CODECS["int8"], None

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
        """Quantises an array of any shape but a scalar, without calibration.

        **Arguments:**

        - `x`: any floating dtype, which becomes the logical dtype; computed in float32.
        - `block_size`: how many elements along `axis` share a scale; the last block may be partial.
            None (default) for one scale per channel.
        - `double_quant`: only for the 4-bit types: there are few scales here, and they stay float32.
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
        check_block_size(block_size)
        codes, scale = blockwise.quantize_int(stored, 127, block_size)
        out = cls(
            codes=codes,
            scale=scale,
            block_size=block_size,
            logical_dtype=stored.dtype,
            train_scales=train_scales,
        )
        return out.with_axes(permutation)

    def encoded(self, rows: Float[Array, "*lead n"]) -> tuple[Array, Array]:
        return blockwise.quantize_int(rows, 127, self.block_size)

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
        return int8_matmul(
            x,
            codes.reshape(shape),
            scale.reshape(shape[0], -(-shape[1] // max(self.block, 1))),
            block_size=max(self.block, 1),
            transpose=transpose,
            out_dtype=out_dtype,
        )
