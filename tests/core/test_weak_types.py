"""Weak types: what numbers of Python have, and lose where they meet arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.samples import array


class Mask(ql.ArrayValue):
    bits: jax.Array

    def materialise(self):
        return jnp.where(self.bits, 1.0, 0.0)  # weakly typed


class Strong(ql.ArrayValue):
    number: float

    def aval(self):
        return jax.core.ShapedArray((), jnp.float32)

    def materialise(self):
        return jnp.asarray(self.number)  # weakly typed, unlike the aval


class StrongByDefault(Strong):
    @staticmethod
    def default(primitive, values, params):
        return primitive.bind(*[getattr(x, "number", x) for x in values], **params)


class NoRules(ql.ArrayValue):
    array: jax.Array

    def materialise(self):
        return self.array


_BFLOAT16 = array(np.ones(3, jnp.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("f", [lambda x: x.astype(jnp.float32) + _BFLOAT16, lambda x: jnp.sum(x) * _BFLOAT16])
def test_a_weak_type_that_becomes_strong(f, default_promotion):
    x = Mask(jnp.array([True, False, True]))
    assert ql.quaxify(f)(x).dtype == f(x.materialise()).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Strong, StrongByDefault])
def test_weak_results_of_a_strong_type(cls, default_promotion):
    f = lambda x: -x * _BFLOAT16
    for run in (ql.quaxify(f), ql.quaxify(jax.jit(f)), jax.jit(ql.quaxify(f))):
        assert run(cls(2.0)).dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.cond(x > 0, lambda: x, lambda: x * 2),
        lambda x: lax.fori_loop(0, 2, lambda i, c: c * 2, x),
        lambda x: lax.scan(lambda c, _: (c * 2, None), x, length=2)[0],
        lambda x: lax.while_loop(lambda c: c < 9, lambda c: c * 2, x),
    ],
)
def test_branches_and_carries_are_weak_where_both_sides_are(f, default_promotion):
    x, some = jnp.asarray(2.0), jnp.ones((), jnp.bfloat16)
    for run in (ql.quaxify(f), jax.jit(ql.quaxify(f))):
        assert (run(NoRules(x)) * some).dtype == (f(x) * some).dtype
