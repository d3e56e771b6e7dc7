"""Arrays in the block formats of published weights."""

import math
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int, Int8, UInt8

from ..._checked import checked
from ...core.jaxprs.unify import dense_when_incompatible
from ...core.values import Value
from ...kernels.block_matmul import block_matmul
from .base import AbstractQuantizedArray, as_floating, check_block_size, quantize_stack
from .codecs import CODECS, Codec, Rows
from .encode import encode
from .layout import shortest
from .scales import BlockScales

_B = TypeVar("_B", bound="BlockArray")


class BlockArray(AbstractQuantizedArray):
    """An array in any of the block formats of published weights. A table of codecs describes how codes and
    scales are read.

    Make one with `quantize`, or read a file with `quaxlike.interop.load`. It does what every quantised
    array does: products on either side, transposing, slicing and stacking leave codes unchanged.

    **Arguments:**

    - `codes`: `(*lead, bytes)` uint8, a little-endian stream of codes; int8 for the codec `int8`.
    - `scale`: `BlockScales`, with the same leading axes.
    - `order`: for codes whose columns were sorted, so that those of a block are adjacent (act-order
        of GPTQ): the logical column of each stored one, `(*lead, columns)`. The first inner axis of the
        array then counts rows, which share the order and stay together. None for columns in order.
    - `codec`: how codes, scales and zeros are stored.
    - `block_size`, `inner`, `axes`, `logical_dtype`, `train_scales`: as of every quantised array.
    """

    codes: UInt8[Array, "*lead n"] | Int8[Array, "*lead n"]
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
        - `block_size`: how many elements along `axis` share a scale; the last block may be partial. None
            for the block size of the codec.
        - `double_quant`: only for the 4-bit types; a codec defines how its scales are stored.
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
        check_block_size(block)
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
        """Makes an array from codes, one per byte, and scales; for readers of files.

        **Arguments:**

        - `codes`: `(*lead, n)` uint8; with `order` `(*lead, rows, n)`.
        - `scale`: with the leading axes of `codes`, rows included.
        - `codec`, `block_size`: how they are read.
        - `order`: `(*lead, n)`: the logical column of each stored one.
        - `count`: if `codes` are already packed, the number of codes in a row.
        - `dtype`: the logical dtype.
        - `train_scales`: whether gradients flow into floating scales.
        """
        inner = (*codes.shape[-1 if order is None else -2 : -1], codes.shape[-1] if count is None else count)
        packed = codes if count is not None else codec.pack(codes)
        if order is not None:
            flat = lambda leaf: leaf.reshape(*leaf.shape[:-2], -1)
            packed, scale = flat(packed), jax.tree.map(flat, scale)
        return cls(
            codes=jnp.asarray(packed),
            scale=jax.tree.map(jnp.asarray, scale),
            order=None if order is None else jnp.asarray(order),
            codec=codec,
            block_size=block_size,
            inner=shortest(inner, codec),
            logical_dtype=jnp.dtype(dtype),
            train_scales=train_scales,
        )

    def widen(self: _B, like: Value) -> _B | Array:
        """Widens the scales to those of `like`, if that is an array of this form times a factor."""
        out = super().widen(like)
        if not (isinstance(like, BlockArray) and isinstance(out, BlockArray)) or out._form() == like._form():
            return out
        scaled = lambda w: w.times(jnp.float32(1))
        if scaled(out)._form() == like._form():
            return scaled(out)
        return out if jax.eval_shape(scaled, like)._form() == out._form() else dense_when_incompatible(self)

    def _form(self) -> Any:
        return self.codec, [leaf.dtype for leaf in jax.tree.leaves(self.scale)]

    def encoded(self, rows: Float[Array, "*lead n"]) -> tuple[Array, BlockScales]:
        like = self.rows_of_codes()[1].parts()
        codes, parts = encode(rows, self.codec, self.block, like=like)
        return self.codec.pack(codes), BlockScales(*parts)

    def matmul(
        self,
        x: Float[Array, "*batch contracted"],
        parts: Any,
        *,
        shape: tuple[int, int],
        transpose: bool,
        out_dtype: np.dtype,
    ) -> Float[Array, "*batch free"]:
        codes, scale, order = parts
        rows, count = math.prod(codes.shape[:-1]) * self.matrix[0], self.matrix[1]
        if shape[0] == 0 or rows % shape[0] or (order is not None and rows != shape[0]):
            # Rows of the matrix are parts of rows of codes, which does not occur with the weights of models.
            whole = eqx.tree_at(
                lambda w: (w.codes, w.scale, w.order), self, parts, is_leaf=lambda x: x is None
            )
            dense = whole.stored().reshape(shape).astype(x.dtype)
            y = jnp.matmul(x, dense if transpose else dense.T, preferred_element_type=jnp.float32)
            return y.astype(out_dtype)
        leaves = jax.tree.leaves((codes, *scale.parts()))
        present = tuple(part is not None for part in (codes, *scale.parts()))
        flat = [leaf.reshape(shape[0], leaf.size // shape[0]) for leaf in leaves]
        count = count * rows // shape[0]
        if order is not None and not transpose:
            x = jnp.take(x, order, axis=-1)
        decode = Rows(self.codec, count, self.block, present)
        y = block_matmul(x, flat, decode, shape=shape, transpose=transpose, out_dtype=out_dtype)
        return jnp.take(y, jnp.argsort(order), axis=-1) if order is not None and transpose else y
