"""High-level primitives of JAX, which are evaluated inline with their own derivatives and transposes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.structured import DiagonalMatrix

TYPES = {
    "NamedArray": lambda d: NamedArray(d, ("a",)),
    "DiagonalMatrix": DiagonalMatrix,
    "LoraArray": lambda d: ql.LoraArray(jnp.ones((2, 2)), d[None], jnp.ones((2, 1))),
}
FUNCTIONS = {
    "frexp": lambda x: jnp.sum(jnp.frexp(x)[0] ** 2),
    "ldexp": lambda x: jnp.sum(jnp.ldexp(x, 2) ** 2),
    "ldexp under vmap": lambda x: jnp.sum(jax.vmap(lambda row: jnp.ldexp(row, 1))(x) ** 3),
    "einsum": lambda x: jnp.sum(jnp.einsum("...i,i->...", x, jnp.array([1.0, 2.0])) ** 2),
}


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("transform", [jax.grad, jax.hessian])
def test_derivatives(transform, function, name):
    f, make, d = FUNCTIONS[function], TYPES[name], jnp.array([1.0, 3.0])
    with ql.on_materialise("allow"):
        found = transform(lambda d: ql.materialise(ql.quaxify(f)(make(d))))(d)
        staged = transform(jax.jit(lambda d: ql.materialise(ql.quaxify(f)(make(d)))))(d)
    expected = transform(lambda d: f(make(d).materialise()))(d)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(staged, expected, rtol=1e-5)


@pytest.mark.usefixtures("default_promotion")
def test_an_exponent_that_is_a_value():
    exponent = NamedArray(jnp.array([1, 2]), ("a",))
    f = lambda x: jnp.sum(ql.materialise(ql.quaxify(jnp.ldexp)(x, exponent)))
    np.testing.assert_allclose(jax.grad(f)(jnp.array([1.0, 3.0])), [2.0, 4.0])
