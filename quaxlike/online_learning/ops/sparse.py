"""`etp_sp_mm`, `etp_sp_mv`: y = x @ w for a sparse weight with fixed positions of entries."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from ..._checked import checked
from ..primitive import register_primitive, vjp_of, zeros_like_output, zeros_like_weights
from .dense import check_shapes, onto_batched

_Indices = Sequence[int] | np.ndarray | jax.Array


class SparsePattern:
    """The positions of a sparse weight's entries. Patterns are hashable, and equal if their entries are.

    **Arguments:**

    - `rows`, `columns`: integers, `(entries,)`.
    - `shape`: `(in, out)`.

    **Raises:** `ValueError` for entries outside of the shape.
    """

    @checked
    def __init__(self, rows: _Indices, columns: _Indices, shape: tuple[int, int]) -> None:
        if isinstance(rows, str) or isinstance(columns, str):
            raise TypeError(f"rows and columns of a SparsePattern are integers; found {rows!r}, {columns!r}")
        self.rows, self.columns = (np.array(i, dtype=np.int32) for i in (rows, columns))
        self.shape = tuple(shape)
        if self.rows.ndim != 1 or self.rows.shape != self.columns.shape:
            raise ValueError(
                "rows and columns of a SparsePattern are vectors of equal length; found shapes "
                f"{self.rows.shape} and {self.columns.shape}"
            )
        for name, indices, size in (("rows", self.rows, shape[0]), ("columns", self.columns, shape[1])):
            if indices.size and not (indices.min() >= 0 and indices.max() < size):
                raise ValueError(
                    f"{name} of a SparsePattern of shape {self.shape} must be in [0, {size}); found "
                    f"[{indices.min()}, {indices.max()}]"
                )
        for indices in (self.rows, self.columns):
            indices.flags.writeable = False

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.rows.tobytes(), self.columns.tobytes(), self.shape

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparsePattern) and self._key == other._key

    def __repr__(self) -> str:
        return f"SparsePattern({self.rows.size} of {self.shape[0]} × {self.shape[1]})"


def _sparse_matmul(x: Any, data: Any, *, pattern: SparsePattern) -> jax.Array:
    terms = x[..., pattern.rows] * data
    y = jnp.zeros((*x.shape[:-1], pattern.shape[1]), terms.dtype)
    return y.at[..., pattern.columns].add(terms)


def _yw_to_w(g: Any, trace: Mapping[str, Any], *, pattern: SparsePattern) -> dict[str, Any]:
    return {"weight": trace["weight"] * g[..., pattern.columns]}


etp_sp_mm_p = register_primitive(
    "etp_sp_mm", _sparse_matmul, batched=True, batching=onto_batched(lambda: etp_sp_mm_p, 1)
)
"""y = x @ w: x `(batch..., in)`, the entries of w `(entries,)`, their positions in `pattern`."""

etp_sp_mv_p = register_primitive("etp_sp_mv", _sparse_matmul, batching=onto_batched(lambda: etp_sp_mm_p, 1))
"""The same for x `(in,)`."""

for _p in (etp_sp_mm_p, etp_sp_mv_p):
    _p.register_etp_rules(
        yw_to_w=_yw_to_w,
        xy_to_dw=vjp_of(_sparse_matmul, ("weight",)),
        init_drtrl=zeros_like_weights(lambda x: len(x.shape) - 1),
        init_pp=zeros_like_output,
    )


@checked
def sparse_matmul(x: ArrayLike, data: ArrayLike, pattern: SparsePattern) -> jax.Array:
    """`x @ w` for a sparse w, with its entries trained online.

    **Arguments:**

    - `x`: `(..., in)`; axes before the last are batch axes.
    - `data`: the entries, `(entries,)`.
    - `pattern`: their positions; entries at the same position add up.

    **Returns:** `(..., out)`.
    """
    check_shapes(
        f"sparse_matmul with the pattern {pattern!r}",
        "`x` of shape (..., in) and `data` of shape (entries,)",
        lambda x, data: x[-1:] == pattern.shape[:1] and data in (pattern.rows.shape, ()),
        x=x,
        data=data,
    )
    primitive = etp_sp_mv_p if jnp.ndim(x) == 1 else etp_sp_mm_p
    return primitive(x, data, pattern=pattern)
