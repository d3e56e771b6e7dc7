"""Primitives of Equinox's `create_vprim` under `vmap`: their own derivative and transpose are used."""

from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.structured import DiagonalMatrix
from quaxlike.arrays.unitful import Unitful
from quaxlike.testing import check_program
from tests.samples import Late, Lazy, array

lx, optx = Late("lineax"), Late("optimistix")

D = array([2.0, 3.0, 4.0])
B = array(np.arange(1.0, 7.0).reshape(2, 3))
SYSTEM = array([[4.0, 1.0, 0.0], [1.0, 5.0, 1.0], [0.0, 1.0, 6.0]])

MATRICES = {
    "DiagonalMatrix": (DiagonalMatrix, jnp.diag),
    "LoraArray": (
        lambda d: ql.LoraArray(SYSTEM, d[None], jnp.ones((3, 1))),
        lambda d: SYSTEM + jnp.outer(jnp.ones(3), d),
    ),
    "NamedArray": (lambda d: NamedArray(SYSTEM * d, ("a", "a")), lambda d: SYSTEM * d),
}


def _solve(matrix: Any, b: Any, solver: Any) -> Any:
    return lx.linear_solve(lx.MatrixLinearOperator(matrix), b, solver).value


MAPPED = {
    "closure": lambda m, b, solver: jax.vmap(lambda b: _solve(m, b, solver))(b),
    "twice": lambda m, b, solver: jax.vmap(jax.vmap(lambda b: _solve(m, b, solver)))(b[None]),
    "batches": lambda m, b, solver: jax.lax.map(lambda b: _solve(m, b, solver), b, batch_size=2),
}
SOLVERS = Lazy(
    {
        "lu": lambda: lx.AutoLinearSolver(well_posed=True),
        "gmres": lambda: lx.GMRES(rtol=1e-6, atol=1e-6),
    }
)


@pytest.mark.usefixtures("default_promotion")
class TestLinearSolve:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("matrix", "mapped", "solver"),
        [
            ("DiagonalMatrix", "closure", "lu"),
            ("DiagonalMatrix", "closure", "gmres"),
            ("DiagonalMatrix", "twice", "lu"),
            ("DiagonalMatrix", "batches", "lu"),
            ("LoraArray", "closure", "lu"),
            ("LoraArray", "twice", "gmres"),
            ("NamedArray", "closure", "lu"),
        ],
    )
    def test_gradients(self, matrix, mapped, solver):
        make, dense = MATRICES[matrix]
        run = lambda m, b: MAPPED[mapped](m, b, SOLVERS[solver])
        total = lambda x: jnp.sum(jnp.sin(ql.materialise(x)))
        with ql.on_materialise("allow"):
            found = jax.grad(lambda d, b: total(ql.quaxify(run)(make(d), b)), (0, 1))(D, B)
        expected = jax.grad(lambda d, b: total(run(dense(d), b)), (0, 1))(D, B)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)

    def test_gradients_of_a_map_around_the_level(self):
        make, dense = MATRICES["DiagonalMatrix"]
        solve = lambda m, b: ql.materialise(_solve(m, b, SOLVERS["lu"]))
        total = lambda run: lambda d, b: jnp.sum(jnp.sin(jax.vmap(run, (None, 0))(d, b)))
        found = jax.grad(total(lambda d, b: ql.quaxify(solve)(make(d), b)), (0, 1))(D, B)
        expected = jax.grad(total(lambda d, b: solve(dense(d), b)), (0, 1))(D, B)
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5)

    @pytest.mark.slow
    def test_forward_mode_and_jit(self):
        run = lambda m: jnp.sum(MAPPED["closure"](m, B, SOLVERS["lu"]))
        f = jax.jit(lambda d: ql.quaxify(run)(DiagonalMatrix(d)))
        by_hand = -np.sum(B / D**2, 0)
        np.testing.assert_allclose(jax.jacfwd(f)(D), by_hand, rtol=1e-5)
        np.testing.assert_allclose(jax.grad(f)(D), by_hand, rtol=1e-5)

    @pytest.mark.slow
    @pytest.mark.parametrize("solver", ["lu", "cg"])
    def test_a_derivative_keeps_a_type_that_refuses(self, solver):
        """Its tangents are of the type as well, and are solved for like it."""
        method = {"lu": lx.LU(), "cg": lx.CG(rtol=1e-6, atol=1e-6)}[solver]

        def run(matrix, b):
            operator = lx.MatrixLinearOperator(matrix, lx.positive_semidefinite_tag)
            return lx.linear_solve(operator, b, method).value

        report = check_program(run, SYSTEM, B[0], which=["refuses"], transforms=["eager", "jvp", "grad"])
        assert not report.failures, report

    @pytest.mark.slow
    @pytest.mark.parametrize("units", [("m", "s"), ("", "m")])
    def test_a_derivative_of_a_system_with_units(self, units):
        def total(matrix, b):
            x = ql.quaxify(_solve)(Unitful(matrix, units[0]), Unitful(b, units[1]), SOLVERS["lu"])
            return jnp.sum(jnp.sin(x.array))

        found = jax.jit(jax.grad(total, (0, 1)))(SYSTEM, B[0])
        dense = lambda m, b: jnp.sum(jnp.sin(_solve(m, b, SOLVERS["lu"])))
        for x, y in zip(found, jax.jit(jax.grad(dense, (0, 1)))(SYSTEM, B[0]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fixed_point", "root"])
def test_optimistix(method):
    def solve(a):
        if method == "root":
            solver = optx.Newton(rtol=1e-6, atol=1e-6)
            return optx.root_find(lambda v, a: v**2 + v - a, solver, jnp.array(1.0), args=a).value
        solver = optx.FixedPointIteration(rtol=1e-6, atol=1e-6)
        return optx.fixed_point(lambda v, a: a / (1 + v), solver, jnp.array(1.0), args=a).value

    f = lambda a: jnp.sum(ql.materialise(ql.quaxify(jax.vmap(solve))(NamedArray(a, ("a",)))))
    a = jnp.array([1.0, 2.0])
    np.testing.assert_allclose(jax.grad(f)(a), 1 / np.sqrt(1 + 4 * np.asarray(a)), rtol=1e-4)


def _times_jvp(primals: Any, tangents: Any, **_: Any) -> Any:
    (x, y), (_, dy) = primals, tangents
    return times_p.bind(x, y), [dy if isinstance(dy, ad.Zero) else 7.0 * times_p.bind(x, dy)[0]]


def _times_transpose(cts: Any, x: Any, y: Any, **_: Any) -> Any:
    return [None, 3.0 * times_p.bind(x, cts[0])[0]]


# The derivative is wrong, and the transpose, too: each shows that it was used.
times_p = eqxi.create_vprim(
    "times_for_test", lambda x, y: [x * y], lambda x, y: [y], _times_jvp, _times_transpose
)


@pytest.mark.quick("<lambda>-0")
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
def test_rules_of_somebody_elses_primitive(which, outer):
    each = jax.vmap(lambda x, y: times_p.bind(x, y)[0])

    def run(x, y):
        operands = [x, y]
        operands[which] = NamedArray(operands[which], ("a",))
        return jnp.sum(ql.materialise(ql.quaxify(each)(*operands)))

    x = jnp.array([2.0, 5.0])
    by_y = outer(lambda y: run(x, y))
    np.testing.assert_allclose(jax.grad(by_y)(x), 3 * 7 * x)
    np.testing.assert_allclose(jax.jvp(by_y, (x,), (x,))[1], 7 * np.sum(x * x))
    np.testing.assert_allclose(jax.vmap(jax.grad(by_y))(jnp.ones((3, 2))), np.tile(21 * x, (3, 1)))


def test_the_type_is_kept():
    each = jax.vmap(lambda x, y: times_p.bind(x, y)[0])
    x = NamedArray(jnp.ones(2), ("a",))
    out = jax.jit(ql.quaxify(each))(x, jnp.ones(2))
    assert type(out) is NamedArray
    assert out.names == ("a",)
