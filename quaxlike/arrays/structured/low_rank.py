"""`LowRankUpdate`: a matrix plus the product of two thin matrices."""

from collections.abc import Callable
from types import NotImplementedType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..._checked import checked
from ...core.jaxprs.unify import widened
from ...core.quaxify import quaxify, value_of
from ...core.rules import active_layers, resolver
from ...core.values import Value, is_value, materialise, replace_fields
from ..annotated import AnnotatedArray
from .base import StructuredMatrix, as_part, check_batches, diagonal_of, inside, lead, solve_part
from .diagonal import DiagonalMatrix
from .dot import multiply


class LowRankUpdate(StructuredMatrix):
    """The matrix `base + u @ v.T`, with thin `u` and `v`.

    Linear systems are solved by the Woodbury formula, i.e. via systems with the base and a small (rank by
    rank) system; determinants are computed by the matrix determinant lemma. Both require the base to be
    invertible. They save nothing if the base isn't structured (unless it's shared by a stack), so then the
    sum is factorised instead.

    **Arguments:**

    - `base`: an array or any Value with shape `(*batch, m, n)`.
    - `u`: shape `(*batch, m, rank)`.
    - `v`: shape `(*batch, n, rank)`. Default: `u`, for a symmetric update.

    **Raises:**

    `ValueError` if the shapes are inconsistent.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.structured import DiagonalMatrix, LowRankUpdate

        noise = DiagonalMatrix(0.1 * jnp.ones(500))
        covariance = LowRankUpdate(noise, jnp.ones((500, 2)))
        ql.quaxify(jnp.linalg.solve)(covariance, jnp.ones(500))
        ```

    Woodbury (1950); Hager, Updating the inverse of a matrix (1989).
    """

    base: Any = eqx.field(converter=as_part)
    u: Any = eqx.field(converter=as_part)
    v: Any = eqx.field(converter=as_part)

    CORE: ClassVar[dict[str, int]] = {"base": 2, "u": 2, "v": 2}
    FACTORS = ("base", "u")
    combines_parts = True
    is_sum = True
    OTHERS: ClassVar[dict[str, int] | None] = {"u": 0, "v": 0}

    @checked
    def __init__(self, base: Any, u: Any, v: Any = None) -> None:
        self.base, self.u = base, u
        self.v = u if v is None else v

    def __check_init__(self) -> None:
        check_batches(self)
        m, n = self.base.shape[-2:]
        rank = self.u.shape[-1]
        if self.u.shape[-2] != m or self.v.shape[-2] != n or self.v.shape[-1] != rank:
            raise ValueError(
                f"LowRankUpdate of a base of shape {self.base.shape} takes u of shape (..., {m}, rank) and v "
                f"of shape (..., {n}, rank); found {self.u.shape} and {self.v.shape}."
            )

    @property
    def matrix_shape(self) -> tuple[int, int]:
        m, n = self.base.shape[-2:]
        return (m, n)

    def materialise(self) -> jax.Array:
        whole = self.converted(self.dtype)
        base, u, v = materialise((whole.base, whole.u, whole.v))
        update = jnp.matmul(u, jnp.matrix_transpose(v))
        ndim = self.num_batch + 2
        return lead(base, ndim) + lead(update, ndim)

    @classmethod
    def promote(cls, array: Any, like: Value) -> Any:
        """Uses `array` as the base, with a zero update."""
        assert isinstance(like, LowRankUpdate)
        base = widened(array, like.base)
        if is_value(base) != is_value(like.base) or base.shape != like.base.shape:
            return NotImplemented
        zeros = {name: jnp.zeros(part.shape, part.dtype) for name, part in (("u", like.u), ("v", like.v))}
        return replace_fields(like, base=base, **zeros)

    def widen(self, like: Value) -> "LowRankUpdate | NotImplementedType":
        """Increases the rank to match `like`, by appending columns of zeros to `u` and `v`.

        This doesn't change the matrix: zero columns don't contribute to `u @ v.T`.
        """
        if not isinstance(like, LowRankUpdate):
            return NotImplemented
        rank = self.u.shape[-1]
        more = max(0, like.u.shape[-1] - rank)
        if like.u.shape[-1] < rank:  # here the rank of `like` is going to be increased

            def wide(part: Any) -> Any:
                return jax.ShapeDtypeStruct((*part.shape[:-1], rank), part.dtype)

            parts = {name: part for name in ("u", "v") if not is_value(part := getattr(like, name))}
            like = replace_fields(like, **{name: wide(part) for name, part in parts.items()})

        def pad(part: Any) -> Any:
            return jnp.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, more)])

        padded = self.with_parts({"u": quaxify(pad)(self.u), "v": quaxify(pad)(self.v)})
        return StructuredMatrix.widen(padded, like)

    @property
    def has_solver(self) -> bool:
        base = value_of(self.base)
        # Ignore metadata such as units: it doesn't affect how the base is solved.
        while isinstance(base, AnnotatedArray):
            base = value_of(base.array)
        if isinstance(base, StructuredMatrix):
            return base.has_solver
        # If a stack shares its base, then factorising this once is worthwhile, even if it isn't structured.
        is_shared = self.num_batch > self.base.ndim - 2
        rules = resolver(active_layers.get())
        return is_shared or (is_value(base) and rules.has_rule(jax.lax.linalg.lu_p, base))

    def applied_to(self, x: Any, precision: Any = None, product: Callable[..., Any] = jnp.matmul) -> Any:
        inner = product(jnp.matrix_transpose(self.v), x, precision=precision)
        update = product(self.u, inner, precision=precision)
        y = product(self.base, x, precision=precision)
        ndim = max(update.ndim, y.ndim)
        return lead(y, ndim) + lead(update, ndim)

    def plus(
        self, other: StructuredMatrix, add: Callable[[Any, Any], Any]
    ) -> "LowRankUpdate | NotImplementedType":
        x, y = self.repeated(other.shape), other.repeated(self.shape)
        if x is NotImplemented or y is NotImplemented:
            return NotImplemented
        if not isinstance(y, LowRankUpdate):
            return x.with_added(y, add)
        out = x.with_added(y.full_base(), add)
        y = y.converted(y.dtype)
        return out.with_columns(quaxify(lambda u: add(jnp.zeros_like(u), u))(y.u), y.v)

    def with_columns(self, u: Any, v: Any) -> "LowRankUpdate":
        """Adds `u @ v.T` to this matrix."""

        def joined(part: Any, more: Any) -> Any:
            return jnp.concatenate([self._wide(part), self._wide(more)], -1)

        return replace_fields(self, u=quaxify(joined)(self.u, u), v=quaxify(joined)(self.v, v))

    def with_added(self, array: Any, add: Callable[[Any, Any], Any]) -> "LowRankUpdate":
        """Computes `add(self, array)`, for anything with the same shape, via the base."""
        x = self.converted(self.dtype)
        base = quaxify(add)(self.full_base(), array)
        return replace_fields(x, base=base, u=quaxify(lambda u: add(u, jnp.zeros_like(u)))(x.u))

    def full_base(self) -> Any:
        """Returns the base with all batch axes, and in the matrix's dtype."""
        base = self.converted(self.dtype).base
        return base if base.shape == self.shape else quaxify(jnp.broadcast_to)(base, self.shape)

    def after_diagonal(self, diagonal: Any) -> "LowRankUpdate":
        d = DiagonalMatrix(diagonal)
        return replace_fields(self, base=quaxify(jnp.matmul)(d, self.base), u=d.applied_to(self.u))

    def matmul(self, other: StructuredMatrix, precision: Any = None) -> "LowRankUpdate | NotImplementedType":
        # (base + u vᵀ) y = base y + u (yᵀ v)ᵀ
        if not isinstance(self.base, StructuredMatrix) or self.base.batch != other.batch:
            return NotImplemented
        base = multiply(self.base, other, precision)
        if base is NotImplemented:
            return NotImplemented
        v = inside(lambda y, v: y.transposed().applied_to(v, precision), other, self.v)
        if isinstance(base, LowRankUpdate):  # combine the updates: powers would otherwise be deeply nested
            return base.with_columns(self.u, v)
        return replace_fields(self, base=base, v=v)

    def transposed(self) -> "LowRankUpdate":
        return replace_fields(self, base=quaxify(jnp.matrix_transpose)(self.base), u=self.v, v=self.u)

    def solve(self, b: Any) -> Any:
        rank = self.u.shape[-1]
        # Solve for `u` and `b` at the same time, so that the base is only factorised once.
        both = solve_part(self.base, jnp.concatenate([self._wide(self.u, b.shape[:-2]), b], -1))
        of_u, of_b = both[..., :rank], both[..., rank:]
        v = jnp.matrix_transpose(self._wide(self.v, b.shape[:-2]))
        return of_b - of_u @ jnp.linalg.solve(_plus_identity(v @ of_u), v @ of_b)

    def inverse(self) -> "LowRankUpdate":
        # By the Woodbury formula, the inverse is again a low-rank update, namely of the inverted base.
        base = jnp.linalg.inv(self.base)
        u, v = self._wide(self.u), self._wide(self.v)
        of_u, of_v = jnp.matmul(base, u), jnp.matmul(jnp.matrix_transpose(base), v)
        capacitance = _plus_identity(jnp.matrix_transpose(v) @ of_u)
        # Compute of_u @ inv(capacitance) by solving the transposed system.
        weighted = jnp.linalg.solve(jnp.matrix_transpose(capacitance), jnp.matrix_transpose(of_u))
        return replace_fields(self, base=base, u=-jnp.matrix_transpose(weighted), v=of_v)

    def slogdet(self) -> tuple[Any, Any]:
        capacitance = self._capacitance()
        (sign, log), (base_sign, base_log) = jnp.linalg.slogdet(capacitance), jnp.linalg.slogdet(self.base)
        return sign * jnp.broadcast_to(base_sign, self.batch), log + jnp.broadcast_to(base_log, self.batch)

    def det(self) -> Any:
        of_base = jnp.broadcast_to(jnp.linalg.det(self.base), self.batch)
        return jnp.linalg.det(self._capacitance()) * of_base

    def _capacitance(self) -> Any:
        """Returns the capacitance matrix `I + v.T @ inv(base) @ u`.

        Its small shape, `(rank, rank)`, is what makes the Woodbury formula worthwhile.
        """
        of_u = solve_part(self.base, self._wide(self.u))
        return _plus_identity(jnp.matrix_transpose(self._wide(self.v)) @ of_u)

    def diagonal_elements(self) -> Any:
        n = min(self.matrix_shape)
        u, v = self._wide(self.u)[..., :n, :], self._wide(self.v)[..., :n, :]
        update = jnp.sum(u * v, -1, dtype=self.dtype)  # by default, sums of small integers are int32
        return lead(diagonal_of(self.base), update.ndim) + update

    def _wide(self, part: Any, batch: tuple[int, ...] | None = None) -> Any:
        """Adds any missing batch axes to `part`."""
        return jnp.broadcast_to(part, (*(self.batch if batch is None else batch), *part.shape[-2:]))


def _plus_identity(x: Any) -> Any:
    return x + jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
