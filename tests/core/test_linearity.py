"""Which Values are linear in their leaves, and derivatives that share the pattern of theirs."""

from typing import Any

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.arrays.structured import KroneckerMatrix
from quaxlike.arrays.unitful import Unitful, dimensionless
from quaxlike.arrays.zero import Full, Identity
from quaxlike.core.jaxprs.linearity import is_derivative, is_linear, same_pattern
from tests.samples import Lazy, array


def _sparse(*rows: list[float]) -> ql.SparseArray:
    return ql.SparseArray.from_dense(jnp.array(rows))


def _blocks(blocks: list[list[float]]) -> ql.BlockSparseArray:
    return ql.BlockSparseArray.from_dense(jnp.kron(jnp.array(blocks), jnp.ones((2, 2))), block_size=2)


def _lora() -> ql.LoraArray:
    return ql.LoraArray(jnp.ones((2, 2)), a=jnp.ones((1, 2)), b=jnp.ones((2, 1)))


PATTERNS = Lazy(
    {
        "SparseArray": lambda: (
            _sparse([0.0, 2.0, 0.0], [1.0, 0.0, 3.0]),
            _sparse([5.0, 7.0, 0.0], [0.0, 0.0, 4.0]),
        ),
        "OneHotVector": lambda: (OneHotVector(5.0, 2, length=6), OneHotVector(3.0, 4, length=6)),
        "BlockSparseArray": lambda: (_blocks([[0.0, 1.0], [2.0, 0.0]]), _blocks([[3.0, 0.0], [0.0, 4.0]])),
    }
)
patterns = pytest.mark.parametrize("pattern", PATTERNS)


@pytest.fixture
def x(pattern: str) -> Any:
    return PATTERNS[pattern][0]


@pytest.fixture
def y(pattern: str) -> Any:
    return PATTERNS[pattern][1]


def _kinds(f: Any) -> list[Any]:
    return [f, jax.jit(lambda *args: f(*args))]


class TestIsLinear:
    def test_what_a_wrapper_holds_decides(self):
        wrap = lambda x: NamedArray(Unitful(x, dimensionless), ("a", "b"))
        assert is_linear(wrap(jnp.ones((2, 2))))
        assert is_linear(wrap(_sparse([0.0, 2.0], [1.0, 0.0])))
        assert not is_linear(wrap(_lora()))
        assert not is_linear(_lora())

    def test_a_property_may_say_so(self):
        class Sometimes(ql.ArrayValue):
            array: jax.Array
            flag: bool = eqx.field(static=True)

            @property
            def linear(self):
                return self.flag

            def materialise(self):
                return self.array

        assert is_linear(Sometimes(jnp.ones(2), True))
        assert not is_linear(Sometimes(jnp.ones(2), False))

    @pytest.mark.quick("SparseArray", "OneHotVector")
    @patterns
    def test_patterns(self, x, y):
        z = jax.tree.map(lambda leaf: 2 * leaf if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf + 0, x)
        assert same_pattern(x, z)
        assert is_derivative(z, x)
        assert not same_pattern(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("f", [jax.nn.relu, jax.nn.softplus, lambda x: jnp.logaddexp(x, 0.5 * x)])
@pytest.mark.parametrize(
    "wrap",
    [lambda x: NamedArray(x, ("a", "b")), lambda x: Unitful(x, dimensionless)],
    ids=["named", "unitful"],
)
def test_gradients_by_the_factors_of_what_a_wrapper_holds(f, wrap):
    a = jnp.array([[1.0, -2.0]])

    def loss(a, w):
        out = ql.quaxify(f)(wrap(eqx.tree_at(lambda w: w.a, w, a)))
        return ql.materialise(out).sum()

    w = _lora()
    dense = lambda a: f(jnp.ones((2, 2)) + jnp.ones((2, 1)) @ a).sum()
    with ql.on_materialise("allow"):
        np.testing.assert_allclose(jax.grad(loss)(a, w), jax.grad(dense)(a), rtol=1e-5)


@pytest.mark.slow
def test_a_custom_vjp_of_a_wrapped_product():
    @jax.custom_vjp
    def f(x, y):
        return (x * y).sum()

    f.defvjp(lambda x, y: (f(x, y), (x, y)), lambda res, ct: (ct * res[1], ct * res[0]))
    y = jnp.arange(16.0).reshape(4, 4)
    left, right = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.eye(2)

    def loss(left):
        return ql.quaxify(f)(NamedArray(KroneckerMatrix(left, right), ("a", "b")), y)

    expected = jax.grad(lambda left: (jnp.kron(left, right) * y).sum())(left)
    np.testing.assert_allclose(jax.grad(loss)(left), expected)


class TestSums:
    """`add_any`, by which cotangents are added up."""

    @pytest.mark.slow
    @patterns
    def test_patterns_are_not_added(self, x, y):
        dense, weights = ql.materialise(x), jnp.arange(1.0, x.size + 1).reshape(x.shape)
        f = lambda x, w: (x * w).sum() + (x * x).sum()
        expected = jnp.where(dense != 0, jax.grad(f)(dense, weights), 0.0)
        for run in (*_kinds(ql.quaxify(jax.grad(f))), ql.quaxify(jax.jit(jax.grad(f)))):
            with ql.on_materialise("allow"):
                out = ql.materialise(run(x, weights))
            np.testing.assert_allclose(jnp.where(dense != 0, out, 0.0), expected)

    @pytest.mark.quick(1)
    @patterns
    def test_other_patterns_make_a_dense_sum(self, x, y):
        add = ql.quaxify(jax.interpreters.ad.add_jaxvals)
        dense_x, dense_y = map(np.asarray, jax.jit(ql.materialise)((x, y)))
        for run in _kinds(add):
            with ql.on_materialise("allow"):
                out = run(x, y)
            np.testing.assert_allclose(ql.materialise(out), dense_x + dense_y)


class TestCustomDerivatives:
    @pytest.mark.slow
    @patterns
    def test_cotangents_of_another_pattern(self, x, y):
        @jax.custom_vjp
        def f(x, y):
            return (x.sum() * y).sum()

        f.defvjp(
            lambda x, y: (f(x, y), (x, y)),
            lambda res, ct: (ct * res[1], ct * res[0]),  # not the derivative, but known
        )

        def loss(x, y):
            return ql.quaxify(f)(x, y)

        kept = ql.materialise(x) != 0
        with ql.on_materialise("allow"):
            for run in _kinds(eqx.filter_grad(loss)):
                out = ql.materialise(eqx.combine(run(x, y), x))
                np.testing.assert_allclose(out, jnp.where(kept, ql.materialise(y), 0.0))

    @pytest.mark.slow
    @patterns
    def test_cotangents_of_the_same_pattern_keep_their_type(self, x, y):
        @jax.custom_vjp
        def f(x):
            return (x * 3.0).sum()

        f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * 2.0 * x,))
        with ql.on_materialise("error"):
            for g in (f, jax.jit(f)):
                for run in _kinds(eqx.filter_grad(lambda x, g=g: ql.quaxify(g)(x))):
                    out = eqx.combine(run(x), x)
                    np.testing.assert_allclose(ql.materialise(out), 2.0 * ql.materialise(x))

    @pytest.mark.slow
    @patterns
    def test_tangents_of_another_pattern(self, x, y):
        @jax.custom_jvp
        def f(x, y):
            return x * 2.0

        f.defjvp(lambda primals, tangents: (primals[0] * 2.0, primals[1] * 3.0))

        def run(x, y):
            moving, still = eqx.partition(x, eqx.is_inexact_array)
            call = lambda moving: ql.materialise(ql.quaxify(f)(eqx.combine(moving, still), y))
            return jax.jvp(call, (moving,), (moving,))[1]

        with ql.on_materialise("allow"):
            for each in _kinds(run):
                np.testing.assert_allclose(each(x, y), 3.0 * ql.materialise(y))

    def test_units_inside_of_names(self):
        @jax.custom_vjp
        def f(x):
            return x * x

        f.defvjp(lambda x: (x * x, x), lambda x, ct: (2.0 * ct * x,))

        def loss(array):
            x = NamedArray(Unitful(array, "m"), ("a",))
            return ql.quaxify(f)(x).array.array.sum()

        np.testing.assert_allclose(jax.grad(loss)(jnp.arange(3.0)), 2.0 * jnp.arange(3.0))


class Doubled(ql.ArrayValue):
    array: jax.Array
    linear = True

    def materialise(self):
        return 2 * self.array


class Pair(ql.ArrayValue):
    a: jax.Array
    b: jax.Array
    linear = True

    def materialise(self):
        return self.a + self.b


_NUMBERS = np.arange(9.0).reshape(3, 3)
MATRIX = array(_NUMBERS)
BY_ELEMENTS = {
    "Full": Full(array(1.5), (3, 3)),
    "Doubled": Doubled(MATRIX),
    "Pair": Pair(MATRIX, array(_NUMBERS.T)),
    "of names": NamedArray(Doubled(MATRIX), ("a", "b")),
}


class TestLeavesThatAreNotElements:
    """A leaf that is repeated, scaled or added to another: its cotangent is not that of an element."""

    @pytest.mark.slow
    @pytest.mark.parametrize("x", BY_ELEMENTS.values(), ids=BY_ELEMENTS)
    def test_a_backward_function_sees_the_cotangent(self, x):
        @jax.custom_vjp
        def f(x):
            return x * 1.0

        f.defvjp(lambda x: (f(x), x), lambda x, ct: (jnp.sin(ct) * x,))  # not the derivative, but known
        for g in (f, jax.jit(f)):
            loss = lambda x, g=g: jnp.sum(g(x) * MATRIX.T)
            expected = eqx.filter_grad(lambda x, loss=loss: loss(ql.materialise(x)))(x)
            for run in _kinds(eqx.filter_grad(lambda x, loss=loss: ql.quaxify(loss)(x))):
                assert eqx.tree_equal(run(x), expected, rtol=1e-5)
            inside = ql.quaxify(jax.grad(loss))(x)
            np.testing.assert_allclose(ql.materialise(inside), jax.grad(loss)(ql.materialise(x)), rtol=1e-5)

    @pytest.mark.quick("of names")
    @pytest.mark.parametrize("x", BY_ELEMENTS.values(), ids=BY_ELEMENTS)
    def test_a_linear_solve(self, x):
        a = jnp.eye(3) + 0.1 * MATRIX
        solve = lambda b: lax.custom_linear_solve(
            lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), lambda _, b: jnp.linalg.solve(a.T, b)
        )
        loss = lambda b: jnp.sum(jnp.asarray(solve(b)) * MATRIX)
        expected = eqx.filter_grad(lambda b: loss(ql.materialise(b)))(x)
        assert eqx.tree_equal(eqx.filter_grad(lambda b: ql.quaxify(loss)(b))(x), expected, rtol=1e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("x", BY_ELEMENTS.values(), ids=BY_ELEMENTS)
    def test_a_checkpointed_loop(self, x):
        def loss(x):
            step = lambda carry: (carry[0] + 1, 2 * carry[1])
            last = eqxi.while_loop(lambda carry: carry[0] < 3, step, (0, x), kind="checkpointed", max_steps=4)
            return jnp.sum(last[1] * MATRIX)

        expected = eqx.filter_grad(lambda x: loss(ql.materialise(x)))(x)
        assert eqx.tree_equal(eqx.filter_grad(lambda x: ql.quaxify(loss)(x))(x), expected, rtol=1e-5)

    def test_elements_in_other_places_keep_their_type(self):
        class Transposed(ql.ArrayValue):
            array: jax.Array
            linear = True

            def materialise(self):
                return self.array.T

        seen = []

        @jax.custom_vjp
        def f(x):
            return x

        f.defvjp(lambda x: (x, None), lambda _, ct: (seen.append(type(ct.quax_value)), (ct,))[1])
        jax.grad(lambda array: ql.quaxify(f)(Transposed(array)).array.sum())(MATRIX)
        assert seen == [Transposed]


@pytest.mark.slow
def test_a_linear_solve_for_a_sparse_right_hand_side():
    """Its places are not solved for."""
    b = _sparse([0.0, 2.0], [1.0, 0.0])
    a = jnp.array([[2.0, 1.0], [0.0, 4.0]])
    solve = lambda b: lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), lambda _, b: jnp.linalg.solve(a.T, b)
    )
    with ql.on_materialise("allow"):
        np.testing.assert_allclose(ql.materialise(ql.quaxify(solve)(b)), jnp.linalg.solve(a, b.materialise()))


@pytest.mark.parametrize(
    "make", [lambda: _sparse([0, 2], [1, 0]), lambda: Identity(2, int)], ids=["sparse", "identity"]
)
def test_derivatives_by_integers(make):
    """They have none, and JAX says so."""
    x, f = make(), lambda x: (x * 2).sum()
    with ql.on_materialise("allow"):
        assert ql.quaxify(lambda x: jax.vjp(f, x)[0])(x) == f(ql.materialise(x))
        halved = lambda x: f(x).astype(jnp.float32) / 2.0
        assert ql.quaxify(jax.grad(halved, allow_int=True))(x).dtype == jax.dtypes.float0
