"""Programs that are not linear in a weight, and their gradients, are what they are on its materialised array.

There is a gradient by each inexact leaf of the weight, by a plain operand, by a scalar factor, and by the
plain array that takes the place of the weight in the other branch of a `cond`.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.testing.compare import disagreement
from quaxlike.testing.hooks import Subject
from tests.array_types import WEIGHTS
from tests.samples import normal


def _either_branch(x, y, s, z):
    values = (lax.cond(jnp.array(which), lambda: x, lambda: z) for which in (True, False))
    return sum(jnp.tanh(s * x) * y for x in values)


PROGRAMS = {
    "eager": lambda x, y, s, z: s * x @ (x @ y) + x * x,
    "checkpoint of jit": jax.checkpoint(jax.jit(lambda x, y, s, z: jax.nn.softmax(s * x) @ y)),
    "scan": lambda x, y, s, z: lax.scan(lambda c, row: (c, jax.nn.relu(s * row) @ y), 0.0, x)[1],
    "cond": _either_branch,
}


def _loss(out):
    """A sum in which no two elements count the same."""
    return jnp.sum(out * jnp.cos(jnp.arange(16.0)).reshape(4, 4))


@functools.cache
def _of_arrays(name):
    """Value and gradients of the program of plain arrays: compiled once for all types."""
    return jax.jit(jax.value_and_grad(lambda *args: _loss(PROGRAMS[name](*args)), argnums=(0, 1, 2, 3)))


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients(name, program, default_promotion):
    varied, weight = Subject(WEIGHTS[name](), None).varied()
    y, s, z = normal(4, 4), jnp.array(1.5), normal(4, 4, seed=1)
    with ql.on_materialise("allow"):
        quaxified = ql.quaxify(PROGRAMS[program])
        of_value = lambda varied, *args: _loss(ql.materialise(quaxified(weight(varied), *args)))
        found = jax.jit(jax.value_and_grad(of_value, argnums=(0, 1, 2, 3)))(varied, y, s, z)
        dense, pull = jax.vjp(lambda varied: ql.materialise(weight(varied)), varied)
    value, (by_weight, *by_others) = _of_arrays(program)(dense, y, s, z)
    expected = value, (*pull(by_weight), *by_others)
    assert not disagreement(found, expected, tolerance=2e-4, scale=1e-3)  # some cotangents cancel
