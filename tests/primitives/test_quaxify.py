"""Values inside custom_dce and defined primitives keep their type."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.primitives import custom_dce, define_primitive
from tests.samples import array

from ..strict import Strict, strict, strict_pair
from .jaxprs import primitives
from .test_custom_dce import live

X, Y = array([0.3, -0.7, 1.1]), array([2.0, 0.5, -1.5])


def _fun(x, y):
    """By way of `exp`, which the rule does without."""
    scale = jnp.log(jnp.exp(y))
    return {"scaled": x * scale, "sums": jnp.cumsum(x), "plain": jnp.exp(y)}


both = custom_dce(_fun)


@both.def_dce
def _rule(used, x, y):
    return {
        "scaled": x * y if used["scaled"] else None,
        "sums": jax.lax.cumsum(x, reverse=False) if used["sums"] else None,
        "plain": jnp.exp(y) if used["plain"] else None,
    }


def _dense(x):
    return x.dense() if ql.is_value(x) else x


TRANSFORMS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda x, y: jax.lax.scan(lambda c, _: (f(c, y), None), x, None, length=2)[0],
    "cond": lambda f: lambda x, y: jax.lax.cond(y[0] > 0, f, lambda x, y: 2.0 * x, x, y),
    "jvp": lambda f: lambda x, y: jax.jvp(lambda y: f(x, y), (y,), (y,))[0],
    "vmap_y": lambda f: lambda x, y: jax.vmap(lambda y: f(x, y))(jnp.stack([y, y + 1])),
}


@pytest.mark.quick("checkpoint-strict_pair")
@pytest.mark.parametrize("make", [strict, strict_pair])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_type_survives_in_function_and_rule(make, transform):
    x = make(X)
    f = TRANSFORMS[transform](lambda x, y: both(x, y)["scaled"])
    expected = TRANSFORMS[transform](lambda x, y: x * y)(X, Y)
    for run in (ql.quaxify(f), jax.jit(ql.quaxify(f)), ql.quaxify(jax.jit(f))):
        out = run(x, Y)
        assert type(out) is type(x)
        np.testing.assert_allclose(_dense(out), expected, rtol=1e-5)
    # In what is lowered: with `jax_remat3`, JAX leaves what is inside of a checkpoint as it is before.
    assert "exponential" not in jax.jit(ql.quaxify(f)).lower(x, Y).as_text()


def test_derivatives_by_the_leaves_and_by_the_plain_operand():
    x = strict_pair(X)
    product = ql.quaxify(lambda x, y: both(x, y)["scaled"])
    by_leaves = jax.grad(lambda x: jnp.sum(product(x, Y).dense()))
    np.testing.assert_allclose(jax.jit(by_leaves)(x).big, Y, rtol=1e-5)
    assert "exp" not in live(by_leaves, x)
    by_y = lambda x: jax.grad(lambda y: product(x, y).big.sum())(Y)
    np.testing.assert_allclose(jax.jit(by_y)(x), x.big, rtol=1e-5)
    assert "exp" not in live(by_y, x)


def test_no_tracer_leaks(check_leaks):
    jax.jit(ql.quaxify(lambda x, y: both(x, y)["sums"]))(strict(X), Y)


def test_a_value_built_in_the_body():
    f = ql.quaxify(lambda x, y: both(strict(x), y)["scaled"])
    out = jax.jit(f)(X, Y)
    assert isinstance(out, Strict)
    assert "exp" not in live(f, X, Y)


def test_two_levels_of_quaxify():
    f = ql.quaxify(ql.quaxify(lambda x, y: both(x, y)["sums"]))
    out = jax.jit(f)(strict(X), Y)
    np.testing.assert_allclose(out.array, jnp.cumsum(X), rtol=1e-6)


def test_a_value_that_is_closed_over():
    x = strict(X)

    @custom_dce
    def f(y):
        return x * y, jnp.exp(y)

    f.def_dce(lambda used, y: (x * y if used[0] else None, None))
    out = jax.jit(ql.quaxify(lambda y: f(y)[0]))(Y)
    assert isinstance(out, Strict)
    np.testing.assert_allclose(out.array, X * Y, rtol=1e-6)


# -------------------------------------------------------------------------------------------------
# Defined primitives
# -------------------------------------------------------------------------------------------------

scale_p = define_primitive("test_scale", lambda x, y, *, power: x * y**power)
pair_p = define_primitive(
    "test_pair", lambda xs, y: {"sum": xs[0] + xs[1], "scaled": xs[0] * y}, multiple_results=True
)


class Tagged(Strict):
    pass


@ql.register(scale_p)
def _(x: Tagged, y: jax.Array, *, power):
    return Tagged(scale_p(x.array, y, power=power), tag="by rule")


def test_a_rule_is_found_by_the_primitive():
    f = ql.quaxify(partial(scale_p, power=2))
    out = f(Tagged(X), Y)
    assert out.tag == "by rule"
    np.testing.assert_allclose(out.array, X * Y**2, rtol=1e-6)
    assert scale_p in primitives(f, Tagged(X), Y)
    assert jax.jit(f)(Tagged(X), Y).tag == "by rule"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_rule_has_the_parameters_as_they_were_given(wrap):
    for power in (2, 2.0):
        out = ql.quaxify(wrap(partial(scale_p, power=power)))(Tagged(X), Y)
        assert out.tag == "by rule"


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_without_a_rule_its_parts_are_dispatched(wrap):
    out = ql.quaxify(wrap(lambda x, y: scale_p(x, y, power=2)))(strict(X), Y)
    assert type(out) is Strict
    np.testing.assert_allclose(out.array, X * Y**2, rtol=1e-6)
    out = ql.quaxify(wrap(lambda xs, y: pair_p(xs, y)))([strict(X), strict(Y)], Y)
    assert {k: type(v) for k, v in out.items()} == {"sum": Strict, "scaled": Strict}
    np.testing.assert_allclose(out["sum"].array, X + Y)


@pytest.mark.slow
def test_derived_primitives_are_dispatched_by_their_parts():
    f = lambda x, y: jax.vmap(lambda y: scale_p(x, y, power=1))(jnp.stack([y, y]))
    out = ql.quaxify(f)(strict(X), Y)
    assert type(out) is Strict
    assert out.array.shape == (2, 3)
    tangent = ql.quaxify(lambda x, y: jax.jvp(lambda y: scale_p(x, y, power=1), (y,), (y,))[1])
    assert type(tangent(strict(X), Y)) is Strict
