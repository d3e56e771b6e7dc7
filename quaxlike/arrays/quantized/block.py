"""Arrays in the block formats in which weights are published."""

import dataclasses
import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, UInt8

from ..._checked import checked
from ...kernels import bits as bitstream
from ...kernels.block_matmul import block_matmul
from ...kernels.block_matmul.reference import join
from .base import AbstractQuantizedArray, as_floating, quantize_stack
from .codecs import CODECS, Codec, Rows
from .encode import encode
from .grid import Grid, sorted_table
from .scales import BlockScales

_B = TypeVar("_B", bound="BlockArray")


class BlockArray(AbstractQuantizedArray):
    """An array in any of the block formats in which weights are published: a table of codecs says how codes
    and scales are read.

    Make one with `quantize`, or read a file with `quaxlike.interop.load`. It does what every quantised
    array does: products on either side, transposing, slicing and stacking keep codes as they are.

    **Arguments:**

    - `codes`: `(*lead, bytes)` uint8, a little-endian stream of codes.
    - `scale`: `BlockScales`, with the same leading axes.
    - `order`: for codes whose columns were sorted, so that those of a block stand together (act-order
        of GPTQ): which logical column each stored one is, `(*lead, columns)`. Its first
        inner axis counts rows, which share the order and stay together. None for columns that are in order.
    - `codec`: how codes, scales and zeros are stored.
    - `block_size`, `inner`, `axes`, `logical_dtype`, `train_scales`: as of every quantised array.
    """

    codes: UInt8[Array, "*lead n"]
    scale: BlockScales
    order: Int[Array, "*lead columns"] | None = None
    codec: Codec = eqx.field(static=True, default=CODECS["int4_block"])

    @classmethod
    @checked
    def quantize(
        cls: type[_B],
        x: ArrayLike,
        *,
        codec: str | Codec = "int4_block",
        block_size: int | None = None,
        double_quant: bool = False,
        axis: int = -1,
        stacked: int = 0,
        train_scales: bool = False,
    ) -> _B:
        """Quantises an array of any shape but a scalar: each block on its own, to the nearest codes.

        **Arguments:**

        - `x`: any floating dtype, which becomes the logical dtype; computed in float32.
        - `codec`: a name from the table of codecs (`quaxlike.arrays.quantized.CODECS`), or a codec.
        - `block_size`: how many elements along `axis` share a scale, the last block may be partial; the
            codec's if None.
        - `double_quant`: for 4-bit types alone; codecs say themselves how scales are stored.
        - `axis`: the axis that blocks run along, the contracted one of a weight. Default -1.
        - `stacked`: how many leading axes count the arrays of a stack. They are free in any case.
        - `train_scales`: whether gradients flow into floating scales. Default False.

        **Returns:** `x` rounded, as an array of this type, of the same shape and dtype.

        **Raises:** `ValueError` for an unknown codec, a block size that is not positive, a scalar or
        `double_quant`; `TypeError` for an array that is not floating.

        !!! example

            ```python
            import jax, jax.numpy as jnp, quaxlike as ql

            w = jax.random.normal(jax.random.key(0), (32, 128))
            ql.quaxify(jnp.dot)(ql.BlockArray.quantize(w, codec="mxfp4"), jnp.ones(128))
            ```
        """
        if double_quant:
            raise ValueError("A codec says how its scales are stored; double_quant is for NF4, FP4 and int4.")
        if isinstance(codec, str):
            if codec not in CODECS:
                raise ValueError(f"There is no codec {codec!r}; there are {', '.join(CODECS)}.")
            codec = CODECS[codec]
        if not isinstance(codec, Codec):
            raise TypeError(f"BlockArray.quantize takes a codec or the name of one; found {codec!r}.")
        if stacked:
            options = {"codec": codec, "block_size": block_size, "train_scales": train_scales}
            return quantize_stack(cls, x, axis, stacked, options)
        stored, permutation = as_floating(cls, x, axis)
        if stored.ndim == 0:
            raise ValueError("BlockArray.quantize takes an array of at least one axis; found a scalar.")
        block = codec.block if block_size is None else block_size
        if block is not None and (isinstance(block, bool) or not isinstance(block, numbers.Integral)):
            raise TypeError(f"block_size must be a whole number or None, got {block!r}.")
        if block is not None and block < 1:
            raise ValueError(f"block_size must be positive or None, got {block}.")
        codes, parts = encode(stored, codec, max(stored.shape[-1], 1) if block is None else block)
        out = cls.from_codes(
            codes,
            BlockScales(*parts),
            codec=codec,
            block_size=block,
            dtype=stored.dtype,
            train_scales=train_scales,
        )
        return out.with_axes(permutation)

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
        """An array of given codes, one a byte, and scales, as readers of files have them.

        **Arguments:**

        - `codes`: `(*lead, n)` uint8; with `order` `(*lead, rows, n)`.
        - `scale`: with the leading axes of `codes`, rows included.
        - `codec`, `block_size`: how they are read.
        - `order`: `(*lead, n)`: which logical column each stored one is.
        - `count`: how many codes there are in a row of `codes` that are packed already.
        - `dtype`: the logical dtype.
        - `train_scales`: whether gradients flow into floating scales.
        """
        inner = (*codes.shape[-1 if order is None else -2 : -1], codes.shape[-1] if count is None else count)
        packed = codes if count is not None else bitstream.pack(codes, codec.bits)
        if order is not None:
            flat = lambda leaf: leaf.reshape(*leaf.shape[:-2], -1)
            packed, scale = flat(packed), jax.tree.map(flat, scale)
        return cls(
            codes=jnp.asarray(packed),
            scale=jax.tree.map(jnp.asarray, scale),
            order=None if order is None else jnp.asarray(order),
            codec=codec,
            block_size=block_size,
            inner=cls._shortest(inner, codec),
            logical_dtype=jnp.dtype(dtype),
            train_scales=train_scales,
        )

    @staticmethod
    def _shortest(inner: tuple[int, ...], codec: Codec) -> tuple[int, ...] | None:
        """None where the number of bytes tells how many codes there are."""
        return None if len(inner) == 1 and inner[0] % bitstream.stride_of(codec.bits) == 0 else inner

    def check_leaves(self) -> None:
        rows, count = self._matrix
        blocks = self.codec.num_blocks(count, self.block)
        lead, groups = self.codes.shape[:-1], self.codec.num_groups(blocks)
        zeros = self.codec.zeros is not None and self.codec.scales != "nibbles"
        expected = {
            "codes": (self.codes, bitstream.num_bytes(count, self.codec.bits)),
            "scale": (self.scale.scale, blocks),
            "outer": (self.scale.outer, None if self.codec.group is None else groups),
            "zero": (
                self.scale.zero,
                blocks if zeros else None,
            ),
        }
        for name, (leaf, size) in expected.items():
            wanted = None if size is None else (*lead, rows * size)
            found = None if leaf is None else leaf.shape
            if found != wanted:
                raise ValueError(
                    f"BlockArray with inner axes {self.inner_shape} in blocks of {self.block} takes {name} "
                    f"of shape {wanted}; found {found}."
                )
        if self.order is not None and self.order.shape != (*lead, count):
            raise ValueError(f"BlockArray: order must have shape {(*lead, count)}; found {self.order.shape}.")

    # The stored array

    @property
    def inner_shape(self) -> tuple[int, ...]:
        return (self.codes.shape[-1] * 8 // self.codec.bits,) if self.inner is None else self.inner

    @property
    def block(self) -> int:
        return self._matrix[1] if self.block_size is None else self.block_size

    @property
    def _matrix(self) -> tuple[int, int]:
        """How many rows of how many codes the last axis of `codes` holds: several that share an order."""
        inner = self.inner_shape
        return (1, math.prod(inner)) if self.order is None else (inner[0], math.prod(inner[1:]))

    @property
    def parts(self) -> Any:
        return self.codes, self.scale, self.order

    def _decode(self, codes: Any, scale: BlockScales, order: Any) -> Float[Array, "*lead columns"]:
        """Rows of codes to values, whose columns are in order."""
        count = self._matrix[1]
        dense = _decoded((codes, *scale.parts()), Rows(self.codec, count, self.block))
        if order is None:
            return dense
        back = jnp.broadcast_to(jnp.expand_dims(jnp.argsort(order), -2), dense.shape)
        return jnp.take_along_axis(dense, back, axis=-1)

    def _rows(self, parts: Any) -> Any:
        """Codes and scales with an axis of rows, where several of them share an order."""
        codes, scale, order = parts
        if order is not None:
            rows = self._matrix[0]
            split = lambda leaf: leaf.reshape(*leaf.shape[:-1], rows, -1)
            codes, scale = jax.tree.map(split, (codes, scale))
        return codes, scale, order

    def _frozen(self, parts: Any) -> Any:
        return parts if self.train_scales else jax.tree.map(jax.lax.stop_gradient, parts)

    def materialise(self) -> Array:
        dense = self._decode(*self._rows(self._frozen(self.parts))).astype(self.logical_dtype)
        return dense.reshape(self.stored_shape).transpose(self.permutation)

    def rows_at(self, rows: Int[Array, "*batch"]) -> Array:
        if self.order is None:
            dense = self._decode(self.codes, self._frozen(self.scale), None).reshape(self.stored_shape)[rows]
        else:
            codes, scale, order = self._rows(self._frozen(self.parts))
            taken = jax.tree.map(lambda leaf: leaf[rows], (codes, scale))
            codes, scale = jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), taken)
            dense = self._decode(codes, scale, order).reshape(*rows.shape, *self.stored_shape[1:])
        return dense.astype(self.logical_dtype)

    def matmul(
        self,
        x: Float[Array, "*batch contracted"],
        parts: Any,
        *,
        shape: tuple[int, int],
        transpose: bool,
        out_dtype: np.dtype,
    ) -> Float[Array, "*batch free"]:
        codes, scale, order = self._rows(parts)
        present = tuple(part is not None for part in (codes, *scale.parts()))
        leaves = jax.tree.leaves((codes, *scale.parts()))
        rows = math.prod(codes.shape[:-1])
        count = self._matrix[1]
        if order is None and rows and shape[0] and rows % shape[0] == 0 and count * rows == math.prod(shape):
            joined, count = rows // shape[0], shape[1]
            flat = jax.tree.map(lambda leaf: leaf.reshape(shape[0], joined * leaf.shape[-1]), leaves)
        elif order is not None and shape == (rows, count):
            flat = leaves
        else:
            # Rows of the matrix are parts of rows of codes: nothing that models do with weights.
            dense = self._decode(codes, scale, order).reshape(shape).astype(x.dtype)
            y = jnp.matmul(x, dense if transpose else dense.T, preferred_element_type=jnp.float32)
            return y.astype(out_dtype)
        if order is not None and not transpose:
            x = jnp.take(x, order, axis=-1)
        decode = Rows(self.codec, count, self.block, present)
        y = block_matmul(x, flat, decode, shape=shape, transpose=transpose, out_dtype=out_dtype)
        return jnp.take(y, jnp.argsort(order), axis=-1) if order is not None and transpose else y

    def joins(self, *, in_columns: bool) -> bool:
        if self.order is not None or not in_columns:
            return self.order is None
        return self._cuts(self._matrix[1])

    def _cuts(self, count: int) -> bool:
        """Whether rows of codes may be cut into, or put together of, parts of this many."""
        whole = count % max(self.block, 1) == 0 and count % bitstream.stride_of(self.codec.bits) == 0
        if self.codec.group is None or not whole:
            return whole
        return self.codec.group > 0 and count // max(self.block, 1) % self.codec.group == 0

    def untied(self: _B) -> _B:
        """With as many leading axes as whole blocks allow."""
        inner = self.inner_shape
        if self.order is not None or len(inner) < 2:
            return self
        cut = next((n for n in range(len(inner) - 1, 0, -1) if self._cuts(math.prod(inner[n:]))), 0)
        if not cut:
            return self
        out = self._with_lead((*self.codes.shape[:-1], *inner[:cut]), inner[cut:])
        return out.with_axes(self.permutation)

    def _with_lead(self: _B, lead: Sequence[int], inner: tuple[int, ...]) -> _B:
        """The stored array in the shape `lead + inner`."""
        leaf_of = lambda leaf: leaf.reshape(*lead, leaf.size // max(math.prod(lead), 1))
        parts = jax.tree.map(leaf_of, (self.codes, self.scale))
        return dataclasses.replace(
            self, codes=parts[0], scale=parts[1], inner=self._shortest(tuple(inner), self.codec), axes=()
        )

    def reshaped(self: _B, shape: tuple[int, ...]) -> _B | None:
        if self.axes or 0 in shape:
            return None
        lead, count = self.codes.shape[:-1], math.prod(self.inner_shape)
        if self.order is not None:
            rest = shape[self.num_lead :]
            same = shape[: self.num_lead] == lead and rest and rest[0] == self.inner_shape[0]
            return dataclasses.replace(self, inner=tuple(rest)) if same else None
        cuts = [n for n in range(len(shape) + 1) if math.prod(shape[n:]) == count and len(shape) > n]
        if cuts:
            cut = self.num_lead if self.num_lead in cuts else cuts[-1]
            return self._with_lead(shape[:cut], shape[cut:])
        for cut in range(len(shape) - 1, -1, -1):
            part = math.prod(shape[cut:])
            if self._cuts(part) and (part % count == 0 or count % part == 0) and self._cuts(count):
                return self._with_lead(shape[:cut], shape[cut:])
        return None

    def times(self: _B, factor: Array) -> _B:
        codec, scales = self.codec, self.scale
        if scales.outer is not None and not codec.over:
            scaled = dataclasses.replace(scales, outer=scales.outer.astype(jnp.float32) * factor)
        elif scales.outer is not None:
            scaled = dataclasses.replace(scales, outer=scales.outer / factor)
        else:
            scale, _ = codec.scales_and_zeros(*scales.parts())
            scaled, codec = (
                dataclasses.replace(scales, scale=scale * factor),
                dataclasses.replace(codec, scales="float"),
            )
        if codec.zeros in ("plus", "minus"):
            if scales.outer_zero is not None:
                outer_zero = scales.outer_zero.astype(jnp.float32) * factor
                scaled = dataclasses.replace(scaled, outer_zero=outer_zero)
            elif scales.zero is not None:
                scaled = dataclasses.replace(scaled, zero=scales.zero.astype(jnp.float32) * factor)
        return dataclasses.replace(self, scale=scaled, codec=codec)

    def requantized(self: _B, dense: Array) -> _B:
        stored = dense.transpose([self.permutation.index(i) for i in range(dense.ndim)])
        rows = stored.reshape(*self.codes.shape[:-1], *self._matrix).astype(jnp.float32)
        if self.order is None:
            rows = rows.reshape(*self.codes.shape[:-1], -1)
        else:
            index = jnp.broadcast_to(jnp.expand_dims(self.order, -2), rows.shape)
            rows = jnp.take_along_axis(rows, index, axis=-1)
        like = self._rows(self.parts)[1].parts()
        codes, parts = encode(rows, self.codec, self.block, like=like)
        new = type(self).from_codes(
            codes,
            BlockScales(*parts),
            codec=self.codec,
            block_size=self.block_size,
            order=self.order,
            dtype=self.logical_dtype,
            train_scales=self.train_scales,
        )
        return dataclasses.replace(new, inner=self.inner, axes=self.axes)

    def grid(self) -> Grid | None:
        codes, scales, _ = self._rows(self.parts)
        if codes.ndim != 2 or len(self.stored_shape) != 2:
            return None
        count = self._matrix[1]
        scale, zero = self.codec.scales_and_zeros(*scales.parts())
        spread = lambda x: np.repeat(np.asarray(x, np.float64), self.block, axis=1)[:, :count]
        each = spread(scale)
        shift = np.zeros_like(each) if zero is None else spread(zero)
        signs = {"points": -each, "minus": -1.0, "plus": 1.0, None: 0.0}
        values = np.asarray(self.codec.values(jnp.arange(2**self.codec.bits, dtype=jnp.uint8)))
        return Grid(*sorted_table(values), each, shift * signs[self.codec.zeros])

    def with_codes(self: _B, codes: np.ndarray) -> _B:
        packed = bitstream.pack(codes.astype(np.uint8), self.codec.bits)
        return dataclasses.replace(self, codes=jnp.asarray(packed.reshape(self.codes.shape)))

    def tied_by(self) -> str:
        return "its columns are out of order" if self.order is not None else super().tied_by()


@functools.partial(jax.jit, static_argnames="rows", inline=True)
def _decoded(parts: Any, rows: Rows) -> Float[Array, "*lead columns"]:
    """Rows of codes to values, whose columns are in the order in which they are stored."""
    return join(rows(parts), rows.count)
