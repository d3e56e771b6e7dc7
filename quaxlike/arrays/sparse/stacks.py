"""Stacks of sparse arrays.

Kernels only multiply by a single matrix, so this implements `dot_general` (with any batch axes) in terms of
these products.
"""

import abc
import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ...core.derivatives import derivative_alone
from ...core.jaxprs.unify import dense_when_incompatible
from ...core.values import ArrayValue, Value, is_value
from ..batch_axes import mapped, transpose_batch
from ..dot_axes import dot_axes, in_order

_S = TypeVar("_S", bound="AbstractSparseArray")


def dot_stack(
    w: Any,
    x: Array,
    matmul: Callable[[Any, Array, int], Array],
    dimension_numbers: Any,
    *,
    on_left: bool,
) -> Any:
    """Multiplies an array by `w`. All its leaves must have its batch axes as their leading axes.

    **Arguments:**

    - `w`: `(*batch, n0, n1)`.
    - `matmul`: `matmul(w, x, axis)` contracts `axis` (0 or 1) of a single matrix with the last axis of `x`,
        replacing it by the matrix's other axis.
    - `dimension_numbers`: the parameter for `dot_general(w, x)`, or `dot_general(x, w)` if not `on_left`.

    **Returns:** the product. `NotImplemented` unless this contracts precisely one matrix axis.
    """
    of_w, of_x = dot_axes(w, x, dimension_numbers, on_left=on_left)
    num_batch, batch = w.ndim - 2, of_w.batch
    # Kernels multiply by whole matrices, along one of the two axes.
    if len(of_w.contracting) != 1 or any(axis >= num_batch for axis in batch):
        return NotImplemented
    (axis,) = of_w.contracting
    if axis < num_batch:
        return NotImplemented
    own = of_w.free[:-1]
    x = x.transpose(*of_x.batch, *of_x.free, *of_x.contracting)
    w = transpose_batch(w, (*batch, *own))

    def product(w: Any, x: Array) -> Array:
        return matmul(w, x, axis - num_batch)

    # Along batch axes only in `w`, all matrices are multiplied by the same `x`.
    for _ in own:
        product = jax.vmap(product, in_axes=(0, None))
    y = mapped(product, len(batch))(w, x)  # (*batch, *own, *of_x.free, the matrix's other axis)

    free = [*range(len(batch), num_batch), y.ndim - 1]
    return y.transpose(*range(len(batch)), *in_order(on_left, free, range(num_batch, y.ndim - 1)))


class AbstractSparseArray(ArrayValue):
    """The base class of sparse arrays. All leaves have the batch axes."""

    @property
    @abc.abstractmethod
    def num_batch(self) -> int:
        """The number of batch axes, which come first."""

    def each(self: _S, fn: Callable[[Array, int], Array]) -> _S:
        """Replaces each leaf by `fn(leaf, own)`, where all but the last `own` axes are batch axes."""
        n = self.num_batch
        return jax.tree.map(lambda leaf: fn(leaf, leaf.ndim - n), self)

    def stacked(self: _S) -> _S:
        return self

    @property
    @abc.abstractmethod
    def elements(self) -> Any:
        """The stored elements, for use in elementwise functions and reductions.

        Padding is set to zero unless this is a Value. (Products and scatters don't need this: they ignore any
        elements with an index out of bounds.)
        """

    def check_not_zeros(self, pattern: Sequence[Any]) -> None:
        """Raises an error if all indices of a pattern are known to be zero, which is never valid.

        This happens if `jax.jacfwd` replaces the pattern, which has no derivative, by zeros. Without this
        check, all elements would silently be added in the same position. If these are zero as well, as in a
        new adapter, then the position doesn't matter.
        """
        elements = [x for x in jax.tree.leaves(self) if jnp.issubdtype(x.dtype, jnp.inexact)]
        if self.size and _are_zeros(pattern) and not _are_zeros(elements):
            raise derivative_alone(type(self))

    @abc.abstractmethod
    def with_elements(self: _S, elements: Any) -> _S:
        """Replaces the elements without changing their positions."""

    @abc.abstractmethod
    def elements_of(self, y: Array) -> Array:
        """Broadcasts `y`, then takes the elements at the stored positions. Returns 1 for padding, so that
        dividing by this is safe.
        """

    @abc.abstractmethod
    def added_to(self, y: Array) -> Array:
        """Adds this to a dense array with the same shape."""

    @abc.abstractmethod
    def has_pattern_of(self, other: Any) -> bool:
        """Returns whether the other array is known to store the same positions in the same order."""

    def widen(self, like: Value) -> Any:
        """Materialises if `like` has a different layout, e.g. storage by columns, or another number of
        elements.
        """
        same = not isinstance(like, AbstractSparseArray) or self._layout() == like._layout()
        return NotImplemented if same else dense_when_incompatible(self)

    def _layout(self) -> Any:
        def shapes(x: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.shape, x, is_leaf=is_value)

        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return type(self), [x if field.metadata.get("static") else shapes(x) for field, x in fields]


def is_stacked(w: Any) -> bool:
    """Returns whether all of a field's leaves have its leading axes."""
    if not isinstance(w, ArrayValue):
        return True
    axes = w.leading_axis()
    return axes is not NotImplemented and all(axis == 0 for axis in axes)


def shard_stack(w: Any, spec: jax.P) -> list[jax.P]:
    """Implements `shard_spec`, provided all leaves have the batch axes."""
    if any(axis is not None for axis in spec[w.num_batch :]):
        raise ValueError(
            f"{type(w).__name__} of shape {w.shape} cannot be sharded by {spec}: the index of an array "
            "covers all that is stored of it. Shard only axes that stack arrays."
        )
    batch = spec[: w.num_batch]
    return [jax.P(*batch, *[None] * (leaf.ndim - len(batch))) for leaf in jax.tree.leaves(w)]


def check_values(x: Any, chooses: str, name: str) -> None:
    """Raises a `ValueError` for a tracer: the pattern would depend on its values."""
    if isinstance(x, jax.core.Tracer):
        raise ValueError(
            f"{chooses} by the values of {name}, which are not known under jit, vmap or grad; found a "
            "tracer. Call it outside them."
        )


# The relative error up to which a requested density counts as met, without a warning.
_NEAR = 0.05


def largest(sizes: np.ndarray, density: float | None, of: str) -> np.ndarray:
    """Returns a mask for the largest entries along the last axis, given the fraction to keep.

    If `density` is None then all nonzeros are kept. `of` describes the entries in the warning issued if the
    density can't be met.
    """
    if density is None:
        return sizes != 0
    size = sizes.shape[-1]
    count = max(1, round(density * size))
    if size and abs(count / size - density) > _NEAR * density:
        warnings.warn(
            f"density={density:g} cannot be met: {count} of {of.format(size)} are kept, which is "
            f"{count / size:.4g}, the nearest there is. Ask for that, or for smaller parts.",
            stacklevel=4,  # skips `from_dense` and `checked`
        )
    # With a stable sort, the choice amongst equal entries doesn't depend on the platform.
    kept = np.argsort(-sizes, axis=-1, kind="stable")[..., :count]
    mask = np.zeros(sizes.shape, bool)
    np.put_along_axis(mask, kept, True, axis=-1)
    return mask


def is_covered(w: Any, y: Any) -> bool:
    """Returns whether an elementwise function of `w` and `y` has `w`'s shape."""
    return np.broadcast_shapes(w.shape, np.shape(y)) == w.shape


def same_index(x: Any, y: Any) -> bool:
    """Returns whether two index arrays are known to be equal."""
    if x is y:
        return True
    known = not any(isinstance(index, jax.core.Tracer) for index in (x, y))
    return known and x.shape == y.shape and bool(np.array_equal(x, y))


def broadcast_stack(w: Any, shape: Any, dimensions: Any) -> Any:
    """Implements `broadcast_in_dim` for batch axes.

    Returns `NotImplemented` if this affects the matrices' axes: repeating stored elements along these changes
    the pattern.
    """
    num_new, kept = len(shape) - len(w.shape) + w.num_batch, w.num_batch
    matrix = tuple(range(num_new, len(shape)))
    if tuple(dimensions[kept:]) != matrix or tuple(shape[num_new:]) != w.shape[kept:]:
        return NotImplemented

    def broadcast(leaf: Array, own: int) -> Array:
        new_shape = (*shape[:num_new], *leaf.shape[leaf.ndim - own :])
        axes = (*dimensions[:kept], *range(num_new, len(new_shape)))
        return lax.broadcast_in_dim(leaf, new_shape, axes)

    return w.each(broadcast)


def _are_zeros(arrays: Sequence[Any]) -> bool:
    """Returns whether all arrays are known to be zero."""
    return not any(isinstance(x, jax.core.Tracer) or np.asarray(x).any() for x in arrays)
