import collections
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from quaxlike.utils import NotJaxCompatibleError, dataclass, is_traced, no_jax_tracing, non_differentiable
from tests.samples import array

X = np.arange(1.0, 4.0, dtype=np.float32)


@dataclass
class Data:
    x: Any
    y: Any


# is_traced


@pytest.mark.parametrize(
    "x", [1.0, X, array(np.ones(2)), [X, {"a": array(np.ones(2))}], Data(X, None), "text", None]
)
def test_nothing_traced(x):
    assert is_traced(x) is False


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [0, {"a": x}], lambda x: Data(0, x)])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.linearize, jax.make_jaxpr])
def test_traced(transform, wrap):
    found: list[bool] = []

    def f(x):
        found.append(is_traced(wrap(x)))
        found.append(is_traced(X))
        return jnp.sum(x)

    transform(f, X) if transform is jax.linearize else transform(f)(X if transform is not jax.grad else 1.0)
    assert found == [True, False]


@pytest.mark.parametrize(
    "tree", [{1: 2, "a": 3}, {None: 1, "a": collections.defaultdict(list, {1: 2, "a": 3})}]
)
def test_keys_that_cannot_be_sorted(tree):
    assert not is_traced(tree)
    assert protected_keys(tree) == len(tree)

    def f(x):
        assert is_traced([{**tree, 0.5: [x]}])
        return protected_keys({**tree, 0.5: [x]})

    with pytest.raises(NotJaxCompatibleError, match="argument 0 holds"):
        jax.jit(f)(X)


# no_jax_tracing


@no_jax_tracing
def protected_keys(tree):
    return len(tree)


@no_jax_tracing
def protected(x, *, scale=1.0):
    """Doc."""
    return jax.tree.map(lambda x: np.asarray(x) * scale, x)


def test_concrete_calls_pass():
    np.testing.assert_array_equal(protected(X), X)
    np.testing.assert_array_equal(protected(jnp.asarray(X), scale=2.0), 2 * X)
    np.testing.assert_array_equal(protected(Data(X, 1.0)).x, X)
    assert (protected.__name__, protected.__doc__) == ("protected", "Doc.")
    np.testing.assert_array_equal(jax.jit(lambda: protected(X))(), X)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.jacfwd])
@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda x: protected(x), "argument 0"),
        (lambda x: protected(X, scale=x), "argument 'scale'"),
        (lambda x: protected(Data([X], {"a": x})), "argument 0"),
        (lambda x: protected(functools.partial(jnp.add, x)), "argument 0"),
        (lambda x: protected([lambda: x]), "argument 0"),
        (lambda x: protected(eqx.Partial(jnp.add, x)), "argument 0"),
    ],
)
def test_tracers_in_arguments(transform, call, where):
    with pytest.raises(
        NotJaxCompatibleError, match=rf"protected must not be traced .* {where} holds .*float32"
    ):
        transform(call)(X if transform is jax.vmap else jnp.float32(1))


def test_closed_over_tracers():
    def outer(x):
        @no_jax_tracing
        def inner():
            return x

        return inner()

    with pytest.raises(
        NotJaxCompatibleError, match=r"inner must not be traced .* what it has captured holds"
    ):
        jax.jit(outer)(X)
    np.testing.assert_array_equal(outer(X), X)


def test_tracers_closed_over_by_helpers():
    def outer(x):
        def helper():
            return x

        def between():
            return helper()

        return no_jax_tracing(lambda: between())()

    with pytest.raises(NotJaxCompatibleError, match="what it has captured"):
        jax.jit(outer)(X)


def test_tracers_in_defaults_partials_and_methods():
    @dataclass
    class BoundTree:
        x: Any

        def method(self):
            return self.x

    def default(x):
        return no_jax_tracing(lambda y=x: y)()

    def keyword_default(x):
        def f(*, y=x):
            return y

        return no_jax_tracing(f)()

    def partial(x):
        return no_jax_tracing(functools.partial(jnp.add, x))(1.0)

    def method(x):
        return no_jax_tracing(BoundTree(x).method)()

    for f in (default, keyword_default, partial, method):
        with pytest.raises(NotJaxCompatibleError, match="what it has captured"):
            jax.jit(f)(X)
        f(X)


def test_functions_that_capture_each_other():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n > 0 and even(n - 1)

    assert no_jax_tracing(even)(4) is True


def test_a_variable_that_is_not_assigned_yet():
    def outer():
        @no_jax_tracing
        def f():
            return 1 if True else later

        result = f()
        later = 2
        return result + later

    assert outer() == 3


def test_callables_without_a_name():
    class Callable:
        def __call__(self, x):
            return x

        def __repr__(self):
            return "Callable()"

    assert no_jax_tracing(Callable())(3) == 3
    with pytest.raises(NotJaxCompatibleError, match=r"^Callable\(\) must not be traced"):
        jax.jit(no_jax_tracing(Callable()))(X)
    with pytest.raises(NotJaxCompatibleError, match=r"^functools.partial"):
        jax.jit(no_jax_tracing(functools.partial(jnp.add, 1.0)))(X)


def test_methods():
    class Store:
        @no_jax_tracing
        def save(self, x):
            return x

    assert Store().save(3) == 3
    with pytest.raises(NotJaxCompatibleError, match=r"Store.save must not be traced .* argument 1"):
        jax.jit(lambda x: Store().save(x))(X)


# non_differentiable


def test_is_the_identity():
    data = Data(jnp.asarray(X), {"n": jnp.arange(3), "s": "text", "f": 2.0, "np": X})
    assert non_differentiable(data) == data
    assert jax.jit(non_differentiable)(data.x).dtype == jnp.float32
    key = jax.random.key(0)
    assert non_differentiable(key) is key
    np.testing.assert_array_equal(jax.vmap(non_differentiable)(data.x), X)


def blocked(x):
    return jnp.sum(non_differentiable(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "differentiate",
    [
        lambda: jax.grad(blocked)(X),
        lambda: jax.value_and_grad(blocked)(X),
        lambda: jax.jit(jax.grad(blocked))(X),
        lambda: jax.grad(jax.jit(blocked))(X),
        lambda: jax.grad(jax.checkpoint(blocked))(X),
        lambda: jax.vmap(jax.grad(blocked))(X[None]),
        lambda: jax.grad(lambda x: jax.vmap(blocked)(x).sum())(X[None]),
        lambda: jax.grad(lambda x: lax.scan(lambda c, xi: (c + blocked(xi), None), 0.0, x)[0])(X),
        lambda: jax.grad(lambda x: lax.cond(True, blocked, jnp.sum, x))(X),
        lambda: jax.jvp(blocked, (X,), (X,)),
        lambda: jax.jit(lambda x: jax.jvp(blocked, (x,), (x,)))(X),
        lambda: jax.linearize(blocked, X)[1](X),
        lambda: jax.vjp(blocked, X)[1](1.0),
        lambda: jax.jacfwd(blocked)(X),
        lambda: jax.jacrev(blocked)(X),
        lambda: jax.hessian(lambda x: blocked(x**2))(X),
        lambda: jax.grad(lambda x: blocked(jax.grad(lambda x: jnp.sum(x**2))(x)))(X),
        lambda: jax.grad(lambda c: jnp.abs(non_differentiable(c)))(1 + 1j),
        lambda: jax.grad(lambda d: jnp.sum(non_differentiable(d).x))(Data(X, X)),
    ],
)
def test_derivatives_raise(differentiate):
    with pytest.raises(NotImplementedError, match="derivative passes through `non_differentiable`"):
        differentiate()


STOPPED = lambda x: jnp.sum(x**2 * lax.stop_gradient(non_differentiable(x)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differentiate", "expected"),
    [
        (lambda: jax.grad(lambda x, y: jnp.sum(x * non_differentiable(y)))(X, 3 * X), 3 * X),
        (lambda: jax.jvp(lambda x: jnp.sum(x * non_differentiable(2 * X)), (X,), (X,))[1], 28.0),
        (lambda: jax.grad(STOPPED)(X), 2 * X**2),
        (lambda: jax.jit(jax.grad(STOPPED))(X), 2 * X**2),
        (lambda: jax.grad(jax.jit(STOPPED))(X), 2 * X**2),
        (lambda: jax.grad(jax.checkpoint(STOPPED))(X), 2 * X**2),
        (lambda: jax.grad(lambda x: jax.vmap(STOPPED)(x).sum())(X[None])[0], 2 * X**2),
        (lambda: jax.grad(lambda x: lax.scan(lambda c, xi: (c + STOPPED(xi), None), 0.0, x)[0])(X), 2 * X**2),
        (lambda: jax.linearize(STOPPED, X)[1](X), 2 * np.sum(X**3)),
        (lambda: jax.jit(lambda x: jax.jvp(STOPPED, (x,), (x,))[1])(X), 2 * np.sum(X**3)),
        (lambda: jax.hessian(STOPPED)(X), np.diag(2 * X)),
        (
            lambda: jax.grad(lambda x: jnp.sum(x) + 0 * non_differentiable(jnp.sum(lax.stop_gradient(x))))(X),
            X**0,
        ),
    ],
)
def test_no_false_alarm(differentiate, expected):
    np.testing.assert_allclose(differentiate(), expected, rtol=1e-6)


@pytest.mark.slow
def test_leaves_are_told_apart():
    used = lambda data, other: jnp.sum(data.x * non_differentiable(Data(data.x, other)).y)
    np.testing.assert_array_equal(jax.grad(used)(Data(X, 0.0), 2.0).x, [2, 2, 2])
    with pytest.raises(NotImplementedError, match="non_differentiable"):
        jax.grad(used, argnums=1)(Data(X, 0.0), 2.0)


def test_integers_have_no_derivative_to_forbid():
    grad = jax.grad(lambda n, x: x * non_differentiable(n).astype(float), argnums=1)(jnp.arange(3)[1], 2.0)
    assert float(grad) == 1.0


def test_forward_mode_outside_of_jit_raises_at_once():
    # The tangent is computed before what stops it is known.
    with pytest.raises(NotImplementedError, match="non_differentiable"):
        jax.jvp(STOPPED, (X,), (X,))


def test_value_is_given_where_a_derivative_would_raise():
    value, _ = jax.vjp(blocked, X)
    assert float(value) == 6.0
    value, _ = jax.linearize(blocked, X)
    assert float(value) == 6.0
