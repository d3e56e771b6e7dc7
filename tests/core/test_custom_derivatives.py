"""Functions with custom derivatives: staged or not, their derivatives are those by dense arrays."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.structured import DiagonalMatrix, KroneckerMatrix, LowRankUpdate
from quaxlike.arrays.unitful import Unitful, dimensionless
from quaxlike.arrays.zero import Full
from tests.samples import array

A = array([[1.0, 2.0]])
ONE = array(np.ones((2, 2)))
COLUMN = array(np.ones((2, 1)))


def _lora(a: Any) -> ql.LoraArray:
    return ql.LoraArray(ONE, a, COLUMN)


def _vjp(f: Any, backward: Any) -> Any:
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), x), lambda x, ct: (backward(x, ct),))
    return g


def _jvp(f: Any, forward: Any) -> Any:
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (g(*primals), forward(*tangents)))
    return g


FUNCTIONS = {
    "reversed": _vjp(lambda x: x, lambda _, ct: -ct),
    "scaled": _vjp(lambda x: 2.0 * x, lambda _, ct: 3.0 * ct),
    "tangent": _jvp(lambda x: x, lambda t: 5.0 * t),
    "identity": _jvp(lambda x: x, lambda t: t),
}
NONLINEAR = {
    "LoraArray": _lora,
    "KroneckerMatrix": lambda a: KroneckerMatrix(a, COLUMN),
    "LowRankUpdate": lambda a: LowRankUpdate(DiagonalMatrix(a[0]), COLUMN, a.T),
    "NamedArray of LoraArray": lambda a: NamedArray(_lora(a), ("a", "b")),
}
STAGED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: lax.cond(True, f, f, x),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c + f(x), None), jnp.zeros(2), length=2)[0],
}


def _gradients(f: Any, make: Any, at: Any) -> tuple[Any, Any]:
    """The gradient through a Value, and through its dense array."""
    total = lambda x: jnp.sum(jnp.sin(ql.materialise(x)))
    with ql.on_materialise("allow"):
        found = jax.grad(lambda a: total(ql.quaxify(f)(make(a))))(at)
        return found, jax.grad(lambda a: total(f(ql.materialise(make(a)))))(at)


@pytest.mark.slow
@pytest.mark.parametrize("name", NONLINEAR)
@pytest.mark.parametrize("staged", STAGED)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_type_that_is_not_linear_is_staged(function, name, staged):
    f = STAGED[staged](lambda x: FUNCTIONS[function](x) @ jnp.ones(2))
    found, expected = _gradients(f, NONLINEAR[name], A)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.quick("checkpoint-relu")
@pytest.mark.parametrize("function", [jax.nn.relu, jax.nn.relu6])
@pytest.mark.parametrize("staged", [jax.jit, jax.checkpoint])
def test_a_linear_type_whose_tangent_is_dense(staged, function):
    found, expected = _gradients(staged(function), lambda v: Full(v, (3,)), 1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("staged", [lambda f: f, jax.jit])
def test_a_derivative_that_calls_a_function_whose_tangent_is_dense(staged):
    """As `jnp.i0`, whose derivative is `i1`: what that gives is decided as where it is differentiated."""

    @jax.custom_jvp
    def inner(x):
        return jnp.sin(x)

    @inner.defjvp
    def _(primals, tangents):
        x, t = primals[0], tangents[0]
        return inner(x), t * jnp.cos(x) * jnp.ones(x.shape)

    @jax.custom_jvp
    def outer(x):
        return -jnp.cos(x)

    @outer.defjvp
    def _(primals, tangents):
        return outer(primals[0]), tangents[0] * inner(primals[0])

    run = lambda v: ql.materialise(ql.quaxify(staged(outer))(Full(v, (3, 4)))).sum()
    found = jax.grad(run)(0.7), jax.jit(jax.grad(jax.grad(run)))(0.7)
    np.testing.assert_allclose(found, (12 * np.sin(0.7), 12 * np.cos(0.7)), rtol=1e-5)


def test_a_derivative_that_raises_is_not_needed():
    def forward(t):
        raise NotImplementedError

    f = jax.jit(ql.quaxify(_jvp(lambda x: x, forward)))
    assert type(f(_lora(A))) is ql.LoraArray


@pytest.mark.slow
def test_the_type_is_kept_where_nothing_is_differentiated():
    with ql.on_materialise("error"):
        for f in FUNCTIONS.values():
            assert type(ql.quaxify(f)(_lora(A))) is ql.LoraArray
            stack = jax.vmap(lambda a, f=f: ql.quaxify(f)(_lora(a)))(A[None])
            assert type(stack) is ql.LoraArray


def _int8(scale: Any) -> ql.Int8Array:
    return eqx.tree_at(lambda w: w.scale, ql.Int8Array.quantize(ONE), scale)


@pytest.mark.quick(3)
@pytest.mark.parametrize("rule", [_vjp, _jvp])
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
@pytest.mark.parametrize(("make", "frozen"), [(lambda w: ql.LoraArray(w, A, COLUMN), ONE), (_int8, COLUMN)])
def test_tangents_of_frozen_leaves(make, frozen, outer, rule):
    f = rule(lambda x: 2.0 * x, lambda *ts: 2.0 * ts[-1])
    for run in (ql.quaxify(f), lambda x: 2.0 * ql.materialise(x)):
        with ql.on_materialise("allow"):
            _, tangent = jax.jvp(outer(lambda w, run=run: ql.materialise(run(make(w)))), (frozen,), (frozen,))
        np.testing.assert_array_equal(tangent, np.zeros((2, 2)))


def test_forward_mode_of_a_live_leaf_is_still_refused():
    f = FUNCTIONS["reversed"]
    with ql.on_materialise("allow"), pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda a: ql.materialise(ql.quaxify(f)(_lora(a))), (A,), (A,))


WRAPPED = {
    "names of a unit": lambda a: NamedArray(Unitful(a, "m"), ("a", "b")),
    "names of no unit": lambda a: NamedArray(Unitful(a, dimensionless), ("a", "b")),
    "a unit of names": lambda a: Unitful(NamedArray(a, ("a", "b")), "m"),
    "names of a unit of a diagonal": lambda a: NamedArray(Unitful(DiagonalMatrix(a[0]), "m"), ("a", "b")),
}
PARTIAL = {
    "index": lambda x: x[0],
    "take": lambda x: jnp.take(x, jnp.array([1, 0]), axis=0),
    "product": lambda x: x @ jnp.array([1.0, 2.0]),
}


def _numbers(x: Any) -> Any:
    while isinstance(x, NamedArray | Unitful):
        x = x.array
    return ql.materialise(x)


@pytest.mark.quick("index-names of a unit")
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("function", PARTIAL)
def test_cotangents_of_nested_annotations(function, wrapped):
    run = PARTIAL[function]
    f = _vjp(run, lambda x, ct: jax.vjp(run, x)[1](ct)[0])
    a = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    found = jax.grad(lambda a: jnp.sum(jnp.sin(_numbers(ql.quaxify(f)(WRAPPED[wrapped](a))))))(a)
    expected = jax.grad(lambda a: jnp.sum(jnp.sin(run(_numbers(WRAPPED[wrapped](a))))))(a)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda a: NamedArray(a, ("a", "b")), lambda a: DiagonalMatrix(a[0]), lambda a: _lora(a[:1])]
)
def test_a_backward_function_that_returns_another_dtype(make, dtype):
    f = _vjp(lambda x: 2.0 * x, lambda _, ct: (2.0 * ct).astype(dtype))
    with ql.on_materialise("allow"):
        found = jax.grad(lambda a: jnp.sum(ql.materialise(ql.quaxify(f)(make(a)))))(ONE)
    expected = jax.grad(lambda a: jnp.sum(2.0 * ql.materialise(make(a))))(ONE)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected)


@pytest.mark.slow
def test_an_identity_that_a_branch_widens_keeps_the_type():
    """`eqx.error_if` joins its operand with the result of a callback, which opens the base of an adapter."""
    w = ql.LoraArray(jnp.ones((3, 3)), jnp.ones((1, 3)), jnp.ones((3, 1)))
    check = lambda w: eqx.error_if(w, jnp.sum(jnp.ones(3)) < 0, "no")
    total = lambda f, a: ql.materialise(ql.quaxify(f)(w.replace(a=a))).sum()
    with ql.on_materialise("error"):
        for f in (check, jax.jit(check)):
            assert type(ql.quaxify(f)(w)) is ql.LoraArray
            np.testing.assert_allclose(jax.grad(lambda a, f=f: total(f, a))(w.a), 3 * jnp.ones((1, 3)))


class Quantity(ql.ArrayValue):
    """An array in a power of a unit, which has no dense array."""

    linear = True
    array: Any
    power: int = eqx.field(static=True, default=1)

    def aval(self):
        return jax.typeof(self.array)

    def materialise(self):
        raise ValueError("it refuses")


@ql.register("mul")
def _(x: Quantity, y: Quantity):
    return Quantity(x.array * y.array, x.power + y.power)


@ql.register("mul")
def _(x: jax.Array, y: Quantity):
    return Quantity(x * y.array, y.power)


@ql.register("mul")
def _(x: Quantity, y: jax.Array):
    return Quantity(x.array * y, x.power)


def _plain_and_with_derivatives(f: Any) -> Any:
    """`f` as it is, as a `custom_jvp` and as a `custom_vjp` function, with the derivatives of a product."""
    by_jvp = jax.custom_jvp(f)
    by_jvp.defjvp(lambda primals, tangents: (f(*primals), f(primals[0], tangents[1])))
    by_vjp = jax.custom_vjp(f)
    by_vjp.defvjp(lambda x, y: (f(x, y), (x, y)), lambda res, ct: (ct * res[1], res[0] * ct))
    return f, by_jvp, by_vjp


@pytest.mark.quick("<lambda>-2", "checkpoint-1")
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("stage", [lambda f: f, jax.jit, jax.checkpoint])
def test_the_gradient_of_a_type_without_a_dense_array(stage, levels):
    """It is that of the leaves, in whatever unit the cotangent is."""
    length, number = Quantity(jnp.array([2.0, 3.0])), jnp.array([5.0, 7.0])
    for f in _plain_and_with_derivatives(lambda x, y: x * y):
        run = stage(f)
        for _ in range(levels):
            run = ql.quaxify(run)
        of_square = jax.grad(lambda x: run(jax.lax.stop_gradient(x), x).array.sum())(length)
        assert of_square.power == 1
        np.testing.assert_array_equal(of_square.array, length.array)
        by_number = jax.grad(lambda y: run(length, y).array.sum())(number)
        np.testing.assert_array_equal(by_number, length.array)


@pytest.mark.quick("checkpoint-reversed", "checkpoint-scaled")
@pytest.mark.parametrize("function", ["reversed", "scaled"])
@pytest.mark.parametrize("stage", [jax.jit, jax.checkpoint])
def test_a_number_for_all_elements_inside_of_a_unit(stage, function):
    """Only the number becomes dense, which has one cotangent where the array has several."""

    def f(number: Any, make: Any) -> Any:
        return stage(ql.quaxify(FUNCTIONS[function]))(make(number))

    in_metres = lambda number: Unitful(Full(number, (2, 3)), "m")
    y = f(2.0 * ONE[0, 0], in_metres)
    assert isinstance(y, Unitful)
    assert y.unit == Unitful(1.0, "m").unit
    ways = [(in_metres, lambda y: y.array), (lambda number: jnp.full((2, 3), number), lambda y: y)]
    found, expected = (
        jax.value_and_grad(lambda number: jnp.sum(jnp.sin(as_array(f(number, make)))))(2 * ONE[0, 0])
        for make, as_array in ways
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
