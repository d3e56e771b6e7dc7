"""`BlockSparseArray`: a weight with only some square blocks stored.

The pattern consists of index arrays, which are never differentiated or changed by training. Only the blocks
have gradients. `col_idx` and `transposed_idx` describe the same pattern, once by rows and once by columns, so
always update both. Otherwise products on the other side use the wrong blocks.
"""

import math
import numbers
from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, ArrayLike

from ..._arrays import from_numpy
from ..._checked import checked
from ...core.operators import ArrayOperators
from ...core.values import ArrayValue, replace_fields
from ...kernels import transposed_index
from ...kernels.padded import add_at, get_at
from .stacks import AbstractSparseArray, check_values, is_stacked, largest, same_index, shard_stack


class BlockSparseArray(ArrayOperators, AbstractSparseArray):
    """A matrix with zeros outside some square blocks, or a stack of these.

    Products on either side, both forward and backward, take time proportional to the number of stored blocks,
    and never form the dense matrix. Only stored blocks have gradients, so a pruned weight remains pruned
    during training.

    Blocks are stored by block row (this layout is known as block-ELL): every row has as many slots as there
    are blocks in the fullest row. So avoid a single row with many more blocks than the others.

    **Arguments:**

    - `blocks`: `(*batch, rows, slots, b, b)`, an array or a Value with this shape, such as an
        [`NF4Array`][quaxlike.NF4Array].
    - `col_idx`: int32 `(*batch, rows, slots)`, each block's column. Empty slots have index `columns`; they
        are treated as zeros (whatever `blocks` contains), and have zero gradient.
    - `transposed_idx`: int32 `(*batch, columns, slots of a column)`, the blocks in each block column, as
        computed by [`transposed_index`][quaxlike.kernels.transposed_index].
    - `transposed`: whether this represents the transposed matrix. Default: False.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        w = jax.random.normal(jax.random.key(0), (512, 256))
        sparse = ql.BlockSparseArray.from_dense(w, block_size=64, density=0.25)
        y = jnp.ones((8, 256)) @ sparse.T
        ```

    The layout and the products follow Gray et al., GPU Kernels for Block-Sparse Weights (2017).
    """

    blocks: Any
    col_idx: Any
    transposed_idx: Any
    transposed: bool = eqx.field(static=True, default=False)

    linear: ClassVar[bool] = True
    stores_elements: ClassVar[bool] = True
    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = "warn"

    @classmethod
    @checked
    def from_dense(
        cls, w: ArrayLike, *, block_size: int = 128, density: float | None = None, balanced: bool = True
    ) -> "BlockSparseArray":
        """Keeps a dense matrix's largest blocks (by Euclidean norm).

        The choice depends on the values of `w`, so this can't be used under `jax.jit`.

        **Arguments:**

        - `w`: `(*batch, N, K)`, any floating dtype.
        - `block_size`: the block size, which must divide `N` and `K`. GPU kernels support 64 and 128;
            TPU kernels support multiples of 128. Default: 128.
        - `density`: the fraction of blocks to keep, in (0, 1]. Issues a warning if the matrix has too few
            blocks to come close to this. Default: keep all nonzero blocks, so that the matrix doesn't change.
        - `balanced`: with a `density`, whether to keep the same number of blocks in each block row, so that
            there are no empty slots. Otherwise, the whole matrix's largest blocks are kept, and each row has
            as many slots as there are blocks in the fullest row. Default: True.

        **Returns:** the pruned matrix.

        **Raises:** `ValueError` if the blocks don't divide the matrix, or if the density is out of bounds.
        """
        check_values(w, "BlockSparseArray.from_dense chooses blocks", "w")
        w = jnp.asarray(w)
        if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
            raise TypeError(
                f"BlockSparseArray.from_dense takes a whole number as block_size; found {block_size!r}."
            )
        if density is not None and not isinstance(density, numbers.Real):
            raise TypeError(f"BlockSparseArray.from_dense takes a number as density; found {density!r}.")
        if w.ndim < 2 or block_size < 1 or any(size % block_size for size in w.shape[-2:]):
            raise ValueError(
                f"BlockSparseArray.from_dense cuts the last two axes of w into blocks of {block_size}; found "
                f"w of shape {w.shape}. Choose a block_size that divides both axes."
            )
        if density is not None and not 0 < density <= 1:
            raise ValueError(f"BlockSparseArray.from_dense takes 0 < density <= 1; found {density}.")
        *batch, n, k = w.shape
        cut = w.reshape(*batch, n // block_size, block_size, k // block_size, block_size).swapaxes(-3, -2)
        # Squares may overflow in half precision, so use float32.
        norms = np.asarray(jnp.sum(jnp.square(jnp.abs(cut.astype(jnp.float32))), (-2, -1)))
        if balanced or density is None:
            masks = largest(norms, density, "the {} blocks of each row")
        else:
            flat = norms.reshape(*norms.shape[:-2], -1)
            masks = largest(flat, density, "the {} blocks").reshape(norms.shape)
        col_idx = _column_index(masks)
        # The index of padding is out of bounds. Clipping it fills these slots with arbitrary blocks, so clear
        # them afterwards.
        at = np.expand_dims(np.minimum(col_idx, k // block_size - 1), (-2, -1))
        blocks = jnp.take_along_axis(cut, from_numpy(at), axis=-3)
        stored = np.expand_dims(col_idx < k // block_size, (-2, -1))
        return cls.from_blocks(jnp.where(stored, blocks, jnp.zeros_like(blocks)), col_idx, k // block_size)

    @classmethod
    @checked
    def from_blocks(cls, blocks: Any, col_idx: Any, columns: int) -> "BlockSparseArray":
        """Creates a matrix from its blocks.

        **Arguments:**

        - `blocks`: `(*batch, rows, slots, b, b)`, an array or a Value.
        - `col_idx`: `(*batch, rows, slots)`, concrete integers: each block's column, distinct in each row; or
            `columns` for an empty slot.
        - `columns`: the number of block columns, `K / b`.

        **Returns:** an array with shape `(*batch, rows * b, columns * b)`.

        **Raises:** `ValueError` if the shapes are inconsistent, or if a column is out of bounds or occurs
        twice in a row.
        """
        col_idx = np.asarray(col_idx, np.int32)
        if blocks.ndim < 4 or blocks.shape[-1] != blocks.shape[-2] or blocks.shape[:-2] != col_idx.shape:
            raise ValueError(
                "BlockSparseArray.from_blocks takes blocks of shape (*batch, rows, slots, b, b) and col_idx "
                f"of shape (*batch, rows, slots); found {blocks.shape} and {col_idx.shape}."
            )
        ordered = np.sort(col_idx, -1)
        if ((np.diff(ordered) == 0) & (ordered[..., 1:] < columns)).any():
            raise ValueError(
                "BlockSparseArray.from_blocks takes each block column once in a row; found col_idx with one "
                "that comes twice."
            )
        *batch, rows, slots = col_idx.shape
        matrices = [col_idx[i] for i in np.ndindex(*batch)]
        # Here both indices come from the same pattern. They mustn't be changed separately afterwards.
        each = [transposed_index(index, columns) for index in matrices]
        # The matrices of a stack may have different numbers of slots, so pad to the largest one.
        width = max((index.shape[1] for index in each), default=0)
        padded = [
            np.pad(index, ((0, 0), (0, width - index.shape[1])), constant_values=rows * slots)
            for index in each
        ]
        transposed_idx = np.asarray(padded, np.int32).reshape(*batch, columns, width)
        return cls(blocks, from_numpy(col_idx), from_numpy(transposed_idx))

    @classmethod
    @checked
    def from_scipy(cls, matrix: Any, *, block_size: int = 128) -> "BlockSparseArray":
        """Converts a `scipy.sparse` matrix in any format. Only blocks with an entry are stored.

        **Arguments:**

        - `matrix`: `(N, K)`.
        - `block_size`: as for `from_dense`. Default: 128.
        """
        n, k = matrix.shape
        if n % block_size or k % block_size:
            raise ValueError(
                f"BlockSparseArray.from_scipy cuts a matrix into blocks of {block_size}; found the shape "
                f"{(n, k)}. Choose a block_size that divides both axes."
            )
        bsr = matrix.tobsr(blocksize=(block_size, block_size))
        bsr.sum_duplicates()
        counts = np.diff(bsr.indptr)
        row = np.repeat(np.arange(len(counts)), counts)
        slot = np.arange(len(row)) - bsr.indptr[row]
        shape = (len(counts), int(counts.max(initial=0)))
        col_idx = np.full(shape, k // block_size, np.int32)
        col_idx[row, slot] = bsr.indices
        blocks = np.zeros((*shape, block_size, block_size), bsr.dtype)
        blocks[row, slot] = bsr.data
        return cls.from_blocks(jnp.asarray(blocks), col_idx, k // block_size)

    def to_scipy(self) -> Any:
        """Converts the matrix to a `scipy.sparse.bsr_array`.

        **Raises:** `ValueError` for a stack of matrices.
        """
        import scipy.sparse

        if self.num_batch:
            raise ValueError(f"scipy.sparse has no stacks of matrices; found the shape {self.shape}.")
        blocks = np.asarray(self.blocks.materialise() if isinstance(self.blocks, ArrayValue) else self.blocks)
        col_idx = np.asarray(self.col_idx)
        stored = col_idx < self.transposed_idx.shape[0]
        indptr = np.concatenate([[0], np.cumsum(stored.sum(1))])
        b = self.block_size
        shape = (len(col_idx) * b, self.transposed_idx.shape[0] * b)
        bsr = scipy.sparse.bsr_array((blocks[stored], col_idx[stored], indptr), shape=shape)
        return bsr.T if self.transposed else bsr

    @property
    def block_size(self) -> int:
        return self.blocks.shape[-1]

    @property
    def num_batch(self) -> int:
        """The number of batch axes."""
        return self.col_idx.ndim - 2

    @property
    def density(self) -> float:
        """The slot count (including empty slots) divided by the total block count."""
        return self.col_idx.shape[-1] / max(1, self.transposed_idx.shape[-2])

    @property
    def elements(self) -> Any:
        if isinstance(self.blocks, ArrayValue):
            return self.blocks
        stored = self.col_idx[..., None, None] < self.transposed_idx.shape[-2]
        return jnp.where(stored, self.blocks, jnp.zeros_like(self.blocks))

    @property
    def leaves_are_stacked(self) -> bool:
        """Whether all leaves have the batch axes (if there are any)."""
        return not self.num_batch or is_stacked(self.blocks)

    def with_elements(self, elements: Any) -> "BlockSparseArray":
        return self.replace(blocks=elements)

    def elements_of(self, y: Array) -> Array:
        y = jnp.broadcast_to(y, self.shape)
        b, columns = self.block_size, self.transposed_idx.shape[-2]
        y = y.swapaxes(-2, -1) if self.transposed else y

        cut = y.reshape(*self.col_idx.shape[:-1], b, columns, b)
        return get_at(cut, (self._block_rows(), slice(None), self.col_idx), 1, num_batch=self.num_batch)

    def added_to(self, y: Array) -> Array:
        b, columns = self.block_size, self.transposed_idx.shape[-2]

        y = y.swapaxes(-2, -1) if self.transposed else y
        cut = y.reshape(*self.col_idx.shape[:-1], b, columns, b)
        at = self._block_rows(), slice(None), self.col_idx
        out = add_at(cut, at, self.blocks, num_batch=self.num_batch).reshape(y.shape)
        return out.swapaxes(-2, -1) if self.transposed else out

    def has_pattern_of(self, other: Any) -> bool:
        alike = self.shape == other.shape and self.transposed == other.transposed
        return alike and same_index(self.col_idx, other.col_idx)

    def replace(self, **fields: Any) -> "BlockSparseArray":
        """Replaces some fields without checking that they are consistent with the others."""
        return replace_fields(self, **fields)

    def aval(self) -> jax.core.ShapedArray:
        b = self.block_size
        matrix = self.col_idx.shape[-2] * b, self.transposed_idx.shape[-2] * b
        matrix = matrix[::-1] if self.transposed else matrix
        return jax.core.ShapedArray((*self.col_idx.shape[:-2], *matrix), self.blocks.dtype)

    def materialise(self) -> Array:
        blocks = self.blocks.materialise() if isinstance(self.blocks, ArrayValue) else self.blocks
        # If this is the tangent of a function, JAX may have replaced the indices by zeros. Detect this:
        # otherwise all blocks are added in the same position.
        if math.prod(self.transposed_idx.shape[-2:]) > 1:  # the index numbers distinct blocks
            self.check_not_zeros([self.col_idx, self.transposed_idx])
        *rows, _, b, _ = blocks.shape
        columns = self.transposed_idx.shape[-2]
        each = jnp.zeros((*rows, columns, b, b), blocks.dtype)
        each = add_at(each, (self._block_rows(), self.col_idx), blocks, num_batch=self.num_batch)
        out = each.swapaxes(-3, -2).reshape(*rows[:-1], rows[-1] * b, columns * b)
        return out.swapaxes(-2, -1) if self.transposed else out

    def _block_rows(self) -> Array:
        """Each slot's block row."""
        return lax.broadcasted_iota(jnp.int32, self.col_idx.shape, self.num_batch)

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        if not self.num_batch or not is_stacked(self.blocks):
            return NotImplemented
        return [0] * len(jax.tree.leaves(self))

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        return shard_stack(self, spec) if is_stacked(self.blocks) else NotImplemented


def _column_index(masks: np.ndarray) -> np.ndarray:
    """Returns the blocks' columns in each row, in increasing order and followed by padding."""
    columns = masks.shape[-1]
    slots = int(masks.sum(-1).max(initial=0))
    index = np.where(masks, np.arange(columns, dtype=np.int32), np.int32(columns))
    return np.sort(index, axis=-1)[..., :slots]
