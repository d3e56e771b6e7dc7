"""The base class of quantised arrays: the layout of codes and scales, and the operations it permits.

The *stored* array is the logical array, with its axes in the order of quantisation. Both leaves have its
leading axes. Flattening its trailing axes in row-major order gives the last axis of `codes`, which is divided
into blocks:

    stored shape = codes.shape[:-1] + inner,      scale: codes.shape[:-1] + (blocks,)

So `vmap`, `lax.scan` over stacked layers, slicing, gathering and sharding can all act on the leaves' leading
axes, and the logical shape follows from these. This is *not* true of the inner axes: blocks can cross these,
so cutting one would pair codes with the wrong scales.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Float32, Int, Int8, UInt8

from ..._checked import checked
from ...core import compat
from ...core.jaxprs.unify import dense_when_incompatible
from ...core.shapes import leaf_aval
from ...core.values import Value, replace_fields
from ...kernels.block_matmul import (
    NIBBLES,
    Codec,
    Decode,
    NestedScales,
    Rows,
    block_matmul,
    dense_scales,
    join,
)
from ...kernels.block_matmul.reference import times_adapters
from ...kernels.code_matmul import code_matmul
from ...kernels.multilinear import is_spread
from ...primitives import Partitioning
from ..gradients import Gradients, GradientsArray, strongest, switch, trained_if
from .rounding import check_rounding
from .scales import BlockScales, as_floating, check_block_size, check_importance, find_codec

_Q = TypeVar("_Q", bound="AbstractQuantizedArray")


class AbstractQuantizedArray(GradientsArray):
    """An array of integer codes, with one scale per block.

    This is usually created by `quantize`, and behaves like an array of dtype `logical_dtype`. `dot_general`
    uses the stored codes directly, in either direction and on either side; transposing, slicing, stacking,
    and reshaping whole blocks don't requantise. Any operation not possible on codes materialises the array,
    with a [`quaxlike.MaterialisationWarning`][].

    **Arguments:**

    - `codes`: `(*lead, n)` bytes, packed as specified by the codec.
    - `scale`: `(*lead, blocks)` float32; or [`NestedScales`][quaxlike.arrays.quantized.NestedScales], or
        [`BlockScales`][quaxlike.arrays.quantized.BlockScales].
    - `block_size`: the number of codes sharing a scale; None for the whole last axis.
    - `inner`: the trailing axes flattened into the last axis of `codes`; None for a single axis with one
        element per code.
    - `axes`: how the last `len(axes)` axes of the stored array are permuted in the logical array.
    - `logical_dtype`: the logical array's dtype.
    - `gradients`: `"none"` if the scales should be treated as constants in differentiation; `"pass"` if
        gradients should be propagated through them, without training them (set by multiplying by a traced
        factor); `"train"` if they should also be trained.
    - `activations`: with `"int8"` or `"fp8"`, the other operand of a product is rounded, row by row, so that
        codes are multiplied by codes. With None, it isn't rounded.
    - `input_limit`: with `activations`, the magnitude represented by the other operand's largest code;
        anything larger is clipped. None: the maximum of each row.
    - `rounds_gradients`: with `activations`, whether gradients with respect to the other operand are also
        computed from codes.
    - `compute`: with `"int8"`, products on a CPU round the other operand to 8 bits, with one scale per block
        of 32, and multiply bytes, as llama.cpp does. With `"bfloat16"`, products round both operands to
        bfloat16, and add in float32. Gradients are straight-through: they are those of the product without
        rounding, and aren't rounded themselves. Nor are products contracting an axis other than the one
        blocks run along. None: the other operand isn't rounded.
    """

    on_materialise = "warn"
    older_switches = "train_scales", "open_scales"
    train_scales, open_scales = map(switch, older_switches)

    codes: UInt8[Array, "*lead n"] | Int8[Array, "*lead n"]
    scale: Any
    block_size: int | None = eqx.field(static=True)
    inner: tuple[int, ...] | None = eqx.field(static=True, default=None)
    axes: tuple[int, ...] = eqx.field(static=True, default=())
    logical_dtype: np.dtype = eqx.field(static=True, default=np.dtype(np.float32))
    gradients: Gradients = eqx.field(static=True, default="none")
    activations: str | None = eqx.field(static=True, default=None, kw_only=True)
    input_limit: float | None = eqx.field(static=True, default=None, kw_only=True)
    rounds_gradients: bool = eqx.field(static=True, default=False, kw_only=True)
    compute: str | None = eqx.field(static=True, default=None, kw_only=True)

    codec: eqx.AbstractVar[Codec]
    """The format in which codes and scales are stored."""

    order: eqx.AbstractVar[Any]
    """If the columns of codes are sorted, then the logical column of each stored column; otherwise None."""

    flattens: ClassVar[bool] = False
    """Whether `quantize` first flattens the array (as bitsandbytes does) and supports nested scales."""

    @classmethod
    @checked(options=("double_quant", "train_scales"))
    def quantize(
        cls: type[_Q],
        x: ArrayLike,
        *,
        codec: str | Codec | None = None,
        block_size: int | None = None,
        double_quant: bool = False,
        axis: int = -1,
        stacked: int = 0,
        train_scales: bool = False,
        importance: ArrayLike | None = None,
        compute: str | None = None,
    ) -> _Q:
        """Quantises an array to the nearest codes, one block at a time.

        llama.cpp's codecs and MXFP4 search for the scales with the smallest squared error; all other codecs
        choose scales covering each block's range.

        **Arguments:**

        - `x`: any floating dtype, which becomes the logical dtype. Computed in float32.
        - `codec`: the format, for [`BlockArray`][quaxlike.BlockArray] only: a codec, or its name in the table
            of codecs (`quaxlike.arrays.quantized.CODECS`). Default: `"int4_block"`.
        - `block_size`: the number of elements along `axis` sharing a scale; the last block can be smaller.
            NF4, FP4 and int4 accept any power of two from 32 to 4096; they flatten the array, so their blocks
            can cross rows. Default: the codec's, i.e. 64 for these three, and one scale per channel for int8.
        - `double_quant`: whether NF4, FP4 and int4 also store their scales in 8 bits. Default: False.
        - `axis`: the axis that blocks run along; for a weight, the contracted one. Default: -1.
        - `stacked`: the number of leading axes stacking arrays to be quantised separately, for use with
            `vmap` or `lax.scan`. Default: 0.
        - `train_scales`: whether floating-point scales should be trained. Default: False.
        - `importance`: weights for the squared errors along `axis`, for codecs that search for scales. For a
            layer's weight, use the mean squares of its inputs (llama.cpp's importance matrix). Pass a vector,
            or one vector for each array in a stack. Default: all equal.
        - `compute`: `"int8"` or `"bfloat16"` if products should round the other operand, as described above.
            Default: the other operand isn't rounded.

        **Returns:** the quantised array, with the same shape and dtype as `x`.

        **Raises:** `ValueError` for an unknown codec or block size; for a scalar or `double_quant` with types
        other than NF4, FP4 and int4; for an `importance` with the wrong shape, or with a codec that does not
        search for scales; for a `compute` the codec does not have. `TypeError` if `x` is not floating-point.

        !!! example

            ```python
            import jax, jax.numpy as jnp, quaxlike as ql

            w = jax.random.normal(jax.random.key(0), (32, 128))
            ql.quaxify(jnp.dot)(ql.NF4Array.quantize(w), jnp.ones(128))
            ql.quaxify(jnp.dot)(ql.BlockArray.quantize(w, codec="mxfp4"), jnp.ones(128))
            ```
        """
        if double_quant and not cls.flattens:
            told = f"double_quant is for 4-bit types: NF4, FP4 and int4, not {cls.__name__}."
            raise ValueError(f"A codec says how its scales are stored; {told}")
        own = {} if codec is None else {"codec": find_codec(cls, codec)}
        stored, permutation = as_floating(cls, x, axis, stacked)
        if stored.ndim == 0 and not cls.flattens:
            raise ValueError(f"{cls.__name__}.quantize takes an array of at least one axis; found a scalar.")
        chosen = own.get("codec", cls.codec)
        block = chosen.block if block_size is None else block_size
        if not cls.flattens:
            check_block_size(block)
        first = stacked if cls.flattens else stored.ndim - 1
        lead, inner = stored.shape[:first], stored.shape[first:]
        rows, dtype = stored.reshape(*lead, math.prod(inner)), stored.dtype
        weights = check_importance(cls, importance, chosen, stored.shape, stacked)
        codes, scale = cls._encode(rows, chosen, block, double_quant, None, weights)
        gradients = trained_if(train_scales)
        options: Any = {"logical_dtype": dtype, "gradients": gradients, "compute": compute}
        out = cls(codes, scale, block, inner, **options, **own)
        return out.cut(lead, inner).with_axes(permutation)

    def encoded(
        self, rows: Float32[Array, "*lead n"], importance: Float[Array, " n"] | None = None
    ) -> tuple[Array, Any]:
        """Quantises rows of the stored array to this array's format, e.g. after updating its values."""
        nested = isinstance(self.scale, NestedScales)
        return self._encode(rows, self.codec, max(self.block, 1), nested, self.scale, importance)

    def __check_init__(self) -> None:
        self.check_leaves()
        check_rounding(self)
        if sorted(self.axes) != list(range(len(self.axes))) or len(self.axes) > len(self.stored_shape):
            raise ValueError(f"axes {self.axes} do not permute axes of the shape {self.stored_shape}.")

    def check_leaves(self) -> None:
        """Raises a `ValueError` if shapes or dtypes are inconsistent."""
        (rows, count), codec, scale = self.matrix, self.codec, self.scale
        parts = (scale.codes if isinstance(scale, NestedScales) else scale, None, None, None)
        parts = scale.parts() if isinstance(scale, BlockScales) else parts
        zeros = codec.zeros is not None and codec.scales != "nibbles"
        has = True, True, codec.group is not None, zeros
        leaves = zip(("codes", "scale", "outer", "zero"), (self.codes, *parts), has, strict=False)
        for (name, leaf, there), size in zip(leaves, codec.sizes(count, self.block), strict=False):
            wanted = (*self.codes.shape[:-1], rows * size) if there else None
            found = None if leaf is None else tuple(leaf.shape)
            if found != wanted:
                raise ValueError(f"{self._description} takes {name} of shape {wanted}; found {found}.")
        kinds = "fV" if codec.scales == "float" else "iu"  # V is bfloat16 and other small floats
        if not isinstance(scale, NestedScales) and parts[0].dtype.kind not in kinds:
            wanted = "floats" if codec.scales == "float" else "integers"
            raise ValueError(f"{self._description} takes scales that are {wanted}; found {parts[0].dtype}.")
        if parts[1] is not None and parts[1].dtype.kind not in "fV":
            raise ValueError(
                f"{self._description} takes outer scales that are floats; found {parts[1].dtype}."
            )
        dtype = np.dtype(np.int8 if codec.codes == "signed" else np.uint8)
        if self.codes.dtype != dtype:
            raise ValueError(f"{self._description} takes codes of dtype {dtype}; found {self.codes.dtype}.")
        wanted = (*self.codes.shape[:-1], count)
        if self.order is not None and self.order.shape != wanted:
            raise ValueError(f"{self._description} takes order of shape {wanted}; found {self.order.shape}.")

    @property
    def _description(self) -> str:
        return f"{type(self).__name__} with inner axes {self.inner_shape} in blocks of {self.block}"

    @classmethod
    @abc.abstractmethod
    def _encode(
        cls, x: Array, codec: Codec, block: Any, nested: bool, like: Any, importance: Array | None
    ) -> tuple[Array, Any]:
        """Quantises rows to packed codes, and to scales (`nested`, or with the dtypes in `like`)."""

    # The logical array

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        fields = [(f, getattr(self, f.name, None)) for f in dataclasses.fields(self)]
        shown = [(f.name, x) for f, x in fields if not (f.metadata.get("static") and x == f.default)]
        try:
            stands_for = [wl.TextDoc(self.aval().str_short(short_dtypes=True))]
        except (AttributeError, IndexError, TypeError):  # leaves are not arrays, e.g. in a tree of dtypes
            stands_for = []
        return wl.bracketed(
            begin=wl.TextDoc(f"{type(self).__name__}("),
            docs=[*stands_for, *wl.named_objs(shown, **kwargs)],
            sep=wl.comma,
            end=wl.TextDoc(")"),
            indent=kwargs.get("indent", 2),
        )

    def aval(self) -> jax.core.ShapedArray:
        shape = self.stored_shape
        self._check_not_cast()
        aval = jax.core.ShapedArray(tuple(shape[i] for i in self.permutation), self.logical_dtype)
        # On a mesh with explicit axes, products gather codes that are spread over the batch's devices. JAX
        # refuses them for an array whose type says that it's spread like this.
        return compat.replicated_like(aval, leaf_aval(self.codes))

    def _check_not_cast(self) -> None:
        if jnp.issubdtype(self.codes.dtype, jnp.floating):
            raise TypeError(
                f"{type(self).__name__} of shape {self.stored_shape} has bytes as codes; found codes of "
                f"{self.codes.dtype}, as after a cast of all leaves. Cast a Value as one array instead: "
                "`jax.tree.map(lambda x: x.astype(dtype), model, is_leaf=quaxlike.is_value)`."
            )

    # The stored array

    @property
    def num_lead(self) -> int:
        """The number of axes in front of the last axis of the codes and scales."""
        return len(self.codes.shape) - 1

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The axes flattened into the last axis of `codes`."""
        return (self.codes.shape[-1] * 8 // self.codec.bits,) if self.inner is None else self.inner

    @property
    def matrix(self) -> tuple[int, int]:
        """The number of rows in the last axis (one unless rows share an order), and of codes per row."""
        inner = self.inner_shape
        return (1, math.prod(inner)) if self.order is None else (inner[0], math.prod(inner[1:]))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], *self.inner_shape)

    @property
    def permutation(self) -> tuple[int, ...]:
        """The stored axis of each logical axis."""
        kept = len(self.stored_shape) - len(self.axes)
        return (*range(kept), *(kept + axis for axis in self.axes))

    @property
    def block(self) -> int:
        """The number of codes sharing a scale."""
        return self.matrix[1] if self.block_size is None else self.block_size

    @property
    def parts(self) -> Any:
        """The leaves for `matmul`, as a pytree, with `stop_gradient` applied if scales are frozen."""
        leaves = self.codes, self.scale, self.order
        return leaves if self.has_gradients else jax.tree.map(lax.stop_gradient, leaves)

    def block_scales(self) -> BlockScales:
        """Returns the scales as used by the codec, with `stop_gradient` applied if they are frozen."""
        scale = self.scale if isinstance(self.scale, BlockScales) else BlockScales(dense_scales(self.scale))
        return scale if self.has_gradients else jax.tree.map(lax.stop_gradient, scale)

    def joins(self, *, in_columns: bool) -> bool:
        """Returns whether the leading axes can be merged into one large matrix, as additional rows or (if
        `in_columns` is set) columns.
        """
        if self.order is not None or not (in_columns or self.codec.flat):
            return self.order is None
        return self.codec.cuts(self.matrix[1], self.block)

    def joined(self: _Q) -> _Q:
        """Converts to a form in which the leading axes can be merged into one large matrix.

        This decodes nested scales, which belong to a single matrix.
        """
        nested = isinstance(self.scale, NestedScales)
        return dataclasses.replace(self, scale=dense_scales(self.scale)) if nested else self

    @property
    def is_sum(self) -> bool:
        """Whether elements are sums of separately scaled terms, so that infinite factors can give NaN."""
        return self.codec.zeros is not None or isinstance(self.scale, NestedScales)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients are propagated to the scales."""
        return self.gradients != "none"

    def with_gradients(self: _Q, gradients: Gradients) -> _Q:
        """Sets at least these `gradients`. Scales already frozen stay frozen."""
        gradients = strongest(self.gradients, gradients)
        if gradients == self.gradients:
            return self
        scale = self.scale if self.has_gradients else jax.tree.map(lax.stop_gradient, self.scale)
        return dataclasses.replace(self, scale=scale, gradients=gradients)

    def with_axes(self: _Q, permutation: Sequence[int]) -> _Q:
        """Sets the permutation from stored to logical axes, without changing any codes."""
        kept = 0
        while kept < len(permutation) and permutation[kept] == kept:
            kept += 1
        return replace_fields(self, axes=tuple(axis - kept for axis in permutation[kept:]))

    def cut(self: _Q, first: tuple[int, ...], inner: tuple[int, ...]) -> _Q:
        """Reshapes the stored array to `first + inner`, with as few inner axes as possible.

        An axis must be an inner one if slicing along it cuts blocks. (With nested scales, this includes all
        inner axes, because nested blocks cross rows.) If a row is split, then a scale for the whole row is
        repeated for each part.
        """
        count, block, cuts = math.prod(inner), self.block, self.codec.cuts
        shared = self.block_size is None and count == self.matrix[1] > 0
        if isinstance(self.scale, NestedScales):
            n = len(inner)
        elif shared and inner[-1:] > (1,) and cuts(inner[-1], inner[-1]):
            n = 1
        else:
            whole = (n for n in range(1, len(inner)) if cuts(math.prod(inner[-n:]), block))
            n = next(whole, len(inner))
        at = len(inner) - n
        lead, inner = (*first, *inner[:at]), inner[at:]
        changes: dict[str, Any] = {"inner": shortest(inner, self.codec)}
        if lead != self.codes.shape[:-1]:
            scale: Any = self.scale
            in_blocks = isinstance(scale, BlockScales)
            codes, *sizes = self.codec.sizes(math.prod(inner), math.prod(inner) if shared else block)
            scales: Any = scale.parts() if in_blocks else (scale, None, None, None)
            if shared:
                row = (*first, *[1] * at, 1)
                scales = [x if x is None else jnp.broadcast_to(x.reshape(row), (*lead, 1)) for x in scales]
            scales = [x if x is None else x.reshape(*lead, n) for x, n in zip(scales, sizes, strict=True)]
            changes["codes"] = self.codes.reshape(*lead, codes)
            changes["scale"] = BlockScales(*scales) if in_blocks else scales[0]
            changes["block_size"] = block if self.block_size is None and not shared else self.block_size
        return dataclasses.replace(self, **changes)

    def stored(self) -> Array:
        """Materialises the stored array."""
        return self.with_axes(range(len(self.stored_shape))).materialise()

    def stored_slice(self: _Q, i: ArrayLike) -> "_Q | Array":
        """Returns slice `i` along the first stored axis, materialised if it cuts blocks."""
        if self.num_lead:
            part = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), self)
            return part.with_axes(range(len(part.stored_shape)))
        return self.rows_at(jnp.asarray(i))

    # Its values

    def rows_of_codes(self) -> tuple[Any, BlockScales]:
        """Returns the codes and scales, with an additional axis for rows sharing an `order`."""
        codes, scales = self.codes, self.block_scales()
        if self.order is None:
            return codes, scales
        rows = self.matrix[0]

        def in_rows(leaf: Array) -> Array:
            return leaf.reshape(*leaf.shape[:-1], rows, leaf.shape[-1] // max(rows, 1))

        return jax.tree.map(in_rows, (codes, scales))

    def _decode(self, codes: Any, scales: BlockScales) -> Float[Array, "*lead columns"]:
        """Decodes rows of codes, with columns in the logical order."""
        dense = _decoded((codes, *scales.parts()), self.codec, self.matrix[1], self.block)
        if self.order is None:
            return dense
        back = jnp.broadcast_to(jnp.expand_dims(jnp.argsort(self.order), -2), dense.shape)
        return jnp.take_along_axis(dense, back, axis=-1)

    def materialise(self) -> Array:
        self._check_not_cast()
        leaves, treedef = jax.tree.flatten(self)
        if self.order is not None or not is_spread(leaves):
            return self._materialised().transpose(self.permutation)
        # Each device decodes its own rows. Rows can also be split, if devices don't share any blocks.
        lead, cut = [f"lead{i}" for i in range(self.num_lead)], not self.why_not_shardable()

        def last(j: Any, leaf: Any) -> Any:
            return "k" if cut and leaf.shape[-1] > 1 else f"own{j}"

        names = [lead if leaf.ndim == len(lead) else [*lead, last(j, leaf)] for j, leaf in enumerate(leaves)]
        inner = ["k"] if cut else [f"inner{i}" for i in range(len(self.inner_shape))]
        rule = Partitioning(f"{', '.join(map(' '.join, names))} -> {' '.join([*lead, *inner])}")

        def decode(*leaves: Any) -> Any:
            return [treedef.unflatten(leaves)._materialised()]

        return rule.apply_to_types(decode)(*leaves)[0].transpose(self.permutation)

    def _materialised(self) -> Array:
        """Decodes the stored array."""
        return self._decode(*self.rows_of_codes()).astype(self.logical_dtype).reshape(self.stored_shape)

    def rows_at(self, rows: Int[Array, "*batch"]) -> Array:
        """Materialises slices of the stored array along its first axis, `(*batch, *stored_shape[1:])`.

        This must be an inner axis. (For a leading axis, just index the leaves instead.)
        """
        codes, scales = self.rows_of_codes()
        shape = self.stored_shape[1:]
        if self.order is None:
            size = math.prod(shape)
            columns = lax.broadcasted_iota(rows.dtype, (*rows.shape, size), rows.ndim)
            index = jnp.expand_dims(rows * size, -1) + columns
            dense = self.codec.at(index, self.block, (codes, *scales.parts()))
        else:
            taken = jax.tree.map(lambda leaf: leaf[rows.reshape(-1)], (codes, scales))
            dense = self._decode(*taken)
        return dense.reshape(*rows.shape, *shape).astype(self.logical_dtype)

    def times(self: _Q, factor: Float32[Array, "..."]) -> _Q:
        """Multiplies the scales by a scalar, or by factors with shape `(*lead, 1)`."""
        if isinstance(self.scale, BlockScales):
            codec, scale = self.scale.times(factor, self.codec)
            return dataclasses.replace(self, scale=scale, codec=codec)
        nested = isinstance(self.scale, NestedScales)
        return dataclasses.replace(self, scale=self.scale.times(factor) if nested else self.scale * factor)

    def matmul(
        self,
        x: Float[Array, "*batch contracted"],
        parts: Any,
        *,
        shape: tuple[int, int],
        transpose: bool,
        low_rank: Sequence[Array] = (),
        out_dtype: np.dtype,
    ) -> Float[Array, "*batch free"]:
        """Computes `x @ W.T` (`x @ W` if `transpose` is set), for a stored matrix `W` with this `shape`.

        **Arguments:**

        - `parts`: the leaves of `W`. Their leading axes are merged into the matrix (nested scales have none).
            Only static fields of `self` are used.
        - `low_rank`: the factors of adapters; their products are added.
        """
        codes, scale, order = parts
        found = self._for_kernels(parts, shape)
        if found is None:
            # Each row of the matrix is only part of a row of codes. (This is rare for weights.)
            if self.compute == "int8" and not transpose and math.prod(shape):
                raise ValueError(
                    f"compute='int8' takes matrices that have rows of codes; found one of shape {shape}, of "
                    f"codes of shape {codes.shape}. Leave `compute` out."
                )
            leaves = {"codes": codes, "scale": scale} | ({} if order is None else {"order": order})
            dense = dataclasses.replace(self, axes=(), **leaves).materialise().reshape(shape).astype(x.dtype)
            y = jnp.matmul(x, dense if transpose else dense.T, preferred_element_type=jnp.float32)
            if low_rank:
                t, b = low_rank
                y += times_adapters(t, b, y.dtype)
            return y.astype(out_dtype)
        if order is not None and not transpose:
            x = jnp.take(x, order, axis=-1)
        params: Any = {"shape": shape, "block_size": max(self.block, 1), "transpose": transpose}
        if self.activations is not None and not transpose:
            (codes, scale), decode = found

            def unrounded(x: Any, *leaves: Any) -> Any:
                return block_matmul(x, leaves, decode, out_dtype=x.dtype, **params)

            y = code_matmul(
                x, codes, scale, activations=self.activations, derivative=unrounded,
                limit=self.input_limit, rounds_gradients=self.rounds_gradients,
            )  # fmt: skip
            if low_rank:
                t, b = low_rank
                y += times_adapters(t, b, y.dtype)
            return y.astype(out_dtype)
        params["compute"] = None if transpose else self.compute
        y = block_matmul(x, *found, low_rank=low_rank, out_dtype=out_dtype, **params)
        return jnp.take(y, jnp.argsort(order), axis=-1) if order is not None and transpose else y

    def _for_kernels(self, parts: Any, shape: tuple[int, int]) -> tuple[Sequence[Any], Decode] | None:
        """Returns the leaves and the decoder for kernels. None unless the matrix's rows are rows of codes."""
        codes, scale, order = parts
        if self.flattens:
            block = self.block
            # If blocks don't cross rows, keep rows of codes separate, so that they can be sharded.
            by_rows = codes.ndim > 1 and shape[1] % block == 0

            def flat(leaf: Any, size: Any) -> Any:
                return leaf.reshape((shape[0], shape[1] // size) if by_rows else -1)

            scale = scale if isinstance(scale, NestedScales) else flat(scale, block)
            return (flat(codes, 2), scale, jnp.asarray(self.codec.all_values)), NIBBLES
        rows = math.prod(codes.shape[:-1]) * self.matrix[0]
        if shape[0] == 0 or rows % shape[0] or (order is not None and rows != shape[0]):
            return None
        leaves = codes, *(scale.parts() if isinstance(scale, BlockScales) else (scale, None, None, None))
        in_rows = [leaf.reshape(shape[0], leaf.size // shape[0]) for leaf in leaves if leaf is not None]
        return in_rows, Rows(self.codec, tuple(leaf is not None for leaf in leaves))

    def requantized(self: _Q, dense: Array, importance: Float[Array, " n"] | None = None) -> _Q:
        """Quantises an array of the same shape to the same format. For `importance`, see `quantize`."""
        stored = dense.transpose([self.permutation.index(i) for i in range(dense.ndim)])
        rows, count = self.matrix
        rows_of = stored.reshape(*self.codes.shape[:-1], *([] if self.order is None else [rows]), count)
        if self.order is not None:
            index = jnp.broadcast_to(jnp.expand_dims(self.order, -2), rows_of.shape)
            rows_of = jnp.take_along_axis(rows_of, index, axis=-1)
        codes, scale = self.encoded(rows_of.astype(jnp.float32), importance)
        if self.order is not None:
            codes, scale = jax.tree.map(lambda leaf: lax.collapse(leaf, leaf.ndim - 2), (codes, scale))
        return dataclasses.replace(self, codes=codes, scale=scale)

    # Hooks

    def widen(self: _Q, like: Value) -> _Q | Array:
        """Propagates gradients to the scales, or converts them to float32, if this was done for `like`.

        Materialises if the layouts differ, so that the same codes have different meanings.
        """
        if not isinstance(like, AbstractQuantizedArray):
            return self
        if self._layout() != like._layout():
            return dense_when_incompatible(self)
        out = dataclasses.replace(self, block_size=like.block_size, inner=like.inner, axes=like.axes)
        out = out.with_gradients(like.gradients)
        if out._form() == like._form():
            return out

        def scaled(w: Any) -> Any:
            return w.times(jnp.float32(1))

        if scaled(out)._form() == like._form():
            return scaled(out)
        return out if jax.eval_shape(scaled, like)._form() == out._form() else dense_when_incompatible(self)

    def _form(self) -> Any:
        """Returns the properties changed by multiplying by a factor."""
        return self.codec, [leaf.dtype for leaf in jax.tree.leaves(self.scale)]

    def _layout(self) -> Any:
        """Returns the properties determining the meaning of codes, for comparison."""
        nested = isinstance(self.scale, NestedScales)
        return type(self), self.codes.shape, self.block, self.stored_shape, self.permutation, nested

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        if self.num_lead == 0 or self.permutation[0] != 0:
            return NotImplemented
        return [0] * len(jax.tree.leaves(self))

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P]:
        per_axis = [*spec, *[None] * (len(self.stored_shape) - len(spec))]
        stored = [per_axis[self.permutation.index(i)] for i in range(len(self.stored_shape))]
        lead, inner = stored[: self.num_lead], stored[self.num_lead :]
        if all(axis is None for axis in inner):
            return [jax.P(*lead, *[None] * (leaf.ndim - self.num_lead)) for leaf in jax.tree.leaves(self)]
        if reason := self.why_not_shardable():
            raise ValueError(
                f"{type(self).__name__} of stored shape {self.stored_shape} cannot be sharded by {spec}: "
                f"{reason}. Shard leading axes only, or quantise with `block_size` dividing the last axis "
                "and without double quantisation."
            )

        # Leaves with one entry per row are replicated. (A block of explicit size still can't be cut.)
        def once(leaf: Any) -> Any:
            return leaf.shape[-1] == 1 and (leaf is not self.scale or self.block_size is None)

        return [
            jax.P(*lead, *([None] * len(inner) if once(leaf) else inner)) for leaf in jax.tree.leaves(self)
        ]

    def why_not_shardable(self) -> str:
        """Returns why inner axes can't be sharded; "" if they can."""
        if self.order is not None:
            return "its columns are out of order"
        if self.inner is not None or isinstance(self.scale, NestedScales):
            return f"the axes {self.inner_shape} share blocks"
        if self.block_size is not None and self.inner_shape[-1] % self.block:
            filled = f"blocks of {self.block} do not fill the axis of {self.inner_shape[-1]}"
            return f"{filled}, so that parts of it would not have the same blocks"
        return ""


@functools.partial(jax.jit, static_argnames=("codec", "count", "block"), inline=True)
def _decoded(parts: Any, codec: Codec, count: int, block: int) -> Float[Array, "*lead columns"]:
    """Decodes rows of codes. Doesn't reorder the columns, even if the array has an `order`."""
    if not parts[0].size:
        return jnp.zeros((*parts[0].shape[:-1], count))
    return join(codec.planes(count, block, parts), count)


def shortest(inner: tuple[int, ...], codec: Codec) -> tuple[int, ...] | None:
    """Returns `inner`, or None for a single axis with a size determined by the number of bytes."""
    return None if len(inner) == 1 and inner[0] * codec.bits % 8 == 0 else tuple(inner)
