"""Under every transform a weight of every shipped type computes what its materialised array computes."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.conformance.programs import mesh
from tests.conformance.weights import WEIGHTS

P = jax.P


def layer(w, y):
    return jnp.tanh(w @ y) + y


@jax.custom_jvp
def _sine(y):
    return jnp.sin(y)


_sine.defjvp(lambda primals, tangents: (_sine(*primals), jnp.cos(primals[0]) * tangents[0]))


@jax.custom_vjp
def _layer_vjp(w, y):
    return layer(w, y)


_layer_vjp.defvjp(lambda w, y: (layer(w, y), (w, y)), lambda res, ct: (None, ct * jnp.cos(res[1])))


def _solve(w, y):
    matvec = lambda x: 3.0 * x + w @ x
    solver = lambda matvec, b: lax.fori_loop(0, 40, lambda _, x: (b - w @ x) / 3.0, jnp.zeros(4))
    return lax.custom_linear_solve(matvec, y, solver, symmetric=True)


def _shard_map(w, y):
    return jax.shard_map(layer, mesh=mesh(), in_specs=(P(), P()), out_specs=P())(w, y)


TRANSFORMS = {
    "eager": layer,
    "jit": lambda w, y: jax.jit(layer)(w, y),
    "vmap": lambda w, y: jax.vmap(layer, in_axes=(None, 0))(w, jnp.stack([y, 2 * y])),
    "jvp": lambda w, y: jax.jvp(lambda y: layer(w, y), (y,), (y,)),
    "vjp": lambda w, y: jax.vjp(lambda y: layer(w, y), y)[1](y),
    "linearize": lambda w, y: jax.linearize(lambda y: layer(w, y), y)[1](y),
    "hessian": lambda w, y: jax.hessian(lambda y: jnp.sum(layer(w, y) ** 2))(y),
    "scan": lambda w, y: lax.scan(lambda c, _: (layer(w, c), c), y, length=3),
    "scan of length zero": lambda w, y: lax.scan(lambda c, _: (layer(w, c), c), y, length=0),
    "while_loop": lambda w, y: lax.while_loop(
        lambda c: c[1] < 3, lambda c: (layer(w, c[0]), c[1] + 1), (y, 0)
    ),
    "cond": lambda w, y: lax.cond(y[0] > 0, lambda: layer(w, y), lambda: -y),
    "switch": lambda w, y: lax.switch(1, [lambda: y, lambda: layer(w, y)]),
    "checkpoint": lambda w, y: jax.grad(lambda y: jnp.sum(jax.checkpoint(layer)(w, y)))(y),
    "custom_jvp": lambda w, y: jax.jvp(lambda y: layer(w, _sine(y)), (y,), (y,)),
    "custom_vjp": lambda w, y: jax.grad(lambda y: jnp.sum(_layer_vjp(w, y)))(y),
    "shard_map": _shard_map,
    "custom_linear_solve": _solve,
    "filter_jit": lambda w, y: eqx.filter_jit(layer)(w, y),
    "filter_grad": lambda w, y: eqx.filter_grad(lambda y: jnp.sum(layer(w, y)))(y),
    "filter_vmap": lambda w, y: eqx.filter_vmap(layer, in_axes=(None, 0))(w, jnp.stack([y, 2 * y])),
    "filter_checkpoint": lambda w, y: eqx.filter_checkpoint(layer)(w, y),
    "filter_closure_convert": lambda w, y: eqx.filter_closure_convert(lambda y: layer(w, y), y)(y),
}


@functools.cache
def _of_arrays(transform):
    """The program of plain arrays: compiled once for all types."""
    return jax.jit(TRANSFORMS[transform])


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_the_materialised_array(name, transform, default_promotion):
    f, w = TRANSFORMS[transform], WEIGHTS[name]()
    y = jnp.array([1.0, -2.0, 3.0, 0.5])
    expected = _of_arrays(transform)(ql.materialise(w), y)
    with ql.on_materialise("error"):
        found = ql.quaxify(f)(w, y)
        jitted = jax.jit(ql.quaxify(f))(w, y)
    for out in (found, jitted):
        with ql.on_materialise("allow"):
            out = ql.materialise(out)
        jtu.tree_map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), out, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
def test_stacked_weights(name, default_promotion):
    """Weights stacked with vmap or tree_map keep a true shape; scan takes them one by one."""
    w, y = WEIGHTS[name](), jnp.array([1.0, -2.0, 3.0, 0.5])
    stacked = jtu.tree_map(lambda *leaves: jnp.stack(leaves), w, w, w)
    expected = lax.scan(lambda c, _: (layer(ql.materialise(w), c), None), y, length=3)[0]
    with ql.on_materialise("error"):
        found = lax.scan(lambda c, w: (ql.quaxify(layer)(w, c), None), y, stacked, length=3)[0]
        each = jax.vmap(ql.quaxify(layer), in_axes=(0, None), axis_size=3)(stacked, y)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(each[1], layer(ql.materialise(w), y), rtol=2e-4, atol=2e-5)
