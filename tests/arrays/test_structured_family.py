"""Structured matrices that others write, and what all of them do: quotients, derivatives, nests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.linalg import expm, lu_factor, lu_solve

import quaxlike as ql
from quaxlike.arrays.structured import (
    DiagonalMatrix,
    KroneckerMatrix,
    LowRankUpdate,
    StructuredMatrix,
    TridiagonalMatrix,
)
from quaxlike.testing import check_type
from tests.samples import array, normal

D = array([2.0, 1.0, 4.0, 0.5])
MATRICES = {
    "diagonal": DiagonalMatrix(D),
    "tridiagonal": TridiagonalMatrix(array(0.1 * np.ones(3)), D, array(0.2 * np.ones(3))),
    "kronecker": KroneckerMatrix(array([[2.0, 1.0], [0.0, 1.0]]), array([[1.0, 3.0], [1.0, 1.0]])),
    "low rank": LowRankUpdate(
        DiagonalMatrix(D), jnp.asarray(normal(4, 1)), jnp.asarray(normal(4, 1, seed=1))
    ),
}


class CornerMatrix(StructuredMatrix):
    """A type of somebody else: a diagonal, and the two corners beside it."""

    middle: jax.Array
    corners: jax.Array  # the upper, the lower

    linear = True
    CORE = {"middle": 1, "corners": 1}  # noqa: RUF012
    FACTORS = ("middle", "corners")
    OTHERS = None

    @property
    def matrix_shape(self):
        n = self.middle.shape[-1]
        return (n, n)

    def places(self):
        n = self.middle.shape[-1]
        return {"middle": (np.arange(n),) * 2, "corners": (np.array([0, n - 1]), np.array([n - 1, 0]))}

    def materialise(self):
        x, out = self.stacked(), jnp.zeros(self.shape, self.dtype)
        for name, place in self.places().items():
            out = out.at[..., *place].set(x.parts[name])
        return out

    def transposed(self):
        return CornerMatrix(self.middle, self.corners[..., ::-1])

    def applied_to(self, x, precision=None):
        return jnp.matmul(self.materialise(), x, precision=precision)

    def solve(self, b):
        return jnp.linalg.solve(self.materialise(), b)

    def inverse(self):
        return jnp.linalg.inv(self.materialise())

    def slogdet(self):
        return jnp.linalg.slogdet(self.materialise())

    def det(self):
        return jnp.linalg.det(self.materialise())

    def diagonal_elements(self):
        return self.middle


CORNERS = CornerMatrix(D, array([1.0, -1.0]))
KEPT = {
    "sum": (lambda x, y: x + x, CornerMatrix),
    "with a diagonal": (lambda x, y: x - y["diagonal"], CornerMatrix),
    "a diagonal first": (lambda x, y: y["diagonal"] - x, CornerMatrix),
    "with an update": (lambda x, y: x - y["low rank"], LowRankUpdate),
    "an update first": (lambda x, y: y["low rank"] - x, LowRankUpdate),
    "product": (lambda x, y: x * x, CornerMatrix),
    "quotient by a number": (lambda x, y: -x / 2.0, CornerMatrix),
    "rows scaled": (lambda x, y: y["diagonal"] @ x, CornerMatrix),
    "columns scaled": (lambda x, y: x @ y["diagonal"], CornerMatrix),
    "with an array": (lambda x, y: x * jnp.arange(16.0).reshape(4, 4), CornerMatrix),
    "square root": (lambda x, y: jnp.sqrt(abs(x)).astype(jnp.float16), CornerMatrix),
    "slice of a stack": (lambda x, y: jnp.stack([x, 2.0 * x, x])[1:], CornerMatrix),
    "one of a stack": (lambda x, y: jnp.stack([x, 2.0 * x, x])[1], CornerMatrix),
    "sum over a stack": (lambda x, y: jnp.stack([x, 2.0 * x]).sum(0), CornerMatrix),
}


@pytest.mark.quick("sum over a stack")
@pytest.mark.parametrize("program", KEPT)
def test_a_type_of_somebody_else(program):
    fn, kind = KEPT[program]
    dense = ql.materialise(MATRICES)
    with ql.on_materialise("error"):
        out = ql.quaxify(fn)(CORNERS, MATRICES)
    assert isinstance(out, kind)
    np.testing.assert_allclose(ql.materialise(out), fn(CORNERS.materialise(), dense), rtol=1e-5, atol=1e-6)


det, ones = jnp.linalg.det, array(np.ones(4))
DERIVATIVES = {
    "gradient": jax.grad(det),
    "jvp": lambda x: jax.jvp(det, (x,), (x,))[1],
    "vjp": lambda x: jax.vjp(det, x)[1](1.0)[0],
    "linearize": lambda x: jax.linearize(det, x)[1](x),
    "jit": jax.jit(jax.grad(lambda x: 2 * det(x))),
    "jit inside": jax.grad(jax.jit(lambda x: 2 * det(x))),
    "checkpoint": jax.grad(jax.checkpoint(lambda x: det(x) ** 2)),
    "vmap": lambda x: jax.vmap(jax.grad(det))(jnp.stack([x, x])),
    "solve by factors": jax.grad(lambda x: lu_solve(lu_factor(x), ones).sum()),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_inside_of_what_reads_factors(derivative, kind):
    fn, x = DERIVATIVES[derivative], MATRICES[kind]
    out = ql.materialise(ql.quaxify(fn)(x))
    np.testing.assert_allclose(out, fn(x.materialise()), rtol=2e-4, atol=1e-5)
    with (
        ql.on_materialise("error"),
        pytest.raises(ql.MaterialisationError, match=r"LU factors|FactoredDiagonal"),
    ):
        ql.quaxify(fn)(x)


@pytest.mark.slow
def test_the_values_keep_the_structure():
    for x in MATRICES.values():
        with ql.on_materialise("error"):
            stack = ql.quaxify(lambda x: jax.vmap(det)(jnp.stack([x, x])))(x)
            solved = ql.quaxify(lambda x: lu_solve(lu_factor(x), ones))(x)
        np.testing.assert_allclose(stack, [det(x.materialise())] * 2, rtol=1e-5)
        np.testing.assert_allclose(solved, jnp.linalg.solve(x.materialise(), ones), rtol=1e-5, atol=1e-5)


PAIR = array([2.0, 1.0])
SMALL = {  # JAX has determinants in half precision for few rows alone, in closed form
    "diagonal": DiagonalMatrix(PAIR),
    "tridiagonal": TridiagonalMatrix(array(np.ones(1)), PAIR, array(-np.ones(1))),
    "kronecker": KroneckerMatrix(array(2 * np.ones((1, 1))), array([[1.0, 3.0], [1.0, 1.0]])),
    "low rank": LowRankUpdate(DiagonalMatrix(PAIR), array(np.ones((2, 1)))),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("kind", SMALL)
def test_determinants_in_half_precision(kind, dtype):
    half = ql.quaxify(lambda x: x.astype(dtype))(SMALL[kind])
    sign, log = ql.quaxify(jnp.linalg.slogdet)(half)
    out = ql.quaxify(det)(half)
    assert out.dtype == sign.dtype == log.dtype == dtype
    expected = np.linalg.slogdet(np.asarray(half.materialise(), np.float64))
    np.testing.assert_allclose(np.asarray(out, float), expected[0] * np.exp(expected[1]), rtol=0.02)
    np.testing.assert_allclose([np.asarray(sign, float), np.asarray(log, float)], expected, rtol=0.02)


def _nest(depth, rank):
    return functools.reduce(
        lambda x, _: LowRankUpdate(x, jnp.ones((2, rank))), range(depth), DiagonalMatrix(ones[:2])
    )


@pytest.mark.slow
def test_nested_updates_are_unified_level_by_level(monkeypatch):
    """The work for one more level is the same at every depth."""
    calls, widen = [], StructuredMatrix.widen
    monkeypatch.setattr(StructuredMatrix, "widen", lambda *args: calls.append(None) or widen(*args))
    choose = lambda x, y: jax.lax.cond(True, lambda x, y: x, lambda x, y: y, x, y)
    counts = []
    for depth in (3, 6, 9):
        calls.clear()
        x, y = _nest(depth, 1), _nest(depth, 2)
        with ql.on_materialise("error"):
            out = ql.quaxify(choose)(x, y)
        np.testing.assert_array_equal(ql.materialise(out), x.materialise())
        counts.append(len(calls))
    assert counts[2] < 5 * counts[0]


@pytest.mark.slow
def test_powers_of_an_update_are_updates_of_the_same_base():
    x = MATRICES["low rank"]
    with ql.on_materialise("error"):
        out = ql.quaxify(lambda x: x @ x @ (x @ x))(x)
    assert isinstance(out.base, DiagonalMatrix)
    np.testing.assert_allclose(
        out.materialise(), jnp.linalg.matrix_power(x.materialise(), 4), rtol=1e-4, atol=1e-4
    )


def test_the_exponential_of_an_update():
    x = LowRankUpdate(DiagonalMatrix(jnp.array([0.1, 0.2])), 0.3 * jnp.ones((2, 1)))
    traced = jax.make_jaxpr(lambda x: ql.materialise(ql.quaxify(expm)(x)))(x)
    assert len(str(traced)) < 1_000_000
    found, expected = jax.jit(ql.quaxify(expm))(x), jax.jit(expm)(x.materialise())
    np.testing.assert_allclose(ql.materialise(found), expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "differ"), [("diagonal", {"rule: div (3)"}), ("low rank", set())])
def test_the_checks_that_users_run(kind, differ):
    """What is not stored is zero, also divided by zero: `x / x` is another array than the dense one's."""
    assert {check.name for check in check_type(MATRICES[kind]).failures} == differ
