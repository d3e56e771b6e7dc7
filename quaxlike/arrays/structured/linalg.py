"""Linear systems, inverses and determinants of structured matrices, via `jax.numpy`.

`jnp.linalg.solve` factorises using the primitive `lu`, and then solves using `triangular_solve`, both within
`lax.custom_linear_solve`. Here, `lu` for a structured matrix returns the matrix itself as one of the factors.
This works under every transform, and JAX differentiates the linear system as usual.

Unfortunately, all other functions access individual elements of intermediate results, so these are recognised
as a whole, by the jaxpr of the call: JAX caches traces, so tracing the function again returns the very same
object.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..._checked import checked
from ...core import compat
from ...core.policy import dense
from ...core.quaxify import quaxify
from ...core.rules import register
from ...core.values import ArrayValue, materialise
from ...primitives.classes import REARRANGEMENTS
from .base import StructuredMatrix, inside
from .diagonal import DiagonalMatrix


@checked
def solve(matrix: ArrayLike | ArrayValue, b: ArrayLike | ArrayValue) -> Any:
    """Solves `matrix @ x = b`, using `jnp.linalg.solve` under [`quaxlike.quaxify`][].

    **Arguments:**

    - `matrix`: shape `(*batch, n, n)`, of any type.
    - `b`: shape `(n,)` or `(*batch, n, k)`.

    **Returns:**

    An array with the same shape as `b`.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike.arrays.structured import DiagonalMatrix, solve

        solve(DiagonalMatrix(jnp.array([1.0, 2.0])), jnp.ones(2))
        ```
    """
    _check_square(matrix)
    (*_, n), found = _shape_of(matrix), _shape_of(b)
    if found[-2:][:1] != (n,):
        raise ValueError(f"`b` must be of shape ({n},) or (*batch, {n}, k); found {found}.")
    return quaxify(jnp.linalg.solve)(matrix, b)


@checked
def logdet(matrix: ArrayLike | ArrayValue) -> Any:
    """Computes the logarithm of the determinant's absolute value.

    This is the second result of `jnp.linalg.slogdet` under [`quaxlike.quaxify`][].

    **Arguments:**

    - `matrix`: shape `(*batch, n, n)`, of any type.

    **Returns:**

    An array with shape `batch`: minus infinity for a singular matrix.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike.arrays.structured import KroneckerMatrix, logdet

        # a matrix with shape (1200, 1200)
        logdet(KroneckerMatrix(2 * jnp.eye(30), jnp.eye(40)))
        ```
    """
    _check_square(matrix)
    return quaxify(jnp.linalg.slogdet)(matrix)[1]


def _shape_of(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def _check_square(matrix: Any) -> None:
    shape = _shape_of(matrix)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        raise ValueError(f"`matrix` must be of shape (*batch, n, n); found {shape}.")


# Factors ------------------------------------------------------------------------------------------


class Factored(ArrayValue):
    """The result of `lu` for a structured matrix: L is the identity, and U the matrix itself.

    Of course U isn't triangular, so individual elements aren't meaningful. This is only good for solving
    linear systems, via the primitive `triangular_solve`.
    """

    matrix: StructuredMatrix

    on_materialise = "error"
    to_materialise = (
        "The LU factors of a structured matrix have no elements: factorise `quaxlike.materialise(matrix)` to "
        "look at them."
    )

    def aval(self) -> jax.core.ShapedArray:
        return self.matrix.aval()

    def materialise(self) -> jax.Array:
        raise ValueError(
            f"The LU factors of {type(self.matrix).__name__} are kept as the matrix itself, and have no "
            "elements. Factorise `quaxlike.materialise(matrix)` to look at them; inside `jax.vmap`, put "
            "`quaxify` inside the vmap."
        )

    def leading_axis(self) -> Any:
        return self.matrix.leading_axis()


class FactoredDiagonal(Factored):
    """The result of `lu` for a diagonal matrix, which really is its own U. So elements can be read."""

    on_materialise = None
    to_materialise = ""

    def materialise(self) -> jax.Array:
        return self.matrix.materialise()


def _factored(matrix: StructuredMatrix) -> Factored:
    return (FactoredDiagonal if isinstance(matrix, DiagonalMatrix) else Factored)(matrix)


@register("lu")
def _lu(primitive: Primitive, x: StructuredMatrix, **params: Any):
    m, n = x.matrix_shape
    if m != n:
        return NotImplemented
    # The structure doesn't help to solve linear systems, so factorise the dense matrix.
    if not x.has_solver:
        parts = {name: dense(part, primitive.name) for name, part in x.parts.items()}
        return primitive.bind(materialise(x.with_parts(parts)), **params)
    order = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (*x.batch, n))
    return [_factored(x), order, order]


@register([*REARRANGEMENTS, "gather", "dynamic_slice", "concatenate"])
def _move(primitive: Primitive, x: Factored, *rest: ArrayLike, **params: Any):
    """Transposes, reshapes or slices batch axes, via the matrix."""
    out = quaxify(primitive.bind)(x.matrix, *rest, **params)
    return _factored(out) if isinstance(out, StructuredMatrix) else NotImplemented


@register("triangular_solve")
def _solve_factored(x: Factored, b: ArrayLike, *, lower: bool, unit_diagonal: bool, **params: Any):
    # The system with L, i.e. the identity.
    if lower and unit_diagonal:
        return jnp.asarray(b)
    return NotImplemented if lower or unit_diagonal else _solve(x.matrix, b, **params)


@register("triangular_solve")
def _solve_diagonal(x: DiagonalMatrix, b: ArrayLike, *, lower: bool, unit_diagonal: bool, **params: Any):
    return jnp.asarray(b) if unit_diagonal else _solve(x, b, **params)


def _solve(matrix: StructuredMatrix, b: Any, *, left_side: bool, transpose_a: bool, conjugate_a: bool) -> Any:
    def solved(a: StructuredMatrix, b: Any) -> Any:
        a = a.each(lambda part, _: jnp.conj(part)) if conjugate_a else a
        # x a = b is equivalent to aᵀ xᵀ = bᵀ.
        a = a.transposed() if transpose_a == left_side else a
        return a.solve(b) if left_side else jnp.matrix_transpose(a.solve(jnp.matrix_transpose(b)))

    return inside(solved, matrix, b)


# Functions recognised as a whole ------------------------------------------------------------------

_LAST_AXES = ({"axis1": -2, "axis2": -1}, {"offset": 0, "axis1": -2, "axis2": -1})

# Implementations of jitted functions, and the keyword arguments they may be called with.
_FUNCTIONS: dict[str, tuple[Any, Callable[[StructuredMatrix], Any], tuple[dict[str, Any], ...]]] = {
    "inv": (jnp.linalg.inv, lambda x: x.inverse(), ({},)),
    "slogdet": (jnp.linalg.slogdet, lambda x: x.slogdet(), ({},)),
    "det": (jnp.linalg.det, lambda x: x.det(), ({},)),
    "diagonal": (jnp.diagonal, lambda x: x.diagonal_elements(), ({}, *_LAST_AXES)),
    "trace": (jnp.trace, lambda x: jnp.sum(x.diagonal_elements(), -1), ({}, *_LAST_AXES)),
}


@register("jit")
def _call(x: StructuredMatrix, *, name: str, jaxpr: Any, **params: Any):
    fun, of_matrix, keywords = _FUNCTIONS.get(name, (None, None, ()))
    m, n = x.matrix_shape
    solves = name in ("inv", "slogdet", "det")
    if fun is None or of_matrix is None or (solves and (m != n or not x.has_solver)):
        return NotImplemented
    if not any(_is_call_of(fun, kwargs, jaxpr, x) for kwargs in keywords):
        return NotImplemented
    if not solves:
        return [inside(of_matrix, x)]
    # Integers are converted to floating point. Linear systems can't be solved in half precision.
    dtype = jaxpr.out_avals[0].dtype
    dtype = dtype if dtype.itemsize > 2 else jnp.float32
    if not x.converts_by_parts(dtype):
        return NotImplemented
    out = inside(of_matrix, x.converted(dtype))
    outs = out if isinstance(out, tuple) else (out,)

    def cast(x: Any, aval: Any) -> Any:
        return x if x.dtype == aval.dtype else quaxify(lambda x: x.astype(aval.dtype))(x)

    return [cast(x, aval) for x, aval in zip(outs, jaxpr.out_avals, strict=True)]


# Functions with derivatives accessing elements of the LU factors (ours have none), and their number of
# results. Importing `jax.scipy.linalg` is slow, so only do it when needed.
_OF_FACTORS: dict[str, tuple[Callable[[], Any], int]] = {
    "det": (lambda: jnp.linalg.det, 1),
    "lu_factor": (lambda: jax.scipy.linalg.lu_factor, 2),
}


@register("jit")
def _call_of_derivative(
    primitive: Primitive, x: StructuredMatrix, *rest: ArrayLike | ArrayValue, **params: Any
):
    """Materialises the matrix in the derivative of a function in `_OF_FACTORS`.

    JAX stages this derivative as a function with the same source. It differs from the function itself by
    tangents amongst its operands, or more results.
    """
    fun, n = _OF_FACTORS.get(params["name"], (None, 0))
    jaxpr = params["jaxpr"]
    if fun is None or not (rest or len(jaxpr.out_avals) > n):
        return NotImplemented
    if _source(jaxpr) != _source(fun().trace(x.aval()).jaxpr):
        return NotImplemented
    x = dense(x, params["name"], hint="Its derivative reads elements of the LU factors of a dense matrix.")
    return quaxify(functools.partial(primitive.bind, **params))(x, *rest)


def _source(jaxpr: Any) -> Any:
    """Returns the part of a jitted function preserved by transforms, which rewrite its jaxpr."""
    return compat.debug_info_of(jaxpr).func_src_info


@register("jit")
def _call_on_factors(x: Factored, *, name: str, jaxpr: Any, **params: Any):
    """Replaces the factors' diagonal by one with the same product, i.e. the determinant.

    Transforms rewrite the jaxpr of this call, so it's recognised by its source. In the result of `lu`, the
    batch axes of every transform come first, so picking one element from each row picks the diagonal.
    """
    diagonal: Any = jnp.diagonal
    like = diagonal.trace(x.aval(), axis1=-2, axis2=-1).jaxpr
    if name != "diagonal" or _source(jaxpr) != _source(like) or jaxpr.out_avals[0].shape != x.shape[:-1]:
        return NotImplemented
    n = x.shape[-1]
    if n == 0:
        return [jnp.zeros(x.shape[:-1], x.dtype)]
    sign, log = inside(lambda x: x.slogdet(), x.matrix)
    # Give all elements the same magnitude, namely the n-th root of the determinant. (Storing the whole
    # determinant in a single element may overflow.)
    size = jnp.broadcast_to(jnp.exp(log / n)[..., None], x.shape[:-1]).astype(x.dtype)
    return [size.at[..., 0].multiply(sign)]


def _is_call_of(fun: Any, kwargs: dict[str, Any], jaxpr: Any, x: ArrayValue) -> bool:
    if not kwargs and x.ndim > 2 and fun in (jnp.diagonal, jnp.trace):
        return False  # by default, these act on the first two axes
    return fun.trace(x.aval(), **kwargs).jaxpr is jaxpr
