"""Arrays trained alongside adapters: whole arrays, some rows of an embedding, and biases."""

import operator
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..._checked import checked
from ...core.jaxprs.slots import leading_axes, part_specs
from ...core.jaxprs.unify import dense_when_incompatible, widened
from ...core.policy import map_values
from ...core.quaxify import quaxify
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue, Value, is_value, materialise
from .. import precedence
from ..adapted import AdaptedArray, constant
from ..dot_axes import dot_axes
from ..gradients import Gradients
from .dot import add


class TransparentValue(AdaptedArray):
    """An adapted array that behaves like a plain array in every computation."""

    # This follows from the contents, so don't store it in a model's files.
    gradients: ClassVar[Gradients] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]

    @staticmethod
    def default(
        primitive: jexc.Primitive, values: Sequence[ArrayLike | Value], params: dict[str, Any]
    ) -> Any:
        def under(values: Any) -> Any:
            return [materialise(x) if isinstance(x, TransparentValue) else x for x in values]

        # An array occurring several times is only materialised once.
        plain = map_values(under, values)
        return quaxify(primitive.bind)(*plain, **primitive.get_bind_params(params))


class TrainableArray(TransparentValue):
    """A fully trained array within an otherwise frozen model.

    This is inserted by `loraify(..., modules_to_save=...)`, and by its argument `bias=`.

    **Arguments:**

    - `array`: any array.
    """

    array: Any

    w: ClassVar[Any] = property(lambda self: self.array)
    gradients: ClassVar[Gradients] = "train"
    linear: ClassVar[bool] = True

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self) -> Any:
        return self.array

    def merged(self) -> jax.Array:
        """Returns the array."""
        return self.array

    def unmerged(self, weight: jax.Array) -> "TrainableArray":
        return self

    def with_base(self, w: Any) -> "TrainableArray":
        return self.replace(array=w)

    def resized(self, axis: int, resize: Callable[..., Any]) -> "TrainableArray":
        return self.with_base(resize(self.array, axis))

    @classmethod
    def promote(cls, array: Any, like: Any) -> Value | NotImplementedType:
        array = widened(array, like.array)
        return cls(array) if is_value(array) == is_value(like.array) else NotImplemented

    def widen(self, like: Value) -> Any:
        return NotImplemented  # only its values may change

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        return leading_axes([(self.array, True)])

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        return part_specs([(self.array, spec)])


class LoraBias(TransparentValue):
    """The bias of a layer with an adapter that also has a bias: `w + scaling * b`, with trained `b`.

    This is inserted by `loraify(..., lora_bias=True)`.

    **Arguments:**

    - `w`: the layer's bias, frozen unless it's a `TrainableArray`. None if the layer has no bias.
    - `b`: the adapter's bias.
    - `scaling`: the adapter's scaling, treated as a constant in differentiation.
    """

    b: Any
    scaling: Any

    numbers: ClassVar[Sequence[str]] = ("scaling",)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.b.shape, (self.b if self.w is None else self.w).dtype)

    def materialise(self) -> jax.Array:
        return self._sum(self.base)

    def merged(self) -> jax.Array:
        """Returns the sum, with gradients with respect to both parts."""
        return self._sum(self.w)

    def unmerged(self, weight: jax.Array) -> "LoraBias":
        if self.w is None:
            return self
        base = weight - self._scaled().astype(weight.dtype)
        return self.with_base(self.w.with_base(base) if isinstance(self.w, AdaptedArray) else base)

    def resized(self, axis: int, resize: Callable[..., Any]) -> "LoraBias":
        w = None if self.w is None else resize(self.w, axis)
        return self.replace(w=w, b=resize(self.b, axis))

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        parts = [x for x in (self.w, self.b) if x is not None]
        # A single scaling applies to all rows, and so does a bias shared by several adapters.
        rows = [(x, x.ndim == self.ndim) for x in parts]
        return leading_axes([*rows, (self.scaling, np.ndim(self.scaling) > 0)])

    def _scaled(self) -> jax.Array:
        scaling = constant(self.scaling).astype(self.b.dtype)
        return self.b * scaling.reshape(scaling.shape + (1,) * (self.b.ndim - scaling.ndim))

    def _sum(self, w: Any) -> jax.Array:
        scaled = self._scaled()
        return scaled if w is None else add(materialise(w), scaled)


class TrainableRows(TransparentValue):
    """A frozen matrix with some rows replaced by trained ones.

    This is inserted by `loraify(..., trainable_token_indices=...)`, to train the embeddings of a few tokens,
    so that an adapter's file contains only these. Lookups only read the requested rows. A product (e.g. in an
    output layer tied to an embedding) is computed as one product with the matrix and another with the rows:
    neither the combined matrix nor its gradient is ever formed. All other computations use the combined
    matrix.

    **Arguments:**

    - `w`: the matrix, `(n, size)`.
    - `rows`: the trained rows, `(len(indices), size)`.
    - `indices`: the indices of the replaced rows, without duplicates.
    - `transposed`: whether this represents the transposed matrix, `(size, n)`. Either way, `w` and `rows` are
        stored as above. Default: False.
    """

    rows: Any
    indices: tuple[int, ...] = eqx.field(static=True)
    transposed: bool = eqx.field(static=True, default=False)

    @checked
    def __init__(
        self,
        w: ArrayLike | ArrayValue,
        rows: ArrayLike | ArrayValue,
        indices: Sequence[int],
        transposed: bool = False,
    ) -> None:
        try:
            numbers = tuple(map(operator.index, indices))
        except TypeError:
            raise TypeError(f"TrainableRows takes integers as indices; found {indices!r}.") from None
        self.w, self.rows, self.indices, self.transposed = w, rows, numbers, transposed

    def __check_init__(self) -> None:
        w: Any = getattr(self.w, "shape", ())
        rows: Any = getattr(self.rows, "shape", ())
        different = len({*self.indices}) == len(self.indices)
        inside = len(w) == 2 and all(0 <= i < w[0] for i in self.indices)
        if not (different and inside and rows == (len(self.indices), w[1])):
            raise ValueError(
                "TrainableRows takes a row for each of indices, which are different rows of w; found "
                f"w {w or self.w!r}, rows {rows or self.rows!r} and indices {self.indices}."
            )

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.w.shape[::-1] if self.transposed else self.w.shape, self.w.dtype)

    def materialise(self) -> jax.Array:
        dense = _replaced(materialise(self.base), self)
        return dense.T if self.transposed else dense

    def merged(self) -> jax.Array:
        """Returns the matrix, including the trained rows."""
        return self.materialise()

    def unmerged(self, weight: jax.Array) -> "TrainableRows":
        return self

    def resized(self, axis: int, resize: Callable[..., Any]) -> "TrainableRows":
        # New rows are the mean of all existing rows, including the trained ones.
        w = resize(self.w, axis, like=self.merged())
        if max(self.indices) >= w.shape[0]:
            raise ValueError(f"its rows {list(self.indices)} are trained.")
        return self.with_base(w)

    def widen(self, like: Value) -> Any:
        """Materialises if `like` has different rows, or a different layout."""
        same = not isinstance(like, TrainableRows) or self._layout() == like._layout()
        return NotImplemented if same else dense_when_incompatible(self)

    def _layout(self) -> Any:
        return self.indices, self.transposed, self.w.shape, self.rows.shape


def _replaced(w: Any, x: TrainableRows) -> jax.Array:
    return w.at[jnp.asarray(x.indices)].set(x.rows.astype(w.dtype), unique_indices=True)


@register("gather")
def _gather(x: TrainableRows, start: ArrayLike, *, dimension_numbers: Any, slice_sizes: Any, **params: Any):
    d, (n, size) = dimension_numbers, x.shape
    whole_rows = tuple(slice_sizes) == (1, size) and tuple(d.collapsed_slice_dims) == (0,)
    if x.transposed or not whole_rows or tuple(d.start_index_map) != (0,) or d.operand_batching_dims:
        return NotImplemented

    def look_up(w: Any, at: Any) -> Any:
        return lax.gather_p.bind(w, at, dimension_numbers=d, slice_sizes=slice_sizes, **params)

    start = jnp.asarray(start)
    # Look up each index amongst the trained rows.
    known = jnp.asarray(x.indices, start.dtype).reshape((1,) * (start.ndim - 1) + (-1,))
    # Clip like `lax.gather` does for the base.
    at = jnp.clip(start, 0, n - 1) if params["mode"] == lax.GatherScatterMode.CLIP else start
    same = at == known  # the last axis of `start` has size one
    own = look_up(x.rows.astype(x.dtype), jnp.argmax(same, axis=-1, keepdims=True).astype(start.dtype))
    found = jnp.expand_dims(jnp.any(same, axis=-1), d.offset_dims)
    return jnp.where(found, own, quaxify(look_up)(x.base, start))


@register("transpose")
def _transpose(x: TrainableRows, *, permutation: Sequence[int]):
    if tuple(permutation) == (0, 1):
        return x
    return TrainableRows(x.w, x.rows, x.indices, not x.transposed)


@register_on_either_side("dot_general", TrainableRows, precedence=precedence.TRAINABLE_ROWS)
def _product(primitive: Primitive, x: Any, y: Any, **params: Any):
    if isinstance(x, TrainableRows):
        return _dot_general(x, y, True, **params)
    return _dot_general(y, x, False, **params)


def _dot_general(x: TrainableRows, other: Any, on_left: bool, *, dimension_numbers: Any, **params: Any):
    """Multiplies by both parts. If rows are summed over, each part only uses its entries of `other`.

    Otherwise, both products are computed in full, and the second overwrites entries in the first.
    """
    of_x, of_other = dot_axes(x, other, dimension_numbers, on_left=on_left)
    if of_x.batch or len(of_x.contracting) != 1 or params.get("out_sharding") is not None:
        return NotImplemented
    (summed,), other_summed = of_x.contracting, of_other.contracting
    at, axis = jnp.asarray(x.indices), 1 - summed if x.transposed else summed
    contract = ((axis,), other_summed) if on_left else (other_summed, (axis,))

    def dot(part: Any, other: Any) -> Any:
        operands = (part, other) if on_left else (other, part)
        return lax.dot_general(*operands, (contract, ((), ())), **params)

    def product(w: Any, rows: Any, other: Any) -> Any:
        if axis == 0:
            # Zero the entries for the trained rows. Otherwise these are also multiplied by the base.
            own, nothing = (*[slice(None)] * other_summed[0], at), jnp.zeros((), other.dtype)
            return dot(w, other.at[own].set(nothing, unique_indices=True)) + dot(rows, other[own])
        own = (at,) if on_left else (..., at)
        return dot(w, other).at[own].set(dot(rows, other), unique_indices=True)

    return quaxify(product)(x.base, x.rows.astype(x.dtype), other)
