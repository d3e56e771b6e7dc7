"""Each class of primitives holds what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike.primitives import classes


def value_at(name, x):
    """The primitive through `jax.lax`, which fills in its parameters."""
    functions = {
        "convert_element_type": lambda x: jax.lax.convert_element_type(x, jnp.int32),
        "reduce_precision": lambda x: jax.lax.reduce_precision(x, 5, 10),
        "integer_pow": lambda x: jax.lax.integer_pow(x, 3),
    }
    return (functions.get(name) or getattr(jax.lax, name))(x)


@pytest.mark.quick(12)
@pytest.mark.parametrize("name", classes.ZERO_PRESERVING)
def test_zero_goes_to_zero(name):
    dtype = jnp.complex64 if name in ("imag", "real", "conj") else jnp.float32
    np.testing.assert_array_equal(value_at(name, jnp.zeros(2, dtype)), jnp.zeros(2))


INTEGER = ("clz", "not", "population_count")


@pytest.mark.quick("integer_pow", "log")
@pytest.mark.parametrize("name", [n for n in classes.ELEMENTWISE_UNARY if n not in classes.ZERO_PRESERVING])
def test_the_other_functions_of_one_array_are_elementwise(name):
    if not hasattr(jax.lax, name):  # has no name of its own there
        functions = {"log2": jnp.log2, "not": jax.lax.bitwise_not, "one_minus_square": lambda x: 1 - x**2}
        f = functions[name]
    else:
        f = lambda x: value_at(name, x)
    x = jnp.arange(1, 4) if name in INTEGER else jnp.linspace(0.2, 0.8, 3)
    np.testing.assert_allclose(f(x), jnp.stack([f(element) for element in x]), rtol=1e-6)
