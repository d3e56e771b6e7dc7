"""`StructuredMatrix`: the base class for matrices with several parts, with leading batch axes.

A part can omit leading batch axes, and is then shared along these. The shape is always computed from the
parts: a static field would become incorrect under `vmap`, which removes an axis from every part.
"""

import abc
import contextlib
from collections.abc import Callable, Sequence
from types import NotImplementedType
from typing import Any, ClassVar, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..._arrays import as_array
from ...core.jaxprs.slots import leading_axes, part_specs
from ...core.jaxprs.unify import can_be_unified, dense_when_incompatible, widened_part
from ...core.operators import ArrayOperators
from ...core.quaxify import quaxify
from ...core.values import ArrayValue, Value, is_value, replace_fields
from ..batch_axes import with_batch_of

_M = TypeVar("_M", bound="StructuredMatrix")


class StructuredMatrix(ArrayOperators, ArrayValue):
    """A matrix, or a stack of matrices, made from smaller arrays (its parts).

    Additional axes at the front of a part are batch axes. A part can omit leading batch axes, and is then
    shared along these. For example, a stack of low-rank updates can have a single base.
    """

    CORE: ClassVar[dict[str, int]]
    """Maps the field name of each part to how many of its axes are not batch axes."""

    FACTORS: ClassVar[tuple[str, ...]]
    """The parts that are multiplied when multiplying the matrix by a scalar."""

    OTHERS: ClassVar[dict[str, int] | None]
    """When filling a matrix with some value, we fill `FACTORS[0]` with it and the other parts with these.

    This is needed for gathers that are out of bounds. It's None for a type that always contains zeros, which
    means that it can't represent a matrix filled with anything else.
    """

    combines_parts: ClassVar[bool] = False
    """Whether elements are sums or products of elements of the parts."""

    is_sum: ClassVar[bool] = False
    """Whether elements are sums of several terms.

    If so, then we mustn't multiply the terms by an infinite factor, because their sum could then be NaN.
    """

    @property
    @abc.abstractmethod
    def matrix_shape(self) -> tuple[int, int]:
        """The matrix's shape, without batch axes."""

    @abc.abstractmethod
    def transposed(self) -> "StructuredMatrix":
        """Swaps the last two axes."""

    # Rules call these methods via `inside`, so that parts can be Values.

    @abc.abstractmethod
    def applied_to(self, x: Any, precision: Any = None, product: Callable[..., Any] = jnp.matmul) -> Any:
        """Multiplies by `x`, with shape `(..., n, k)`. Its batch axes are broadcast against the matrix's.

        **Arguments:**

        - `product`: the function for multiplying a part by `x`. Default: `jnp.matmul`.
        """

    @abc.abstractmethod
    def solve(self, b: Any) -> Any:
        """Finds `x` with shape `(*batch, n, k)` such that `self @ x = b`."""

    @abc.abstractmethod
    def inverse(self) -> Any:
        """Returns the inverse, structured if any of these types can represent it."""

    @abc.abstractmethod
    def slogdet(self) -> tuple[Any, Any]:
        """Returns the determinant's sign and the logarithm of its absolute value."""

    @abc.abstractmethod
    def det(self) -> Any:
        """Returns the determinant, differentiable even if it's zero."""

    @abc.abstractmethod
    def diagonal_elements(self) -> Any:
        """Returns the diagonal, with shape `(*batch, min(m, n))`."""

    # The following methods are called by rules for several types. If one operand's method declines, the
    # other's is tried. If both decline then we materialise.

    def places(self) -> dict[str, tuple[Any, Any]] | None:
        """Returns the rows and columns of each part's elements, as one-dimensional arrays.

        Returns None unless the matrix is zero everywhere else. If so, then e.g. elementwise products can be
        computed for each part separately.
        """
        return None

    def converts_by_parts(self, dtype: Any) -> bool:
        """Returns whether converting every part to `dtype` converts the elements, up to rounding.

        Sums and products of integers or booleans can wrap and cancel, so they must be computed first. And
        casting both 0.5s in 0.5 + 0.5 to integers gives 0 rather than 1.
        """
        if not self.combines_parts or dtype == self.dtype:
            return True
        both = (self.dtype, dtype)
        of_complex, complex_too = (jnp.issubdtype(x, jnp.complexfloating) for x in both)
        return all(jnp.issubdtype(x, jnp.inexact) for x in both) and (complex_too or not of_complex)

    def diagonal_block(self: _M, rows: slice) -> _M | NotImplementedType:
        """Returns the block with these rows and the same columns, if it has the same type."""
        return NotImplemented

    def plus(self: _M, other: "StructuredMatrix", add: Callable[[Any, Any], Any]) -> _M | NotImplementedType:
        """Computes `add(self, other)`, where `add` adds or subtracts (perhaps with swapped operands)."""
        alike = self.lifted(other) if self.places() is not None else NotImplemented
        return NotImplemented if alike is NotImplemented else self.paired(alike, add)

    def multiplied(
        self: _M, other: "StructuredMatrix", by: Callable[[Any, Any], Any]
    ) -> _M | NotImplementedType:
        """Multiplies or divides elementwise by another matrix."""
        same = type(other) is type(self) and self.places() is not None
        return self.paired(other, by) if same else NotImplemented

    def lifted(self: _M, other: "StructuredMatrix") -> _M | NotImplementedType:
        """Converts `other` to this type, if every part has a counterpart.

        For example, a diagonal matrix can be converted to a tridiagonal one, so that they can be added.
        """
        if type(other) is type(self):
            return other
        mine, its = self.places(), other.places()
        if mine is None or its is None:
            return NotImplemented
        # Match parts by the positions of their elements. Parts missing from `other` are zero.
        parts: dict[str, Any] = {}
        for name, place in mine.items():
            same = [key for key, at in its.items() if all(map(np.array_equal, place, at))][:1]
            zeros = jnp.zeros((*other.batch, len(place[0])), other.dtype)
            parts[name] = other.parts[same[0]] if same else zeros
            its = {key: at for key, at in its.items() if key not in same}
        return NotImplemented if its else self.with_parts(parts)

    def paired(self: _M, other: Any, fn: Callable[[Any, Any], Any]) -> _M:
        """Applies `fn` to each pair of parts, for another matrix with the same type and shape."""
        x, y = self.converted(self.dtype).stacked(), other.converted(other.dtype).stacked()
        return x.with_parts({name: quaxify(fn)(part, y.parts[name]) for name, part in x.parts.items()})

    def after_diagonal(self: _M, diagonal: Any) -> _M | NotImplementedType:
        """Multiplies from the left by a diagonal matrix with this `diagonal`, i.e. scales the rows."""
        places = self.places()
        if places is None:
            return NotImplemented
        x = self.stacked()

        def by(part: Any, rows: Any) -> Any:
            return diagonal[..., rows] * part

        return x.with_parts({name: by(part, places[name][0]) for name, part in x.parts.items()})

    def matmul(self: _M, other: "StructuredMatrix", precision: Any = None) -> _M | NotImplementedType:
        """Multiplies by another matrix with the same batch axes. Neither matrix is diagonal."""
        return NotImplemented

    @property
    def has_solver(self) -> bool:
        """Whether linear systems exploit the structure. If not, the dense matrix is factorised."""
        return True

    @property
    def parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.CORE}

    @property
    def batch(self) -> tuple[int, ...]:
        """The sizes of the batch axes."""
        return max((part.shape[: part.ndim - self.CORE[name]] for name, part in self.parts.items()), key=len)

    @property
    def num_batch(self) -> int:
        return len(self.batch)

    def aval(self) -> jax.core.ShapedArray:
        dtypes = {part.dtype for part in self.parts.values()}
        with jax.numpy_dtype_promotion("standard") if len(dtypes) > 1 else contextlib.nullcontext():
            dtype = jnp.result_type(*dtypes)
        return jax.core.ShapedArray((*self.batch, *self.matrix_shape), dtype)

    def each(self: _M, fn: Callable[[Any, int], Any]) -> _M:
        """Replaces each part by `fn(part, n)`, where all but the last `n` axes are batch axes."""
        return self.with_parts(
            {name: quaxify(fn)(part, self.CORE[name]) for name, part in self.parts.items()}
        )

    def with_parts(self: _M, parts: dict[str, Any]) -> _M:
        return replace_fields(self, **parts)

    def stacked(self: _M, batch: Sequence[int] | None = None) -> _M:
        """Adds any missing batch axes to every part, so that no part is shared."""
        batch = self.batch if batch is None else tuple(batch)
        return self.each(lambda part, n: _broadcast(part, (*batch, *part.shape[part.ndim - n :])))

    def repeated(self: _M, shape: tuple[int, ...]) -> _M | NotImplementedType:
        """Repeats the matrix along batch axes, as when broadcasting it against an array with this shape.

        Declines if this repeats rows or columns, since the result has a different structure.
        """
        full = jnp.broadcast_shapes(self.shape, shape)  # sizes may be symbolic
        if full[-2:] != self.matrix_shape:
            return NotImplemented
        return self if full == self.shape else self.stacked(full[:-2])

    def converted(self: _M, dtype: Any) -> _M:
        """Converts all parts to a single dtype."""
        if all(part.dtype == dtype for part in self.parts.values()):
            return self
        return self.each(lambda part, _: part if part.dtype == dtype else part.astype(dtype))

    def scaled(self: _M, factor: Any, by: Callable[[Any, Any], Any] = jnp.multiply) -> _M:
        """Multiplies by a scalar, or by one scalar per matrix in a stack (with the shape of `batch`).

        **Arguments:**

        - `by`: the elementwise function to use instead of multiplication.
        """
        parts, n = self.converted(self.dtype).parts, jnp.ndim(factor)
        for name in self.FACTORS:
            core = self.CORE[name]
            of_part = jnp.reshape(factor, (*jnp.shape(factor), *[1] * core)) if n else factor
            parts[name] = quaxify(lambda part, factor, ndim=n + core: by(lead(part, ndim), factor))(
                parts[name], of_part
            )
        return self.with_parts(parts)

    def widen(self: _M, like: Value) -> _M | jax.Array | NotImplementedType:
        """Adds the batch axes each part has in `like`. If dtypes differ from `like`, also converts all parts
        to a single dtype.

        Materialises if the parts have different sizes or types, and hence no common structure.
        """
        if not isinstance(like, StructuredMatrix) or type(like) is not type(self):
            return NotImplemented
        dtypes = [[part.dtype for part in x.parts.values()] for x in (self, like)]
        parts = (self if dtypes[0] == dtypes[1] else self.converted(self.dtype)).parts
        for name, part in parts.items():
            other, core = getattr(like, name), self.CORE[name]
            part = with_batch_of(part, other, core)
            if part.shape[-core:] != other.shape[-core:] or not can_be_unified(part, other):
                return dense_when_incompatible(self)
            parts[name] = widened_part(part, other)
        return self.with_parts(parts)

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        if not self.batch:
            return NotImplemented  # a single row isn't structured
        n = len(self.batch)
        return leading_axes((part, part.ndim - self.CORE[name] >= n) for name, part in self.parts.items())

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        batch = len(self.batch)
        if any(axis is not None for axis in spec[batch:]):
            return NotImplemented  # a block of rows isn't a matrix of this type
        sharded = (*spec[:batch], *[None] * (batch - len(spec)))

        def own(part: Any, core: Any) -> Any:
            return jax.P(*sharded[batch - (part.ndim - core) :], *[None] * core)

        return part_specs((part, own(part, self.CORE[name])) for name, part in self.parts.items())


def inside(fn: Callable[..., Any], *operands: Any) -> Any:
    """Calls `fn(*operands)` under `quaxify`, dispatching on the parts of structured operands."""

    def on_parts(*parts: Any) -> Any:
        pairs = zip(operands, parts, strict=True)
        # Operations assume that all parts have the same dtype.
        return fn(
            *(x.with_parts(p).converted(x.dtype) if isinstance(x, StructuredMatrix) else p for x, p in pairs)
        )

    return quaxify(on_parts)(*(x.parts if isinstance(x, StructuredMatrix) else x for x in operands))


def check_batches(matrix: StructuredMatrix) -> None:
    """Raises a `ValueError` unless each part's batch axes are the last batch axes of the matrix."""
    batch = matrix.batch
    for name, part in matrix.parts.items():
        core = matrix.CORE[name]
        own = part.shape[: max(part.ndim - core, 0)]
        if part.ndim < core or own != batch[len(batch) - len(own) :]:
            shapes = ", ".join(f"{name} {part.shape}" for name, part in matrix.parts.items())
            raise ValueError(
                f"{type(matrix).__name__} takes {name} with {core} axes, after batch axes that all its parts "
                f"share or that a part leaves out from the left; found {shapes}."
            )


def as_part(x: Any) -> Any:
    """Converts a field to an array. Values are returned unchanged."""
    return x if is_value(x) or hasattr(x, "shape") else as_array(x)


def _broadcast(part: Any, shape: tuple[int, ...]) -> Any:
    return part if part.shape == shape else jnp.broadcast_to(part, shape)


def lead(part: Any, ndim: int) -> Any:
    """Adds leading axes of size 1, for at least `ndim` axes in total."""
    return part if part.ndim >= ndim else jnp.reshape(part, (*[1] * (ndim - part.ndim), *part.shape))


def sign_of(x: Any) -> Any:
    """Computes `jnp.sign`, with a derivative for complex numbers, which JAX before 0.12 lacks."""
    if not jnp.iscomplexobj(x):
        return jnp.sign(x)
    size = jnp.abs(x).astype(x.dtype)
    is_zero = size == 0
    return jnp.where(is_zero, size, x / jnp.where(is_zero, jnp.ones_like(size), size))


def solve_part(part: Any, b: Any) -> Any:
    """Computes `jnp.linalg.solve` for a part, and a `b` with shape `(*batch, n, k)`.

    A part shared along batch axes is only factorised once.
    """
    batch = b.shape[:-2]
    if part.ndim > 2:
        return jnp.linalg.solve(_broadcast(part, (*batch, *part.shape[-2:])), b)
    columns = jnp.reshape(jnp.moveaxis(b, -2, 0), (b.shape[-2], -1))
    x = jnp.linalg.solve(part, columns)
    return jnp.moveaxis(jnp.reshape(x, (b.shape[-2], *batch, b.shape[-1])), 0, -2)


def diagonal_of(part: Any) -> Any:
    return jnp.diagonal(part, axis1=-2, axis2=-1)
