"""The base of quantised arrays: the layout of codes and scales, and what it makes possible.

The *stored* array is the logical one with its axes in the order in which they were quantised. Its
leading axes are axes of both leaves; its trailing ones are flattened, row-major, into the last axis of
`codes` and cut into blocks there:

    stored shape = codes.shape[:-1] + inner,      scale: codes.shape[:-1] + (blocks,)

Leading axes are therefore free: `vmap`, `lax.scan` over stacked layers, slicing, gathering and sharding
act on the leaves and leave the shape true. Blocks may cross the inner axes, so these stay together.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Float, Float32, Int, Int8, UInt8

from ...core.operators import ArrayOperators
from ...core.values import ArrayValue, Value
from ...primitives import Partitioning
from ...primitives.partitioning import is_spread
from .grid import Grid, sorted_table
from .scales import NestedScales, dense_scales

_Q = TypeVar("_Q", bound="AbstractQuantizedArray")
_S = TypeVar("_S", bound="AbstractScaledArray")


class AbstractQuantizedArray(ArrayOperators, ArrayValue):
    """An array of integer codes, with a scale for each block of them.

    Make one with `quantize`. It behaves as the array of dtype `logical_dtype` that it stands for:
    `dot_general` multiplies with the codes as they are stored, in either direction and on either side;
    transposing, reshaping whole blocks, slicing and stacking do not requantise. What cannot be done on
    codes materialises the array, with a [`quaxlike.MaterialisationWarning`][].

    **Arguments:**

    - `codes`: `(*lead, n)`: bytes that hold two 4-bit codes each, or int8.
    - `scale`: `(*lead, blocks)` float32, or [`NestedScales`][quaxlike.arrays.quantized.NestedScales].
    - `block_size`: how many codes share a scale; None for all of the last axis.
    - `inner`: the trailing axes that are flattened into the last axis of `codes`; None for a single
        axis, as long as there are codes.
    - `axes`: how the last `len(axes)` axes of the stored array are permuted in the logical array.
    - `logical_dtype`: the dtype of the array that this stands for.
    - `train_scales`: whether gradients flow into the scales.
    """

    on_materialise = "warn"

    codes: UInt8[Array, "*lead n"] | Int8[Array, "*lead n"]
    scale: Any
    block_size: int | None = eqx.field(static=True)
    inner: tuple[int, ...] | None = eqx.field(static=True, default=None)
    axes: tuple[int, ...] = eqx.field(static=True, default=())
    logical_dtype: np.dtype = eqx.field(static=True, default=np.dtype(np.float32))
    train_scales: bool = eqx.field(static=True, default=False)

    codes_per_entry: ClassVar[int]
    """How many codes one element of `codes` holds."""

    def __check_init__(self) -> None:
        self.check_leaves()
        if sorted(self.axes) != list(range(len(self.axes))) or len(self.axes) > len(self.stored_shape):
            raise ValueError(f"axes {self.axes} do not permute axes of the shape {self.stored_shape}.")

    def check_leaves(self) -> None:
        """Raises `ValueError` unless codes and scales fit each other."""
        inner = self.inner_shape
        expected = [*self.codes.shape[:-1], -(-math.prod(inner) // max(self.block, 1))]
        held = self.codes.shape[-1] * self.codes_per_entry
        scale = self.scale.codes if isinstance(self.scale, NestedScales) else self.scale
        wanted = np.uint8 if self.codes_per_entry == 2 else np.int8
        fits = held - self.codes_per_entry < math.prod(inner) <= held
        if self.codes.dtype != wanted or not fits or list(scale.shape) != expected:
            raise ValueError(
                f"{type(self).__name__} with inner axes {inner} in blocks of {self.block} takes codes of "
                f"dtype {np.dtype(wanted)} and scales of shape {tuple(expected)}; found codes "
                f"{self.codes.dtype}{list(self.codes.shape)} and scales of shape {tuple(scale.shape)}."
            )

    @abc.abstractmethod
    def rows_at(self, rows: Int[Array, "*batch"]) -> Array:
        """Slices of the stored array along its first axis, dense, where that is no leading axis:
        `(*batch, *stored_shape[1:])`."""

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
        """`x @ W.T` for the stored matrix `W` of this shape; `x @ W` if `transpose`. `parts` are its leaves,
        on leading axes that together are axes of the matrix; nested scales have none. Of `self` only
        statics are read."""

    @abc.abstractmethod
    def times(self: _Q, factor: Float32[Array, ""]) -> _Q:
        """This array times a scalar, which is multiplied into the scales."""

    @abc.abstractmethod
    def requantized(self: _Q, dense: Array) -> _Q:
        """A dense array of the same shape, quantised as this one is."""

    @abc.abstractmethod
    def grid(self) -> Grid | None:
        """What the codes of the stored matrix may stand for; None if it is no matrix."""

    @abc.abstractmethod
    def with_codes(self: _Q, codes: np.ndarray) -> _Q:
        """The same scales with other codes, one a byte, for the rows and columns of `grid`."""

    # The array that this stands for

    def aval(self) -> jax.core.ShapedArray:
        shape = self.stored_shape
        return jax.core.ShapedArray(tuple(shape[i] for i in self.permutation), self.logical_dtype)

    # The stored array

    @property
    def num_lead(self) -> int:
        """How many axes of the stored array are axes of the leaves."""
        return len(self.codes.shape) - 1

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The axes that are flattened into the last one of `codes`."""
        return (self.codes.shape[-1] * self.codes_per_entry,) if self.inner is None else self.inner

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return (*self.codes.shape[:-1], *self.inner_shape)

    @property
    def permutation(self) -> tuple[int, ...]:
        """For each logical axis, the stored axis that it is."""
        kept = len(self.stored_shape) - len(self.axes)
        return (*range(kept), *(kept + axis for axis in self.axes))

    @property
    def block(self) -> int:
        """How many codes share a scale."""
        return self.inner_shape[-1] if self.block_size is None else self.block_size

    def joins(self, *, in_columns: bool) -> bool:
        """Whether leading axes can be made axes of one large matrix: of its columns, beside the inner
        axes, or else of its rows."""
        size = math.prod(self.inner_shape)
        return size % self.codes_per_entry == 0 and size % max(self.block, 1) == 0

    @property
    def parts(self) -> Any:
        """The leaves that `matmul` takes, a pytree."""
        return self.codes, self.scale

    def joined(self: _Q) -> _Q:
        """The same array in a form whose leading axes may be made axes of one large matrix."""
        return self

    def opened(self: _Q) -> _Q:
        """The same array with `train_scales`: gradients still do not flow into scales that were shut off."""
        if self.train_scales:
            return self
        return dataclasses.replace(self, scale=jax.tree.map(lax.stop_gradient, self.scale), train_scales=True)

    def with_axes(self: _Q, permutation: Sequence[int]) -> _Q:
        """The same codes with this `permutation` of the stored axes."""
        kept = 0
        while kept < len(permutation) and permutation[kept] == kept:
            kept += 1
        return dataclasses.replace(self, axes=tuple(axis - kept for axis in permutation[kept:]))

    def map_lead(self: _Q, fn: Callable[[Array], Array]) -> _Q:
        """`fn`, which acts on leading axes only, done to each leaf."""
        return jax.tree.map(fn, self)

    def untied(self: _Q) -> _Q:
        """The same array with as many leading axes as whole blocks allow: nested scales, whose blocks
        cross rows, become float32."""
        return self

    @abc.abstractmethod
    def reshaped(self: _Q, shape: tuple[int, ...]) -> _Q | None:
        """The stored array in another shape; None if that does not keep blocks whole."""

    def stored(self) -> Array:
        """The stored array, dense."""
        return self.with_axes(range(len(self.stored_shape))).materialise()

    def stored_slice(self: _Q, i: ArrayLike) -> "_Q | Array":
        """Slice `i` of the stored array along its first axis: an array of this type, or, where blocks are
        cut, a dense one."""
        if self.num_lead:
            part = self.map_lead(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False))
            return part.with_axes(range(len(part.stored_shape)))
        return self.rows_at(jnp.asarray(i))

    # Hooks

    def widen(self: _Q, like: Value) -> _Q:
        """With scales that may be trained if those of `like` may."""
        return self.opened() if isinstance(like, AbstractQuantizedArray) and like.train_scales else self

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
        # What there is once a row, all devices have; but a block that happens to be as wide is not cut.
        once = lambda leaf: leaf.shape[-1] == 1 and (leaf is not self.scale or self.block_size is None)
        return [
            jax.P(*lead, *([None] * len(inner) if once(leaf) else inner)) for leaf in jax.tree.leaves(self)
        ]

    def tied_by(self) -> str:
        """The reason why inner axes cannot be divided among devices; none if they can."""
        if self.inner is not None or isinstance(self.scale, NestedScales):
            return f"the axes {self.inner_shape} share blocks"
        if self.block_size is not None and self.inner_shape[-1] % self.block:
            filled = f"blocks of {self.block} do not fill the axis of {self.inner_shape[-1]}"
            return f"{filled}, so that parts of it would not have the same blocks"
        return ""


class AbstractScaledArray(AbstractQuantizedArray):
    """A quantised array with one scale, or nested ones, a block: `decode(codes) * scale`."""

    @classmethod
    @abc.abstractmethod
    def decode(
        cls, codes: Array, scale: Array, inner: tuple[int, ...], block_size: int, dtype: np.dtype
    ) -> Array:
        """The dense array of shape `inner` for codes and scales without leading axes."""

    @classmethod
    @abc.abstractmethod
    def decode_at(
        cls, codes: Array, scale: Array, index: Int[Array, "*shape"], block_size: int
    ) -> Float32[Array, "*shape"]:
        """The elements at flat positions `index`, for codes and scales without leading axes."""

    def materialise(self) -> Array:
        leaves, treedef = jax.tree.flatten(self)
        if not is_spread(leaves):
            return self._decoded().transpose(self.permutation)
        # Each device decodes its rows, and its part of them if blocks fill these.
        lead = [f"lead{i}" for i in range(self.num_lead)]
        cut = self.inner is None and self.inner_shape[-1] % max(self.block, 1) == 0
        last = lambda j, leaf: "k" if cut and leaf.shape[-1] > 1 else f"own{j}"
        names = [lead if leaf.ndim == len(lead) else [*lead, last(j, leaf)] for j, leaf in enumerate(leaves)]
        inner = ["k"] if cut else [f"inner{i}" for i in range(len(self.inner_shape))]
        rule = Partitioning(f"{', '.join(map(' '.join, names))} -> {' '.join([*lead, *inner])}")
        decode = lambda *leaves: [treedef.unflatten(leaves)._decoded()]
        return rule.apply_to_types(decode)(*leaves)[0].transpose(self.permutation)

    def _decoded(self) -> Array:
        """The stored array."""
        inner, block_size = self.inner_shape, self.block
        codes, scale = self.codes, self.dense_scale()
        decode: Callable[..., Array] = lambda codes, scale: self.decode(
            codes, scale, inner, block_size, self.logical_dtype
        )
        for _ in range(self.num_lead):
            decode = jax.vmap(decode)
        return decode(codes, scale)

    def rows_at(self, rows: Int[Array, "*batch"]) -> Array:
        shape = self.stored_shape[1:]
        size = math.prod(shape)
        columns = lax.broadcasted_iota(rows.dtype, (*rows.shape, size), rows.ndim)
        index = jnp.expand_dims(rows * size, -1) + columns
        values = self.decode_at(self.codes, self.dense_scale(), index, self.block)
        return values.reshape(*rows.shape, *shape).astype(self.logical_dtype)

    def dense_scale(self) -> Float32[Array, "*lead blocks"]:
        """The float32 scales, shut off from gradients unless `train_scales`."""
        scale = dense_scales(self.scale)
        return scale if self.train_scales else lax.stop_gradient(scale)

    def _grid_of(self, values: np.ndarray) -> Grid | None:
        """The grid for a table of the values of all codes."""
        shape = self.stored_shape
        if len(shape) != 2:
            return None
        # One row of codes for each of the matrix; or one for all, whose blocks may cross rows.
        rows, count = (shape[0], shape[1]) if self.num_lead else (1, shape[0] * shape[1])
        scale = np.asarray(dense_scales(self.scale), np.float64).reshape(rows, -1)
        scale = np.repeat(scale, self.block, axis=1)[:, :count].reshape(shape)
        return Grid(*sorted_table(values), scale, np.zeros_like(scale))

    def joined(self: _S) -> _S:
        # Nested scales belong to one matrix, not to the larger one that is formed.
        return dataclasses.replace(self, scale=dense_scales(self.scale))

    def times(self: _S, factor: Float32[Array, ""]) -> _S:
        scale = self.scale
        if not isinstance(scale, NestedScales):
            return dataclasses.replace(self, scale=scale * factor)
        nested = dataclasses.replace(scale, absmax=scale.absmax * factor, offset=scale.offset * factor)
        return dataclasses.replace(self, scale=nested)

    def requantized(self: _S, dense: Array) -> _S:
        stored = dense.transpose([self.permutation.index(i) for i in range(dense.ndim)])
        cls: Any = type(self)
        new = cls.quantize(
            stored,
            block_size=self.block_size,
            double_quant=isinstance(self.scale, NestedScales),
            stacked=self.num_lead,
            train_scales=self.train_scales,
        )
        return new.with_axes(self.permutation)


def as_floating(cls: type, x: ArrayLike, axis: int) -> tuple[Array, list[int]]:
    """`x` with `axis` last, and the permutation that leads back from there."""
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
    """Each array of a stack on its own; `axis` is one of the whole."""
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
