"""`SparseArray`: an array with only some elements stored.

No position occurs twice, and the index of padding is one past the end. Elementwise functions rely on this.
(Two elements in the same position would have to be added before applying a function: e.g. the square of a sum
isn't the sum of the squares.)
"""

import functools
import math
import operator
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar, Literal, SupportsIndex

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Int32

from ..._arrays import from_numpy
from ..._checked import checked
from ...core.operators import ArrayOperators
from ...core.values import replace_fields
from ...kernels import CsrIndex, csr_index
from ...kernels.padded import add_at, get_at
from .stacks import AbstractSparseArray, check_values, largest, same_index, shard_stack


class SparseArray(ArrayOperators, AbstractSparseArray):
    """An array of zeros except for some elements, in any position.

    Products with a matrix on either side, both forward and backward, take time linear in the number of stored
    elements, and never form the dense matrix. Only stored elements have gradients. Axes in front of the
    sparse axes are batch axes (as created by `jax.vmap`): they stack arrays with the same number of stored
    elements.

    This is usually created by `from_dense`, `from_coo`, `from_bcoo`, `from_bcsr` or `from_scipy`.

    **Arguments:**

    - `data`: `(*batch, elements)`, any dtype.
    - `indices`: for each sparse axis, the element indices, int32 `(*batch, elements)`. All positions
        must be distinct. The index of padding is the axis size, along every axis; padding is treated as zero
        (whatever `data` contains), and has zero gradient.
    - `sizes`: the sparse axes' sizes.
    - `order`: for a matrix with elements in [`csr_index`][quaxlike.kernels.csr_index] order, its `row_ptr`,
        `by_column` and `column_ptr`. None for any other order (this makes products slower), and for arrays
        that aren't matrices.
    - `major`: the axis indexing the rows described by `order`.

    **Raises:** `ValueError` if the shapes are inconsistent, if any size is negative, or if concrete indices
    are out of bounds or not distinct.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        w = ql.SparseArray.from_dense(jnp.eye(4) + jnp.eye(4, k=1))
        y = ql.quaxify(jnp.matmul)(w, jnp.ones((4, 2)))
        ```
    """

    data: Any
    indices: tuple[Any, ...]
    sizes: tuple[int, ...] = eqx.field(static=True)
    order: tuple[Any, Any, Any] | None = None
    major: int = eqx.field(static=True, default=0)

    linear: ClassVar[bool] = True
    stores_elements: ClassVar[bool] = True
    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = "warn"

    def __check_init__(self) -> None:
        shape, shapes = np.shape(self.data), [np.shape(index) for index in self.indices]
        if not shape or not shapes or shapes != [shape] * len(self.sizes):
            raise ValueError(
                "SparseArray takes data of shape (*batch, elements), and indices of that shape for each of "
                f"its sizes; found data {shape}, indices {shapes} and sizes {self.sizes}."
            )
        if min(self.sizes) < 0:
            raise ValueError(f"SparseArray takes sizes that are not negative; found {self.sizes}.")
        # Traced indices can't be checked. (But all of our own methods producing them keep positions
        # distinct.)
        if not any(isinstance(index, jax.core.Tracer) for index in self.indices):
            check_places(np.stack([np.asarray(index) for index in self.indices], -1), self.sizes)

    @classmethod
    @checked
    def from_dense(cls, x: ArrayLike, *, density: float | None = None, stacked: int = 0) -> "SparseArray":
        """Keeps all nonzero elements, or those with the largest magnitude.

        The choice depends on the values of `x`, so this can't be used under `jax.jit`.

        **Arguments:**

        - `x`: any array.
        - `density`: the fraction to keep, in (0, 1]. Issues a warning if the array has too few
            elements to come close to this. Default: keep all nonzeros, so that the array doesn't change.
        - `stacked`: the number of leading axes stacking arrays with separate patterns, for use with `vmap` or
            `lax.scan`. Default: 0.

        **Raises:** `ValueError` if the density is out of bounds, or if there are fewer axes than stacked
        ones.
        """
        check_values(x, "SparseArray.from_dense chooses elements", "x")
        x = jnp.asarray(x)
        if density is not None and not 0 < density <= 1:
            raise ValueError(f"SparseArray.from_dense takes 0 < density <= 1; found {density}.")
        if not 0 <= stacked < x.ndim:
            raise ValueError(
                f"SparseArray.from_dense takes at least one axis that is not stacked; found the shape "
                f"{x.shape} and stacked={stacked}."
            )
        batch, sizes = x.shape[:stacked], x.shape[stacked:]
        flat = x.reshape(*batch, math.prod(sizes))
        mask = largest(np.asarray(jnp.abs(flat)), density, "{} elements")
        size = flat.shape[-1]
        places = np.sort(np.where(mask, np.arange(size), size), axis=-1)[..., : mask.sum(-1).max(initial=0)]
        data = jnp.take_along_axis(flat, from_numpy(np.minimum(places, max(size - 1, 0))), axis=-1)
        return cls._at_places(data, places, sizes)

    @classmethod
    @checked
    def from_coo(cls, data: ArrayLike, indices: Any, shape: Sequence[SupportsIndex] | Array) -> "SparseArray":
        """Creates an array from elements in any order and their indices. Duplicates are summed.

        **Arguments:**

        - `data`: `(*batch, elements)`, which can be traced.
        - `indices`: `(*batch, elements, axes)`, concrete integers: each element's position. Elements out of
            bounds are treated as zero.
        - `shape`: the whole array's shape, `(*batch, *sizes)`.

        **Raises:** `ValueError` if the shapes are inconsistent, or if the indices are traced.
        """
        if isinstance(indices, jax.core.Tracer):
            raise ValueError(
                "SparseArray sorts elements by their indices, which are not known under jit, vmap or grad; "
                "found indices that are traced. Make the array outside them."
            )
        data, indices = jnp.asarray(data), np.asarray(indices)
        try:
            whole = tuple(map(operator.index, shape))
        except TypeError:
            raise ValueError(f"SparseArray takes a shape of integers; found {shape}.") from None
        if any(size < 0 for size in whole):
            raise ValueError(f"SparseArray takes a shape of sizes that are not negative; found {whole}.")
        batch = data.shape[:-1]
        sizes = whole[len(batch) :]
        if data.ndim < 1 or indices.shape != (*data.shape, len(sizes)) or whole[: len(batch)] != batch:
            raise ValueError(
                "SparseArray takes data of shape (*batch, elements) and indices of shape (*batch, elements, "
                f"axes) for an array of shape (*batch, *sizes); found data {data.shape}, indices "
                f"{indices.shape} and shape {whole}."
            )
        inside = ((indices >= 0) & (indices < np.asarray(sizes, np.int64))).all(-1)
        clipped = np.where(inside[..., None], indices, 0).astype(np.int64)
        flat = np.ravel_multi_index(tuple(np.moveaxis(clipped, -1, 0)), sizes) if indices.size else inside
        # All padding has the same position, one past the end, so that sorting moves it behind the elements.
        flat = np.where(inside, flat, math.prod(sizes))
        # Usually, the indices are already sorted without duplicates, so there's no need to reorder `data`.
        if (np.diff(flat) > 0).all():
            return cls._at_places(data, flat, sizes)
        # Otherwise sort the elements, and sum duplicates. Pad the arrays of a stack to a common size.
        each = [np.unique(row, return_inverse=True) for row in flat.reshape(math.prod(batch), flat.shape[-1])]
        width = max((len(places) for places, _ in each), default=0)
        places = [np.pad(p, (0, width - len(p)), constant_values=math.prod(sizes)) for p, _ in each]
        group = jnp.asarray(np.reshape([g for _, g in each], flat.shape), jnp.int32)
        places = np.reshape(places, (*batch, width)).astype(np.int64)
        total = add_at(jnp.zeros((*batch, width), data.dtype), (group,), data, num_batch=len(batch))
        return cls._at_places(total, places, sizes)

    @classmethod
    def _at_places(cls, data: Array, places: np.ndarray, sizes: tuple[int, ...]) -> "SparseArray":
        """Creates an array from elements at flat indices `places`, sorted with padding at the end."""
        inside = places < math.prod(sizes)
        if not inside.all():
            # Other formats have arbitrary values for padding. Clear these: leaves may be summed or compared.
            data = jnp.where(inside, data, jnp.zeros_like(data))
        coordinates = np.unravel_index(np.where(inside, places, 0), sizes) if inside.any() else sizes
        indices = [np.where(inside, c, size) for c, size in zip(coordinates, sizes, strict=True)]
        indices = [index.astype(np.int32) for index in indices]
        # The pattern is concrete, so also compute the CSR index of a matrix.
        order, count = None, math.prod(places.shape[:-1])
        if len(sizes) == 2 and count:
            pairs = zip(*(index.reshape(count, places.shape[-1]) for index in indices), strict=True)
            each = [csr_index(rows, columns, (sizes[0], sizes[1]))[2:] for rows, columns in pairs]
            stacked = [np.reshape(arrays, (*places.shape[:-1], -1)) for arrays in zip(*each, strict=True)]
            order = tuple(map(from_numpy, stacked))
        return cls(data, tuple(map(from_numpy, indices)), sizes, order)

    @classmethod
    @checked
    def from_bcoo(cls, matrix: Any) -> "SparseArray":
        """Converts a `jax.experimental.sparse.BCOO`. Batch axes are preserved; dense axes become sparse axes.

        Elements with traced indices (e.g. under `jax.jit`) aren't reordered.
        """
        from jax.experimental import sparse

        if not isinstance(matrix, sparse.BCOO):
            raise TypeError(f"`matrix` must be a BCOO; found {matrix!r}.")
        if matrix.n_batch == matrix.ndim - matrix.n_dense:
            raise ValueError(
                f"SparseArray.from_bcoo takes a BCOO with at least one sparse axis; found one of shape "
                f"{matrix.shape} with n_batch={matrix.n_batch} and n_dense={matrix.n_dense}. Lower `n_batch` "
                "with `jax.experimental.sparse.bcoo_update_layout`."
            )
        if matrix.n_dense:
            matrix = sparse.bcoo_update_layout(matrix, n_dense=0, on_inefficient=None)
        batch = matrix.shape[: matrix.n_batch]
        data = jnp.broadcast_to(matrix.data, (*batch, *matrix.data.shape[matrix.n_batch :]))
        indices = jnp.broadcast_to(matrix.indices, (*batch, *matrix.indices.shape[matrix.n_batch :]))
        if not isinstance(indices, jax.core.Tracer):
            return cls.from_coo(data, indices, matrix.shape)
        # Traced indices can't be sorted here, but duplicates still have to be summed.
        if not matrix.unique_indices:
            matrix = sparse.BCOO((data, indices), shape=matrix.shape)
            with jax.numpy_rank_promotion("allow"):  # JAX relies on rank promotion here
                matrix = matrix.sum_duplicates(nse=matrix.nse)
            data, indices = matrix.data, matrix.indices
        sizes = matrix.shape[matrix.n_batch :]
        along = [indices[..., axis].astype(jnp.int32) for axis in range(len(sizes))]
        inside = functools.reduce(jnp.logical_and, map(operator.lt, along, sizes))
        each = tuple(jnp.where(inside, index, size) for index, size in zip(along, sizes, strict=True))
        return cls(jnp.where(inside, data, jnp.zeros_like(data)), each, sizes)

    def to_bcoo(self) -> Any:
        """Converts this to a `jax.experimental.sparse.BCOO` with the same batch axes."""
        from jax.experimental import sparse

        return sparse.BCOO(
            (self.elements, jnp.stack(self.indices, -1)),
            shape=self.shape,
            indices_sorted=self.order is not None and self.major == 0,
            unique_indices=True,
        )

    @classmethod
    @checked
    def from_bcsr(cls, matrix: Any) -> "SparseArray":
        """Converts a `jax.experimental.sparse.BCSR`."""
        from jax.experimental import sparse

        if not isinstance(matrix, sparse.BCSR):
            raise TypeError(f"`matrix` must be a BCSR; found {matrix!r}.")
        return cls.from_bcoo(matrix.to_bcoo())

    def to_bcsr(self) -> Any:
        """Converts this matrix, or stack of matrices, to a `jax.experimental.sparse.BCSR`."""
        from jax.experimental import sparse

        if self.order is None or self.major != 0:
            return sparse.BCSR.from_bcoo(self.to_bcoo())
        return sparse.BCSR((self.elements, self.indices[1], self.order[0]), shape=self.shape)

    @classmethod
    @checked
    def from_scipy(cls, matrix: Any) -> "SparseArray":
        """Converts a `scipy.sparse` array in any format."""
        coo = matrix.tocoo()
        coordinates = (coo.row, coo.col) if coo.ndim == 2 else coo.coords
        return cls.from_coo(coo.data, np.stack(coordinates, -1), coo.shape)

    def to_scipy(self) -> Any:
        """Converts this matrix to a `scipy.sparse.csr_array`, or any other array to a `coo_array`.

        **Raises:** `ValueError` for a stack.
        """
        import scipy.sparse

        if self.num_batch:
            raise ValueError(f"scipy.sparse has no stacks of arrays; found the shape {self.shape}.")
        inside = np.asarray(self.indices[0]) < self.sizes[0]
        coordinates = tuple(np.asarray(index)[inside] for index in self.indices)
        coo = scipy.sparse.coo_array((np.asarray(self.data)[inside], coordinates), shape=self.sizes)
        return coo.tocsr() if len(self.sizes) == 2 else coo

    @property
    def num_batch(self) -> int:
        """The number of batch axes."""
        return len(self.data.shape) - 1

    @property
    def nse(self) -> int:
        """The number of stored elements (per array, for a stack)."""
        return self.data.shape[-1]

    @property
    def csr(self) -> CsrIndex | None:
        """The CSR index of the matrix with rows along axis `major`. None if the elements aren't ordered."""
        if self.order is None:
            return None
        return CsrIndex(self.indices[self.major], self.indices[1 - self.major], *self.order)

    @property
    def is_stored(self) -> Bool[Array, "*batch elements"]:
        """A mask for the elements, as opposed to padding."""
        return self.indices[0] < self.sizes[0]

    @property
    def elements(self) -> Array:
        return jnp.where(self.is_stored, self.data, jnp.zeros_like(self.data))

    def with_elements(self, elements: Any) -> "SparseArray":
        return self.replace(data=elements)

    def elements_of(self, y: Array) -> Array:
        n = self.num_batch
        y = jnp.broadcast_to(y, (*self.shape[:n], *y.shape[n:]))
        at = [
            # The only index along a broadcast axis is 0. Use 1 for padding, which is still out of bounds.
            jnp.where(index < size, 0, 1) if along == 1 else index
            for index, size, along in zip(self.indices, self.sizes, y.shape[n:], strict=True)
        ]
        return get_at(y, at, 1, num_batch=n)

    def added_to(self, y: Array) -> Array:
        return add_at(y, self.indices, self.data, num_batch=self.num_batch)

    def has_pattern_of(self, other: Any) -> bool:
        return self.shape == other.shape and all(map(same_index, self.indices, other.indices))

    def replace(self, **fields: Any) -> "SparseArray":
        """Replaces some fields without checking that they are consistent with the others."""
        return replace_fields(self, **fields)

    def placed(self, data: Array, indices: Sequence[Array], sizes: Sequence[int]) -> "SparseArray":
        """Replaces the elements by other ones, in any order.

        Doesn't check the indices, which must be distinct.
        """
        return replace_fields(
            self, data=data, indices=tuple(indices), sizes=tuple(sizes), order=None, major=0
        )

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray((*self.data.shape[:-1], *self.sizes), self.data.dtype)

    def materialise(self) -> Array:
        # Positions are distinct, so at most one element can have only zeros as indices: if there are two
        # elements, something is wrong if all indices are zero. For a matrix in CSR order, even a single
        # element is enough, because its row pointers end with the number of elements.
        if self.nse >= (2 if self.order is None else 1):
            self.check_not_zeros([*self.indices, *(self.order or ())])
        return self.added_to(jnp.zeros(self.shape, self.data.dtype))

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        return [0] * len(jax.tree.leaves(self)) if self.num_batch else NotImplemented

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P]:
        return shard_stack(self, spec)


def check_places(indices: np.ndarray, sizes: tuple[int, ...]) -> None:
    """Checks that all positions, `(*batch, elements, axes)`, are distinct or padding."""
    inside = ((indices >= 0) & (indices < sizes)).all(-1)
    padding = (indices == sizes).all(-1)
    if not (inside | padding).all():
        found = tuple(map(int, indices[~(inside | padding)][0]))
        raise ValueError(
            f"SparseArray of sizes {sizes} takes indices within them, and the sizes themselves for padding; "
            f"found an element at {found}. `SparseArray.from_coo` leaves out elements that are out of bounds."
        )
    flat = np.sort(
        np.where(inside, np.ravel_multi_index(np.moveaxis(indices, -1, 0), sizes, mode="clip"), -1)
    )
    if ((np.diff(flat) == 0) & (flat[..., 1:] >= 0)).any():
        raise ValueError(
            "SparseArray takes each place once; found two elements at one place. `SparseArray.from_coo` adds "
            "them up."
        )


# Coordinates: without batch axes, flattened, or concrete ------------------------------------------


def unstacked(x: SparseArray) -> SparseArray:
    """Converts batch axes to sparse axes."""
    if not x.num_batch:
        return x
    shape, batch = x.data.shape, x.data.shape[:-1]
    inside = x.is_stored
    stacked = [
        jnp.where(inside, lax.broadcasted_iota(jnp.int32, shape, axis), size)
        for axis, size in enumerate(batch)
    ]
    indices = tuple(index.reshape(-1) for index in (*stacked, *x.indices))
    return x.placed(x.data.reshape(-1), indices, (*batch, *x.sizes))


def flattened(
    indices: Sequence[Array], sizes: Sequence[int], inside: Bool[Array, " elements"]
) -> Int32[Array, " elements"]:
    """Returns flat indices into an array with these sizes.

    For elements not `inside`, this is the total size, which is out of bounds.
    """
    flat = jnp.zeros(inside.shape, jnp.int32)
    for index, size in zip(indices, sizes, strict=True):
        flat = flat * size + index
    return jnp.where(inside, flat, math.prod(sizes))


def unflattened(
    flat: Int32[Array, " elements"], sizes: Sequence[int], inside: Bool[Array, " elements"]
) -> tuple[Array, ...]:
    """Inverts `flattened`."""
    indices: list[Array] = []
    for size in reversed(sizes):
        indices.append(jnp.where(inside, flat % max(size, 1), size))
        flat = flat // max(size, 1)
    return tuple(reversed(indices))


def fits_int32(sizes: Sequence[int]) -> bool:
    """Returns whether flat indices into an array with these sizes fit into int32."""
    return math.prod(sizes) < 2**31


def smaller(x: SparseArray) -> Any:
    """Materialises `x` if the dense array isn't any larger than the stored elements."""
    return x.materialise() if x.data.size >= x.size else x


# Concrete patterns


def known_indices(x: SparseArray) -> np.ndarray | None:
    """Returns the indices, `(elements, axes)`. None if they are traced, or for a stack."""
    if x.num_batch or any(isinstance(index, jax.core.Tracer) for index in x.indices):
        return None
    return np.stack([np.asarray(index) for index in x.indices], -1)


def known_positions(indices: np.ndarray, axes: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """Returns flat indices into an array with only these axes. The index of padding is -1."""
    inside = (indices < np.asarray(sizes)).all(1)
    safe = np.where(inside[:, None], indices, 0).astype(np.int64)
    flat = np.zeros(len(indices), np.int64)
    for axis in axes:
        flat = flat * sizes[axis] + safe[:, axis]
    return np.where(inside, flat, -1)


def pairs(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all pairs of positions with the same nonnegative value in `x` and `y`.

    This is a join of two tables. It finds the elements to be multiplied with each other.
    """
    order = np.argsort(y, kind="stable")
    # Once `y` is sorted, the entries equal to an entry of `x` are contiguous.
    first = np.searchsorted(y[order], x, side="left")
    counts = np.searchsorted(y[order], x, side="right") - first
    counts[x < 0] = 0
    of_x = np.repeat(np.arange(len(x)), counts)
    nth = np.arange(len(of_x)) - np.repeat(np.cumsum(counts) - counts, counts)
    return of_x, order[np.repeat(first, counts) + nth]
