"""Block scales that are themselves quantised."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float32

from .. import blockwise


@jtu.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class NestedScales:
    """Block scales quantised to 8 bits each ("double quantisation"), given by `map[codes] * absmax + offset`.

    256 blocks share each `absmax`. Scales take up a significant part of a quantised weight's memory: for
    example, 4-bit codes in blocks of 64 amount to 4.13 bits per weight, compared to 4.5 bits with float32
    scales. Kernels decode the scales on the fly. For stacked weights, all three arrays can have leading axes.

    **Arguments:**

    - `codes`: indices into the map (one byte per block), of shape `(*lead, blocks)`.
    - `absmax`: a float32 array of shape `(*lead, ceil(blocks / 256))`.
    - `offset`: a float32 array of shape `(*lead,)`.
    - `quant_map`: the map's 256 values, either as a tuple or as a float32 array without leading axes.
        Defaults to the signed dynamic map.
    """

    # Not necessarily arrays, but e.g. also `jax.ShapeDtypeStruct`s or a kernel's references.
    codes: Any
    absmax: Any
    offset: Any
    quant_map: Any = None

    def __post_init__(self) -> None:
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

    # A map given as a tuple is static. As a leaf, it would lack the leading axes of all other leaves, and so
    # e.g. `jax.vmap` would fail. Kernels still receive it as an operand.

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[float, ...] | None]:
        static = self.quant_map if isinstance(self.quant_map, tuple) else None
        parts = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        parts |= {"quant_map": None} if static is not None else {}
        return [(jtu.GetAttrKey(name), part) for name, part in parts.items()], static

    @classmethod
    def tree_unflatten(cls, static: tuple[float, ...] | None, parts: Sequence[Any]) -> "NestedScales":
        # Skip validation, because JAX also unflattens with placeholders without a shape.
        new = object.__new__(cls)
        for f, part in zip(dataclasses.fields(cls), parts, strict=True):
            object.__setattr__(new, f.name, part)
        if static is not None:
            object.__setattr__(new, "quant_map", static)
        return new

    @classmethod
    def quantize(cls, scale: Float32[Array, " blocks"]) -> "NestedScales":
        return cls(*blockwise.quantize_scales(scale))

    def times(self, factor: Array) -> "NestedScales":
        """Multiplies all scales by a scalar."""
        return dataclasses.replace(self, absmax=self.absmax * factor, offset=self.offset * factor)

    @property
    def table(self) -> Any:
        """The map's 256 values in float32."""
        if self.quant_map is None:
            return blockwise.dynamic_map()
        return np.asarray(self.quant_map, np.float32) if isinstance(self.quant_map, tuple) else self.quant_map

    def with_map(self) -> "NestedScales":
        """Returns a copy with the map as an array."""
        return dataclasses.replace(self, quant_map=jnp.asarray(self.table))

    def operands(self) -> tuple[Array, Array, Array, Array]:
        """Returns codes, absmax, offset and map, as expected by kernels."""
        return self.codes, self.absmax, self.offset, jnp.asarray(self.table)

    def __getitem__(self, i: Any) -> Any:
        """Returns one or several operands.

        This is for backward compatibility with version 0.1, where kernels accepted a named tuple.
        """
        return self.operands()[i]


def dense_scales(scale: Any) -> Float32[Array, "*lead blocks"]:
    """Returns the scales in float32, dequantising them if necessary."""
    if not isinstance(scale, NestedScales):
        return jnp.asarray(scale)
    table = scale.table

    def dense(codes: Array, absmax: Array, offset: Array) -> Array:
        return blockwise.dequantize_scales(codes, absmax, offset, quant_map=table)

    # Any leading axes stack several weights, each with separate blocks.
    for _ in range(scale.offset.ndim):
        dense = jax.vmap(dense)
    return dense(scale.codes, scale.absmax, scale.offset)
