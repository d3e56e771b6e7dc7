"""custom_dce: how functions and rules are called, what they may return, and what is refused."""

import collections
import copy
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import UnexpectedTracerError

from quaxlike.primitives import custom_dce
from tests.samples import array, wrong_types

from .test_custom_dce import live

X, Y = array([0.3, -0.7, 1.1]), array([2.0, 0.5, -1.5])


def _asked(f):
    """Has the rule of `f` note what it is called with, and compute by the function."""
    calls = []

    @f.def_dce
    def _(*args):
        calls.append(args)
        statics = [args[0]] if f.static_argnums else []
        return f.fun(*statics, *args[1 + len(statics) :])

    return calls


# -------------------------------------------------------------------------------------------------
# Arguments
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static_argnums", [(2, 0), (-2, 0), (2, -4), [2, 0]])
def test_static_arguments_come_first_in_their_order(static_argnums):
    seen = []
    f = custom_dce(lambda g, x, name, y: (g(x), jnp.exp(y)), static_argnums=static_argnums)

    @f.def_dce
    def _(name, g, used, x, y):
        seen.append((name, g, used))
        return g(x) if used[0] else None, jnp.exp(y) if used[1] else None

    assert "exp" not in live(lambda x, y: f(jnp.sin, x, "a", y)[0], X, Y)
    assert seen == [("a", jnp.sin, (True, False))]


def test_one_static_argument_as_an_integer():
    f = custom_dce(lambda x, n: (n * x, jnp.exp(x)), static_argnums=1)
    f.def_dce(lambda n, used, x: (n * x, None))
    np.testing.assert_allclose(jax.jit(lambda x: f(x, 3)[0])(X), 3 * X)
    np.testing.assert_allclose(jax.jit(lambda x: f(n=4, x=x)[0])(X), 4 * X)


@pytest.mark.slow
def test_keywords_and_defaults_become_positions():
    f = custom_dce(lambda x, y=2.0, z=3.0: (x * y, jnp.exp(x) * z))

    @f.def_dce
    def _(used, x, y, z):
        return (x * y if used[0] else None, jnp.exp(x) * z if used[1] else None)

    np.testing.assert_allclose(jax.jit(lambda x: f(x)[0])(X), 2 * X)
    np.testing.assert_allclose(jax.jit(lambda x: f(z=1.0, x=x)[1])(X), jnp.exp(X), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(lambda x, y: f(x, y=y)[0])(X, Y), X * Y)
    assert "exp" not in live(lambda x, y: f(x, y=y)[0], X, Y)


def test_defaults_that_have_no_position():
    def scaled(x, *, by=3.0):
        return x * by, jnp.exp(x)

    for function in (scaled, partial(scaled, by=3.0)):
        f = custom_dce(function)
        f.def_dce(lambda used, x: (3 * x, None))
        np.testing.assert_allclose(f(X)[0], 3 * X)
        np.testing.assert_allclose(jax.jit(lambda x, f=f: f(x)[0])(X), 3 * X)
        assert "exp" not in live(lambda x, f=f: f(x)[0], X)
        with pytest.raises(TypeError, match="by can be given by keyword only"):
            f(X, by=4.0)


@pytest.mark.parametrize("keys", [(1, "a"), (None, "a")])
@pytest.mark.parametrize("cls", [dict, partial(collections.defaultdict, list)])
def test_keys_that_cannot_be_sorted(keys, cls):
    tree = cls(zip(keys, (2.0, 3.0), strict=True))

    def outer(x):
        f = custom_dce(lambda x, tree: (x, jnp.exp(x)), static_argnums=1)
        held = copy.copy(tree) | {0.5: [x]}

        @f.def_dce
        def _(tree, used, x, *, more=tree):
            assert list(held) == [*keys, 0.5]
            return held[0.5][0] * tree[keys[0]] * more[keys[1]], None

        return f(x, tree)[0]

    np.testing.assert_allclose(jax.jit(outer)(X), 6 * X)
    f = custom_dce(lambda x, tree: (x, tree), static_argnums=1)
    f.def_dce(lambda tree, used, x: (x, tree))
    with pytest.raises(UnexpectedTracerError, match=r"argument 1 of custom_dce function .* is static"):
        jax.jit(lambda x: f(x, tree | {0.5: [x]})[0])(X)


def test_classes_of_objects_that_become_arrays():
    class Constant:
        value = 2.0

        def __jax_array__(self):
            return jnp.float32(self.value)

    f = custom_dce(lambda x, cls: (x * cls(), jnp.exp(x)))
    f.def_dce(lambda used, x, cls: (x * cls.value * Constant.value / 2, None))
    np.testing.assert_allclose(jax.jit(lambda x: f(x, Constant)[0])(X), 2 * X)


def test_methods():
    class Layer(eqx.Module):
        weight: jax.Array

        @custom_dce
        def call(self, x):
            return self.weight * x, jnp.exp(x)

        @call.def_dce
        def _rule(used, self, x):
            return self.weight * x if used[0] else None, None

    layer = Layer(jnp.full(3, 2.0))
    grad = jax.jit(jax.grad(lambda layer: layer.call(X)[0].sum()))(layer)
    np.testing.assert_allclose(grad.weight, X)
    assert "exp" not in live(lambda x: layer.call(x)[0], X)


@pytest.mark.slow
def test_modules_with_functions_as_leaves():
    mlp = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))
    assert any(callable(leaf) for leaf in jax.tree.leaves(mlp))
    f = custom_dce(lambda model, x: {"model": model, "y": model(x), "e": jnp.exp(x)})

    @f.def_dce
    def _(used, model, x):
        if used["y"]:
            return {"model": None, "y": model(x), "e": None}
        return {
            "model": jax.tree.map(lambda u, m: m if u else None, used["model"], model),
            "y": None,
            "e": None,
        }

    y = eqx.filter_jit(lambda m, x: f(m, x)["y"])(mlp, X)
    np.testing.assert_allclose(y, mlp(X), rtol=1e-6)
    again = eqx.filter_jit(lambda m, x: f(m, x)["model"])(mlp, X)
    assert again.activation is mlp.activation
    assert eqx.tree_equal(again, mlp)
    grads = eqx.filter_jit(eqx.filter_grad(lambda m: f(m, X)["y"].sum()))(mlp)
    expected = eqx.filter_grad(lambda m: m(X).sum())(mlp)
    assert eqx.tree_equal(grads, expected, rtol=1e-5, atol=1e-6)
    params, static = eqx.partition(mlp, eqx.is_array)
    assert "exp" not in live(lambda p, x: f(eqx.combine(p, static), x)["y"], params, X)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.MLP(3, 3, 4, 1, key=key))(
        jax.random.split(jax.random.key(1), 2)
    )
    ys = eqx.filter_jit(eqx.filter_vmap(lambda m: f(m, X)["y"]))(stacked)
    assert ys.shape == (2, 3)


def _closes_over(x, scale):
    """The function, the rule's closure, the rule's default and the static argument hold `scale`."""

    @partial(custom_dce, static_argnums=0)
    def f(h, x):
        return h(x) * scale, jnp.exp(x)

    @f.def_dce
    def _(h, used, x, *, bias=jnp.sin(scale)):  # noqa: B008
        return h(x) * scale + 0 * bias if used[0] else None, None

    return f(lambda x: x * jnp.cos(scale), x)[0].sum()


@pytest.mark.quick("jit")
@pytest.mark.parametrize(
    "transform",
    [
        jax.jit,
        lambda g: jax.jit(jax.grad(g, argnums=(0, 1))),
        lambda g: jax.grad(jax.jit(g), argnums=(0, 1)),
        lambda g: jax.jit(lambda x, s: jax.vmap(g, in_axes=(None, 0))(x, jnp.stack([s, 2 * s]))),
        lambda g: jax.vmap(jax.jit(lambda x, s: g(x[None], s)), in_axes=(0, None)),
        lambda g: jax.jit(jax.hessian(g, argnums=1)),
        lambda g: lambda x, s: jax.lax.map(lambda s: g(x, s), jnp.stack([s, 2 * s])),
    ],
)
def test_closed_over_tracers(transform, check_leaks):
    plain = lambda x, scale: jnp.sum(x * jnp.cos(scale) * scale)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5),
        transform(_closes_over)(X, Y[0]),
        transform(plain)(X, Y[0]),
    )
    assert "exp" not in live(transform(_closes_over), X, Y[0])


# -------------------------------------------------------------------------------------------------
# Results
# -------------------------------------------------------------------------------------------------


def test_the_structure_of_used_outs_is_that_of_the_result():
    f = custom_dce(lambda x: {"a": [x, (jnp.exp(x), None)], "b": jnp.cosh(x)})
    calls = _asked(f)
    live(lambda x: f(x)["a"][0], X)
    assert calls[0][0] == {"a": [True, (False, None)], "b": False}


def test_lists():
    f = custom_dce(lambda x: [jnp.sin(x), jnp.exp(x)])
    f.def_dce(lambda used, x: [jnp.sin(x) if used[0] else None, None])
    assert isinstance(jax.jit(f)(X), list)
    assert "exp" not in live(lambda x: f(x)[0], X)
    f.def_dce(lambda used, x: (jnp.sin(x) if used[0] else None, None))
    assert "exp" not in live(lambda x: f(x)[0], X)
    g = custom_dce(lambda x: (jnp.sin(x), [jnp.exp(x), x]))
    g.def_dce(lambda used, x: [jnp.sin(x), None])
    assert "exp" not in live(lambda x: g(x)[0], X)


def test_values_beyond_what_is_used_are_ignored():
    f = custom_dce(lambda x: (jnp.sin(x), jnp.exp(x), jnp.cosh(x)))
    f.def_dce(lambda used, x: (jnp.tanh(x), "nothing", jnp.ones((7, 7))))
    assert live(lambda x: f(x)[0], X) == {"custom_dce_call", "tanh"}


@pytest.mark.slow
def test_one_value_for_a_whole_tree():
    f = custom_dce(lambda x: (jnp.exp(x), {"p": 2 * x, "q": x + x}))
    f.def_dce(lambda used, x: (None, jnp.tanh(x)))
    out = jax.jit(lambda x: f(x)[1])(X)
    jax.tree.map(lambda v: np.testing.assert_allclose(v, jnp.tanh(X), rtol=1e-6), out)
    f.def_dce(lambda used, x: jnp.tanh(x))
    np.testing.assert_allclose(jax.jit(lambda x: f(x)[0])(X), jnp.tanh(X), rtol=1e-6)


def test_weak_types_do_not_matter():
    f = custom_dce(lambda x: (x * 2, jnp.exp(x)))
    f.def_dce(lambda used, x: (0.0, None))
    g = lambda x: f(x)[0] + jnp.float32(1)
    assert jax.jit(g)(jnp.float32(3)) == 1
    assert not jax.eval_shape(g, jnp.float32(3)).weak_type


def _with_jvp(f):
    f = custom_dce(jax.custom_jvp(f))
    f.defjvp(lambda primals, tangents: (f.fun(*primals), (7 * tangents[0], 7 * tangents[0])))
    return f


def _with_jvps(f):
    f = custom_dce(jax.custom_jvp(f))
    f.defjvps(lambda tangent, out, x: (7 * tangent, 7 * tangent))
    return f


def _with_vjp(f):
    f = custom_dce(jax.custom_vjp(f))
    f.defvjp(lambda x: (f.fun(x), None), lambda _, cts: (7 * (cts[0] + cts[1]),))
    return f


@pytest.mark.slow
@pytest.mark.parametrize("define", [_with_jvp, _with_jvps, _with_vjp])
def test_a_function_with_a_derivative_of_its_own(define):
    f = define(lambda x: (jnp.sin(x), jnp.cos(x)))
    f.def_dce(lambda used, x: f.fun(x))  # all of it, with its derivative
    first = lambda x: f(x)[0].sum()
    np.testing.assert_allclose(jax.jit(first)(X), jnp.sin(X).sum(), rtol=1e-6)
    for grad in (jax.grad(first), jax.jit(jax.grad(first)), jax.grad(jax.jit(first))):
        np.testing.assert_array_equal(grad(X), jnp.full_like(X, 7))


def test_a_function_with_a_batching_rule_of_its_own():
    f = custom_dce(jax.custom_batching.custom_vmap(lambda x: (jnp.sin(x), jnp.cos(x))))
    f.def_vmap(lambda n, batched, x: ((7 * x, x), (True, True)))
    f.def_dce(lambda used, x: f.fun(x))
    np.testing.assert_array_equal(jax.vmap(lambda x: f(x)[0])(X), 7 * X)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda x: f(x)[0]))(X), 7 * X)


def test_attributes_of_the_function():
    def function(x):
        """Doubles."""
        return x, 2 * x

    function.tag = "a"
    f = custom_dce(function)
    assert (f.tag, f.__doc__, f.__name__, f.dce_rule) == ("a", "Doubles.", "function", None)
    function.tag = "b"
    assert copy.copy(f).tag == "b"
    rule = f.def_dce(lambda used, x: (x, x))
    assert f.dce_rule is rule
    with pytest.raises(AttributeError, match="defjvp"):
        f.defjvp(rule)
    with pytest.raises(AttributeError, match="__array__"):
        f.__array__()


# -------------------------------------------------------------------------------------------------
# What is refused
# -------------------------------------------------------------------------------------------------


def test_no_rule():
    @custom_dce
    def nothing(x):
        return x

    for call in (nothing, jax.jit(nothing), jax.grad(nothing)):
        with pytest.raises(AttributeError, match=r"custom_dce function nothing has no rule; .*def_dce"):
            call(1.0)


@wrong_types
def test_what_cannot_be_called():
    f = custom_dce(lambda x: (x, x))
    with pytest.raises(TypeError, match=r"def_dce of custom_dce function <lambda> takes a function; found 3"):
        f.def_dce(3)
    assert f.dce_rule is None
    with pytest.raises(TypeError, match="custom_dce takes a function; found 3"):
        custom_dce(3)


def test_arguments_without_positions():
    @custom_dce
    def f(x, y, *, z=None):
        return x, y

    f.def_dce(lambda used, x, y: (x, y))
    for kwargs, message in [
        ({}, "missing a required argument: 'y'"),
        ({"y": 1.0, "w": 2.0}, "unexpected keyword argument 'w'"),
        ({"y": 1.0, "z": 2.0}, "z can be given by keyword only"),
    ]:
        with pytest.raises(TypeError, match=f"custom_dce function f cannot be made positional: .*{message}"):
            f(1.0, **kwargs)
    assert f(1.0, 2.0) == jax.jit(lambda x: f(x, 2.0))(1.0) == (1.0, 2.0)


def test_structures_that_differ():
    f = custom_dce(lambda x: {"a": x, "b": jnp.exp(x)})

    @f.def_dce
    def rule(used, x):
        return {"a": x, "c": x}

    message = r"the rule rule of custom_dce .* structure .*\{'a': \*, 'b': \*\}.* found .*'c'"
    with pytest.raises(TypeError, match=message):
        live(lambda x: f(x)["a"], X)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"at output\['p'\]\[1\] it returned None, expected (f32|float32)\[3\]"),
        (
            array(np.ones(2)),
            r"at output\['p'\]\[1\] it returned (f32|float32)\[2\], expected (f32|float32)\[3\]",
        ),
        (array(np.ones(3, int)), r"it returned (i32|int32)\[3\], expected (f32|float32)\[3\]"),
        ("text", r"it returned text, expected (f32|float32)\[3\]"),
    ],
)
def test_results_that_are_missing_or_wrong(value, message):
    f = custom_dce(lambda x: {"p": (x, jnp.exp(x))})
    f.def_dce(lambda used, x: {"p": (None, value)})
    with pytest.raises(ValueError, match=message):
        live(lambda x: f(x)["p"][1], X)


def test_tracers_cannot_be_static():
    f = custom_dce(lambda x, n: (x, n), static_argnums=-1)
    f.def_dce(lambda n, used, x: (x, n))
    for transform in (jax.jit, jax.grad, jax.vmap):
        with pytest.raises(UnexpectedTracerError, match=r"argument 1 of custom_dce function .* is static"):
            transform(lambda x: f(x, {"n": x})[0])(jnp.ones(()) if transform is not jax.vmap else X)
    g = custom_dce(lambda x, n: (x, n), static_argnums=2)
    g.def_dce(lambda n, used, x: (x, n))
    with pytest.raises(ValueError, match=r"static_argnums of custom_dce function .* has 2, .* 2 arguments"):
        g(1.0, 2.0)
