"""The base of quantised arrays: the layout of codes and scales, and the operations that it permits.

The *stored* array is the logical one with its axes in the order in which they were quantised. Its
leading axes are axes of both leaves; its trailing ones are flattened, row-major, into the last axis of
`codes`, and cut into blocks there:

    stored shape = codes.shape[:-1] + inner,      scale: codes.shape[:-1] + (blocks,)

Leading axes are therefore free: `vmap`, `lax.scan` over stacked layers, slicing, gathering and sharding
act on the leaves, and the shape follows. Blocks may cross the inner axes, so these stay together.
"""

import abc
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Float32, Int, Int8, UInt8

from ...core.jaxprs.unify import dense_when_incompatible
from ...core.operators import ArrayOperators
from ...core.values import ArrayValue, Value
from ...kernels.block_matmul.reference import join
from ...primitives import Partitioning
from ...primitives.partitioning import is_spread
from .codecs import Codec, Rows
from .scales import BlockScales, NestedScales, dense_scales

_Q = TypeVar("_Q", bound="AbstractQuantizedArray")


class AbstractQuantizedArray(ArrayOperators, ArrayValue):
    """An array of integer codes, with a scale for each block of them.

    Make one with `quantize`. It behaves like the array of dtype `logical_dtype` that it stands for:
    `dot_general` multiplies with the stored codes, in either direction and on either side; transposing,
    reshaping whole blocks, slicing and stacking do not requantise. Anything that cannot be done on codes
    materialises the array, with a [`quaxlike.MaterialisationWarning`][].

    **Arguments:**

    - `codes`: `(*lead, n)`: bytes, packed as the codec specifies.
    - `scale`: `(*lead, blocks)` float32; or [`NestedScales`][quaxlike.arrays.quantized.NestedScales], or
        [`BlockScales`][quaxlike.arrays.quantized.BlockScales].
    - `block_size`: how many codes share a scale; None for all of the last axis.
    - `inner`: the trailing axes that are flattened into the last axis of `codes`; None for a single
        axis, whose length is the number of codes.
    - `axes`: how the last `len(axes)` axes of the stored array are permuted in the logical array.
    - `logical_dtype`: the dtype of the logical array.
    - `train_scales`: whether the scales are trained: gradients flow into them.
    - `open_scales`: whether gradients flow through the scales although they are not trained, to a traced
        factor that was multiplied into them. Set by arithmetic.
    """

    on_materialise = "warn"

    codes: UInt8[Array, "*lead n"] | Int8[Array, "*lead n"]
    scale: Any
    block_size: int | None = eqx.field(static=True)
    inner: tuple[int, ...] | None = eqx.field(static=True, default=None)
    axes: tuple[int, ...] = eqx.field(static=True, default=())
    logical_dtype: np.dtype = eqx.field(static=True, default=np.dtype(np.float32))
    train_scales: bool = eqx.field(static=True, default=False)
    open_scales: bool = eqx.field(static=True, default=False, kw_only=True)

    codec: eqx.AbstractVar[Codec]
    """The format of codes and scales."""

    order: eqx.AbstractVar[Any]
    """For codes whose columns were sorted: the logical column of each stored one; else None."""

    def __check_init__(self) -> None:
        self.check_leaves()
        if sorted(self.axes) != list(range(len(self.axes))) or len(self.axes) > len(self.stored_shape):
            raise ValueError(f"axes {self.axes} do not permute axes of the shape {self.stored_shape}.")

    def check_leaves(self) -> None:
        """Raises `ValueError` unless the shapes and dtypes of codes and scales are consistent."""
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
                raise ValueError(f"{self._as_told} takes {name} of shape {wanted}; found {found}.")
        kinds = "fV" if codec.scales == "float" else "iu"  # V: bfloat16, and other floats of few bits
        if not isinstance(scale, NestedScales) and parts[0].dtype.kind not in kinds:
            wanted = "floats" if codec.scales == "float" else "integers"
            raise ValueError(f"{self._as_told} takes scales that are {wanted}; found {parts[0].dtype}.")
        if parts[1] is not None and parts[1].dtype.kind not in "fV":
            raise ValueError(f"{self._as_told} takes outer scales that are floats; found {parts[1].dtype}.")
        dtype = np.dtype(np.int8 if codec.codes == "signed" else np.uint8)
        if self.codes.dtype != dtype:
            raise ValueError(f"{self._as_told} takes codes of dtype {dtype}; found {self.codes.dtype}.")
        wanted = (*self.codes.shape[:-1], count)
        if self.order is not None and self.order.shape != wanted:
            raise ValueError(f"{self._as_told} takes order of shape {wanted}; found {self.order.shape}.")

    @property
    def _as_told(self) -> str:
        return f"{type(self).__name__} with inner axes {self.inner_shape} in blocks of {self.block}"

    @abc.abstractmethod
    def encoded(self, rows: Float32[Array, "*lead n"]) -> tuple[Array, Any]:
        """Quantises rows of the stored array like this one, into packed codes and scales."""

    @abc.abstractmethod
    def matmul(
        self,
        x: Float[Array, "*batch contracted"],
        parts: Any,
        *,
        shape: tuple[int, int],
        transpose: bool,
        out_dtype: np.dtype,
    ) -> Float[Array, "*batch free"]:
        """Computes `x @ W.T` for the stored matrix `W` of this shape; `x @ W` if `transpose`. `parts` are its
        leaves, whose leading axes together are axes of the matrix; nested scales have none. Only the statics
        of `self` are read."""

    # The logical array

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        fields = [(f, getattr(self, f.name, None)) for f in dataclasses.fields(self)]
        shown = [(f.name, x) for f, x in fields if not (f.metadata.get("static") and x == f.default)]
        try:
            stands_for = [wl.TextDoc(self.aval().str_short(short_dtypes=True))]
        except (AttributeError, IndexError, TypeError):  # no arrays, or others, as in a tree of dtypes
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
        return jax.core.ShapedArray(tuple(shape[i] for i in self.permutation), self.logical_dtype)

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
        """How many axes of the stored array are axes of the leaves."""
        return len(self.codes.shape) - 1

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The axes that are flattened into the last one of `codes`."""
        return (self.codes.shape[-1] * 8 // self.codec.bits,) if self.inner is None else self.inner

    @property
    def matrix(self) -> tuple[int, int]:
        """How many rows of how many codes the last axis of `codes` holds: 1, unless rows share an order."""
        inner = self.inner_shape
        return (1, math.prod(inner)) if self.order is None else (inner[0], math.prod(inner[1:]))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], *self.inner_shape)

    @property
    def permutation(self) -> tuple[int, ...]:
        """For each logical axis, the corresponding stored axis."""
        kept = len(self.stored_shape) - len(self.axes)
        return (*range(kept), *(kept + axis for axis in self.axes))

    @property
    def block(self) -> int:
        """How many codes share a scale."""
        return self.matrix[1] if self.block_size is None else self.block_size

    @property
    def parts(self) -> Any:
        """The leaves that `matmul` takes, as a pytree."""
        return self.codes, self.scale, self.order

    def block_scales(self) -> BlockScales:
        """The scales as the codec reads them; without gradients unless they flow there."""
        scale = self.scale if isinstance(self.scale, BlockScales) else BlockScales(dense_scales(self.scale))
        return scale if self.has_gradients else jax.tree.map(lax.stop_gradient, scale)

    def joins(self, *, in_columns: bool) -> bool:
        """Whether leading axes can become axes of one large matrix: of its columns, beside the inner axes, or
        else of its rows."""
        if self.order is not None or not (in_columns or self.codec.flat):
            return self.order is None
        return self.codec.cuts(self.matrix[1], self.block)

    def joined(self: _Q) -> _Q:
        """The same array in a form whose leading axes can become axes of one large matrix: nested scales,
        which belong to a single matrix, are made dense."""
        nested = isinstance(self.scale, NestedScales)
        return dataclasses.replace(self, scale=dense_scales(self.scale)) if nested else self

    @property
    def is_sum(self) -> bool:
        """Whether elements are sums, whose terms are scaled one by one: an infinite factor makes them NaN."""
        return self.codec.zeros is not None or isinstance(self.scale, NestedScales)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients flow into the scales."""
        return self.train_scales or self.open_scales

    def opened(self: _Q, *, train: bool = False) -> _Q:
        """The same array with gradients through its scales, and with `train_scales` if `train`; they still do
        not reach scales that were frozen."""
        if self.train_scales or (self.open_scales and not train):
            return self
        scale = self.scale if self.open_scales else jax.tree.map(lax.stop_gradient, self.scale)
        return dataclasses.replace(self, scale=scale, train_scales=train, open_scales=not train)

    def with_axes(self: _Q, permutation: Sequence[int]) -> _Q:
        """The same codes with this `permutation` of the stored axes."""
        kept = 0
        while kept < len(permutation) and permutation[kept] == kept:
            kept += 1
        return dataclasses.replace(self, axes=tuple(axis - kept for axis in permutation[kept:]))

    def map_lead(self: _Q, fn: Callable[[Array], Array]) -> _Q:
        """Applies `fn`, which acts on leading axes only, to each leaf."""
        return jax.tree.map(fn, self)

    def stored(self) -> Array:
        """The stored array, dense."""
        return self.with_axes(range(len(self.stored_shape))).materialise()

    def stored_slice(self: _Q, i: ArrayLike) -> "_Q | Array":
        """Slice `i` of the stored array along its first axis: an array of this type, or a dense one if blocks
        are cut."""
        if self.num_lead:
            part = self.map_lead(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False))
            return part.with_axes(range(len(part.stored_shape)))
        return self.rows_at(jnp.asarray(i))

    # Its values

    def rows_of_codes(self) -> tuple[Any, BlockScales]:
        """Codes and scales, with an axis of rows if several of them share an order."""
        codes, scales = self.codes, self.block_scales()
        if self.order is None:
            return codes, scales
        rows = self.matrix[0]
        return jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-1], rows, -1), (codes, scales))

    def _decode(self, codes: Any, scales: BlockScales) -> Float[Array, "*lead columns"]:
        """Decodes rows of codes, with their columns in logical order."""
        dense = _decoded((codes, *scales.parts()), Rows(self.codec, self.matrix[1], self.block))
        if self.order is None:
            return dense
        back = jnp.broadcast_to(jnp.expand_dims(jnp.argsort(self.order), -2), dense.shape)
        return jnp.take_along_axis(dense, back, axis=-1)

    def materialise(self) -> Array:
        self._check_not_cast()
        leaves, treedef = jax.tree.flatten(self)
        if self.order is not None or not is_spread(leaves):
            return self._materialised().transpose(self.permutation)
        # Each device decodes its rows, or parts of them if no block is shared between devices.
        lead, cut = [f"lead{i}" for i in range(self.num_lead)], not self.tied_by()
        last = lambda j, leaf: "k" if cut and leaf.shape[-1] > 1 else f"own{j}"
        names = [lead if leaf.ndim == len(lead) else [*lead, last(j, leaf)] for j, leaf in enumerate(leaves)]
        inner = ["k"] if cut else [f"inner{i}" for i in range(len(self.inner_shape))]
        rule = Partitioning(f"{', '.join(map(' '.join, names))} -> {' '.join([*lead, *inner])}")
        decode = lambda *leaves: [treedef.unflatten(leaves)._materialised()]
        return rule.apply_to_types(decode)(*leaves)[0].transpose(self.permutation)

    def _materialised(self) -> Array:
        """The stored array."""
        return self._decode(*self.rows_of_codes()).astype(self.logical_dtype).reshape(self.stored_shape)

    def rows_at(self, rows: Int[Array, "*batch"]) -> Array:
        """Dense slices of the stored array along its first axis, which is not a leading axis:
        `(*batch, *stored_shape[1:])`."""
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
        """This array times a scalar, or factors `(*lead, 1)`, which are multiplied into the scales."""
        if isinstance(self.scale, BlockScales):
            codec, scale = self.scale.times(factor, self.codec)
            return dataclasses.replace(self, scale=scale, codec=codec)
        nested = isinstance(self.scale, NestedScales)
        return dataclasses.replace(self, scale=self.scale.times(factor) if nested else self.scale * factor)

    def requantized(self: _Q, dense: Array) -> _Q:
        """Quantises a dense array of the same shape like this one."""
        stored = dense.transpose([self.permutation.index(i) for i in range(dense.ndim)])
        rows, count = self.matrix
        rows_of = stored.reshape(*self.codes.shape[:-1], *([] if self.order is None else [rows]), count)
        if self.order is not None:
            index = jnp.broadcast_to(jnp.expand_dims(self.order, -2), rows_of.shape)
            rows_of = jnp.take_along_axis(rows_of, index, axis=-1)
        codes, scale = self.encoded(rows_of.astype(jnp.float32))
        if self.order is not None:
            codes, scale = jax.tree.map(lambda leaf: leaf.reshape(*leaf.shape[:-2], -1), (codes, scale))
        return dataclasses.replace(self, codes=codes, scale=scale)

    # Hooks

    def widen(self: _Q, like: Value) -> _Q | Array:
        """Opens or trains the scales if those of `like` are; dense if `like` has another layout of codes."""
        if not isinstance(like, AbstractQuantizedArray):
            return self
        if self._layout() != like._layout():
            return dense_when_incompatible(self)
        said = dataclasses.replace(self, block_size=like.block_size, inner=like.inner, axes=like.axes)
        return said.opened(train=like.train_scales) if like.has_gradients else said

    def _layout(self) -> Any:
        """Properties that cannot change without other codes, independent of how they are specified."""
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
        if reason := self.tied_by():
            raise ValueError(
                f"{type(self).__name__} of stored shape {self.stored_shape} cannot be sharded by {spec}: "
                f"{reason}. Shard leading axes only, or quantise with `block_size` dividing the last axis "
                "and without double quantisation."
            )
        # Entries for a whole row are replicated; but a block that is given as long as a row cannot be cut.
        once = lambda leaf: leaf.shape[-1] == 1 and (leaf is not self.scale or self.block_size is None)
        return [
            jax.P(*lead, *([None] * len(inner) if once(leaf) else inner)) for leaf in jax.tree.leaves(self)
        ]

    def tied_by(self) -> str:
        """The reason why inner axes cannot be divided among devices; "" if they can."""
        if self.order is not None:
            return "its columns are out of order"
        if self.inner is not None or isinstance(self.scale, NestedScales):
            return f"the axes {self.inner_shape} share blocks"
        if self.block_size is not None and self.inner_shape[-1] % self.block:
            filled = f"blocks of {self.block} do not fill the axis of {self.inner_shape[-1]}"
            return f"{filled}, so that parts of it would not have the same blocks"
        return ""


@functools.partial(jax.jit, static_argnames="rows", inline=True)
def _decoded(parts: Any, rows: Rows) -> Float[Array, "*lead columns"]:
    """Decodes rows of codes, with their columns in stored order."""
    if not parts[0].size:
        return jnp.zeros((*parts[0].shape[:-1], rows.count))
    return join(rows(parts), rows.count)


def as_floating(cls: type, x: ArrayLike, axis: int) -> tuple[Array, list[int]]:
    """`x` with `axis` moved last, and the permutation that moves it back."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{cls.__name__}.quantize takes a floating array; found dtype {x.dtype}.")
    if x.ndim == 0:
        return x, []
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{cls.__name__}.quantize: axis {axis} is not an axis of an array of shape {x.shape}."
        )
    axis %= x.ndim
    return jnp.moveaxis(x, axis, -1), [*range(axis), x.ndim - 1, *range(axis, x.ndim - 1)]


def quantize_stack(cls: Any, x: ArrayLike, axis: int, stacked: int, options: dict[str, Any]) -> Any:
    """Quantises each array of a stack on its own; `axis` is an axis of the whole stack."""
    x = jnp.asarray(x)
    from_end = axis - x.ndim if axis >= 0 else axis
    if stacked >= x.ndim or not stacked - x.ndim <= from_end < 0:
        raise ValueError(
            f"{cls.__name__}.quantize: axis {axis} is not an axis of one of the arrays in {stacked} axes of "
            f"stacks, found the shape {x.shape}."
        )
    quantize = lambda x: cls.quantize(x, axis=from_end, **options)
    for _ in range(stacked):
        quantize = jax.vmap(quantize)
    return quantize(x)


def check_block_size(block_size: Any) -> None:
    """Raises `ValueError` unless `block_size` is None or positive, `TypeError` if it is not an integer."""
    if block_size is None:
        return
    if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
        raise TypeError(f"block_size must be a whole number or None, got {block_size!r}.")
    if block_size < 1:
        raise ValueError(f"block_size must be positive or None, got {block_size}.")
