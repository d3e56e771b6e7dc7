"""Scales of blocks: in the form that codecs read, and quantised themselves."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from ... import kernels
from ..._checked import checked
from ...kernels import blockwise
from ...kernels.block_matmul import Codec
from ..batch_axes import mapped


class BlockScales(eqx.Module):
    """Scales and zero points of blocks, as a [`Codec`][quaxlike.arrays.quantized.Codec] reads them.

    **Arguments:**

    - `scale`: `(*lead, blocks)`.
    - `outer`: `(*lead, groups)`, factors of the scales of each group of blocks; or None.
    - `zero`: `(*lead, blocks)`, zero points or minima; or None.
    - `outer_zero`: `(*lead, groups)`, factors of the minima; or None.
    """

    scale: Array | np.ndarray
    outer: Array | np.ndarray | None = None
    zero: Array | np.ndarray | None = None
    outer_zero: Array | np.ndarray | None = None

    def parts(self) -> tuple[Any, Any, Any, Any]:
        return self.scale, self.outer, self.zero, self.outer_zero

    def times(self, factor: Array, codec: Codec) -> "tuple[Codec, BlockScales]":
        """These scales times a scalar or factors `(*lead, 1)`, and the codec that reads them."""
        wide = lambda x: x.astype(jnp.float32)
        scaled = self
        if self.outer is not None:
            outer = self.outer / factor if codec.over else wide(self.outer) * factor
            scaled = dataclasses.replace(self, outer=outer)
        else:
            scale, _ = codec.scales_and_zeros(*self.parts())
            scaled = dataclasses.replace(self, scale=scale * factor)
            codec = dataclasses.replace(codec, scales="float")
        if codec.zeros in ("plus", "minus") and self.outer_zero is not None:
            return codec, dataclasses.replace(scaled, outer_zero=wide(self.outer_zero) * factor)
        if codec.zeros in ("plus", "minus") and self.zero is not None:
            return codec, dataclasses.replace(scaled, zero=wide(self.zero) * factor)
        return codec, scaled


class NestedScales(eqx.Module):
    """Block scales in 8 bits each ("double quantisation"): `map[codes] * absmax + offset`.

    A weight takes 4.13 bits for blocks of 64, against 4.5 with float32 scales. Leading axes of the three
    arrays are those of stacked weights.

    **Arguments:**

    - `codes`: `(*lead, blocks)`, indices into the map.
    - `absmax`: `(*lead, ceil(blocks / 256))`.
    - `offset`: `(*lead,)`.
    - `quant_map`: the 256 values of the map; None for the signed dynamic map.
    """

    codes: UInt8[Array, "*lead blocks"]
    absmax: Float32[Array, "*lead nested"]
    offset: Float32[Array, "*lead"]
    quant_map: tuple[float, ...] | None = eqx.field(static=True, default=None)

    def __check_init__(self) -> None:
        *lead, blocks = self.codes.shape
        expected = (*lead, -(-blocks // blockwise.NESTED_BLOCK)), tuple(lead)
        if (self.absmax.shape, self.offset.shape) != expected:
            raise ValueError(
                f"NestedScales with codes of shape {self.codes.shape} takes absmax and offset of shapes "
                f"{expected[0]} and {expected[1]}; found {self.absmax.shape} and {self.offset.shape}."
            )
        dtypes = self.codes.dtype, self.absmax.dtype, self.offset.dtype
        if dtypes[0] != np.uint8 or dtypes[1].kind not in "fV" or dtypes[2].kind not in "fV":
            raise ValueError(
                f"NestedScales takes codes of uint8, and absmax and offset that are floats; found {dtypes}."
            )

    @classmethod
    @checked
    def quantize(cls, scale: Float32[Array, " blocks"]) -> "NestedScales":
        return cls(*blockwise.quantize_scales(scale))

    def times(self, factor: Array) -> "NestedScales":
        """These scales times a scalar."""
        return dataclasses.replace(self, absmax=self.absmax * factor, offset=self.offset * factor)

    @property
    def table(self) -> Float32[np.ndarray, "256"]:
        """The values of the map."""
        if self.quant_map is None:
            return blockwise.dynamic_map()
        return np.asarray(self.quant_map, np.float32)

    def for_kernels(self) -> kernels.NestedScales:
        """The scales, without leading axes, in the form that kernels take."""
        return kernels.NestedScales(self.codes, self.absmax, self.offset, jnp.asarray(self.table))

    def dense(self) -> Float32[Array, "*lead blocks"]:
        """The float32 scales."""
        table = self.table

        def dense(codes: Array, absmax: Array, offset: Array) -> Array:
            return blockwise.dequantize_scales(codes, absmax, offset, quant_map=table)

        return mapped(dense, self.offset.ndim)(self.codes, self.absmax, self.offset)


def dense_scales(scale: Array | NestedScales) -> Float32[Array, "*lead blocks"]:
    """The float32 scales, however they are stored."""
    return scale.dense() if isinstance(scale, NestedScales) else jnp.asarray(scale)
