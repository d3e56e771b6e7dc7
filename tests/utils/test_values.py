"""The helpers with Values: as pytrees outside of `quaxify`, and inside of it."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.utils import (
    HasLensFields,
    LensField,
    NotJaxCompatibleError,
    dataclass,
    is_traced,
    jit,
    kahan_summation,
    key_chain,
    linearize,
    no_jax_tracing,
    non_differentiable,
    sequential_vmap_with_vjp,
    tree_concat,
    tree_map,
    tree_scatter_set,
    tree_stack,
    tree_structure,
    tree_where_broadcast_last,
    tree_zeros_like,
    vectorize,
)
from tests.primitives.jaxprs import names
from tests.samples import array
from tests.strict import Strict, StrictPair, strict, strict_pair

X = array(np.arange(1.0, 7.0).reshape(3, 2))
MAKERS = [strict, strict_pair]


def assert_value(found, cls, expected):
    """A `found` of the class, which cannot have been materialised."""
    assert type(found) is cls
    np.testing.assert_allclose(found.dense(), expected, rtol=1e-6)


# As pytrees


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_tree_functions_take_values_apart(make):
    cls = type(make(X))
    assert_value(tree_stack(make(X), make(2 * X)), cls, [X, 2 * X])
    assert_value(tree_concat(make(X), make(X[:1])), cls, jnp.concatenate([X, X[:1]]))
    assert_value(tree_zeros_like(make(X)), cls, 0 * X)
    accept = jnp.array([True, False, True])
    chosen = tree_where_broadcast_last(accept, make(X), make(-X))
    assert_value(chosen, cls, jnp.where(accept[:, None], X, -X))
    written = tree_scatter_set(make(X), make(X[:1]), jnp.array([2]), {})
    assert_value(written, cls, X.at[2].set(X[0]))
    assert_value(tree_structure(make(X)).unflatten(jtu.tree_leaves(make(2 * X))), cls, 2 * X)


@pytest.mark.slow
def test_stacked_values_are_scanned_over():
    weights = [strict_pair(i * jnp.eye(2)) for i in (1.0, 2.0, 3.0)]
    apply = ql.quaxify(lambda x, w: x @ w)
    step = lambda x, w: (apply(x, w).dense(), None)
    out, _ = jax.lax.scan(step, X, tree_stack(*weights))
    np.testing.assert_allclose(out, 6 * X)


@pytest.mark.slow
def test_stacked_lora_arrays():
    layers = [ql.LoraArray(i * jnp.eye(2), jnp.full((1, 2), 0.1 * i), jnp.ones((2, 1))) for i in (1.0, 2.0)]
    stacked = tree_stack(*layers)
    assert type(stacked) is ql.LoraArray
    assert (stacked.shape, stacked.a.shape) == ((2, 2, 2), (2, 1, 2))
    apply = ql.quaxify(lambda w, x: w @ x)
    out, _ = jax.lax.scan(lambda x, w: (apply(w, x), None), jnp.ones(2), stacked)
    np.testing.assert_allclose(out, apply(layers[1], apply(layers[0], jnp.ones(2))), rtol=1e-6)
    for x, y in zip(layers, [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in (0, 1)], strict=True):
        assert eqx.tree_equal(x, y)


def test_values_as_leaves():
    tree = {"a": strict(X), "b": X, "c": None}
    out = tree_map(lambda leaf: type(leaf).__name__, tree, is_leaf=ql.is_value)
    assert out == {"a": "Strict", "b": type(X).__name__, "c": None}
    both = tree_map(lambda x, y: (x, y), [strict(X)], [X], is_leaf=ql.is_value)
    assert type(both[0][0]) is Strict


def test_values_that_differ_in_their_statics_do_not_stack():
    with pytest.raises(ValueError, match=r"(?s)Strict"):
        tree_stack(Strict(X, "a"), Strict(X, "b"))


@pytest.mark.slow
def test_sums_of_values():
    total, lost = kahan_summation(strict_pair(1e8 + X), strict_pair(X), strict_pair(-1e8 - X))
    assert type(total) is type(lost) is StrictPair


@dataclass
class Layer(HasLensFields):
    w: LensField[Any]


@pytest.mark.slow
def test_dataclasses_and_lenses_with_values():
    layer = Layer(strict(X))
    assert layer == Layer(strict(X))
    assert_value(Layer.w.update(layer, lambda w: jax.tree.map(lambda x: 2 * x, w)).w, Strict, 2 * X)
    np.testing.assert_allclose(Layer.w.array.set(layer, -X).w.dense(), -X)
    out = ql.quaxify(lambda layer, x: Layer(-layer.w).w @ x)(layer, X.T)
    assert_value(out, Strict, -X @ X.T)


class Scaled(HasLensFields, ql.ArrayValue):
    array: LensField[jax.Array]
    scale: LensField[jax.Array]

    def materialise(self):
        return self.array * self.scale


def test_lenses_of_values():
    value = Scaled(X, jnp.float32(2))
    changed = Scaled.scale.set(value, jnp.float32(3))
    np.testing.assert_allclose(ql.materialise(changed), 3 * X)
    np.testing.assert_allclose(ql.materialise(value), 2 * X)
    assert (changed.shape, changed.dtype) == (X.shape, X.dtype)
    doubled = Layer.w.focus(Scaled.array).update(Layer(value), lambda x: 2 * x)
    np.testing.assert_allclose(ql.materialise(doubled.w), 4 * X)


# Inside quaxify


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit, lambda f: lambda *args: jax.vmap(f)(*args)])
def test_jit(make, outer):
    @jit(static_argnames="n")
    def f(w, x, n: int):
        return n * -(w + w) * x

    quaxified = outer(ql.quaxify(lambda w, x: f(w, x, 3)))
    assert_value(quaxified(make(X), X), type(make(X)), -6 * X * X)


@pytest.mark.slow
def test_keys():
    @ql.quaxify
    def f(w, rng):
        keys = key_chain(rng, 2)
        return w + jax.random.normal(next(keys)[0], w.shape), next(keys)

    rng = jax.random.key(0)
    chain = key_chain(rng, 2)
    expected = X + jax.random.normal(next(chain)[0], X.shape)
    out, key = f(strict(X), rng)
    assert_value(out, Strict, expected)
    assert jnp.all(key == next(chain))
    out, _ = jax.jit(f)(strict(X), rng)
    assert_value(out, Strict, expected)


@pytest.mark.slow
def test_vectorize():
    @vectorize(signature="(n),(n)->()", excluded=frozenset({"scale"}))
    def dot(w, x, scale=1.0):
        return scale * (x @ w)

    out = ql.quaxify(lambda w, x: dot(x=x, w=w, scale=2.0))(strict(X), X)
    assert_value(out, Strict, 2 * jnp.sum(X * X, -1))


def test_linearize():
    def f(w, x):
        y, jvp = linearize(lambda x: w * x, x)
        return y, jvp(2 * x)

    y, dy = ql.quaxify(f)(strict(X), X)
    assert_value(y, Strict, X * X)
    assert_value(dy, Strict, 2 * X * X)


@pytest.mark.slow
def test_trees():
    f = lambda w: tree_map(lambda a, b: a - 2 * b, {"w": w}, {"w": w})
    assert_value(ql.quaxify(f)(strict_pair(X))["w"], StrictPair, -X)
    joined = ql.quaxify(lambda a, b: tree_concat([a], [b])[0])(strict(X), strict(-X))
    assert_value(joined, Strict, jnp.concatenate([X, -X]))


def test_guards():
    guarded = no_jax_tracing(lambda w: w)
    assert guarded(strict(X)).dense() is X
    with pytest.raises(NotJaxCompatibleError, match="argument 0"):
        ql.quaxify(guarded)(strict(X))
    assert not is_traced(strict(X))
    found: list[bool] = []
    ql.quaxify(lambda w: found.append(is_traced(w)))(strict(X))
    assert found == [True]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_non_differentiable(make):
    cls = type(make(X))
    assert_value(ql.quaxify(non_differentiable)(make(X)), cls, X)
    assert_value(jax.jit(ql.quaxify(lambda w: -non_differentiable(w)))(make(X)), cls, -X)
    loss = ql.quaxify(lambda w, x: jnp.sum(non_differentiable(w) * x))
    dense_loss = lambda w, x: loss(w, x).dense()
    np.testing.assert_allclose(jax.grad(dense_loss, argnums=1)(make(X), X), X)
    with pytest.raises(NotImplementedError, match="derivative passes through `non_differentiable`"):
        jax.grad(dense_loss)(make(X), X)


# sequential_vmap_with_vjp

product = lambda w, x: -(x @ w) + jnp.ones(2)
sequential = sequential_vmap_with_vjp(product)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
def test_sequential_without_vmap(make, outer):
    w = jnp.arange(4.0).reshape(2, 2)
    assert_value(outer(ql.quaxify(sequential))(make(w), X[0]), type(make(w)), product(w, X[0]))


W = array(np.arange(12.0).reshape(3, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    "mapped",
    [lambda f: jax.vmap(ql.quaxify(f)), lambda f: ql.quaxify(jax.vmap(f))],
    ids=["vmap of quaxify", "quaxify of vmap"],
)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit])
def test_sequential_under_vmap(make, mapped, outer):
    out = outer(mapped(sequential))(make(W), X)
    assert_value(out, type(make(W)), jax.vmap(product)(W, X))
    assert names(mapped(sequential), make(W), X).count("scan") == 1


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_derivatives_of_sequential(make):
    def loss(fun, w, x):
        return jnp.sum(jax.vmap(ql.quaxify(fun))(w, x).dense() ** 2)

    plain = lambda w, x: jnp.sum(jax.vmap(product)(w.dense(), x) ** 2)
    w = make(W)
    for derive in (jax.grad, lambda f: jax.grad(f, argnums=1), lambda f: jax.hessian(f, argnums=1)):
        found = derive(lambda w, x: loss(sequential, w, x))(w, X)
        assert eqx.tree_equal(found, derive(plain)(w, X), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
def test_a_value_closed_over():
    @ql.quaxify
    def f(w, x):
        return jax.vmap(sequential_vmap_with_vjp(lambda x: x @ w))(x)

    w = jnp.arange(4.0).reshape(2, 2)
    assert_value(f(strict(w), X), Strict, X @ w)
    assert_value(jax.jit(f)(strict(w), X), Strict, X @ w)
