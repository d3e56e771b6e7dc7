"""Taylor coefficients of defined primitives are those of the functions that they were defined from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from quaxlike.primitives import define_primitive
from tests.samples import array, normal


def _gate(x, w, *, power):
    return jnp.tanh(x @ w) ** power


def _several(x, n):
    return {"sine": jnp.sin(x) * x, "next": n + 1}


def _sine(x):
    return jnp.sin(x)


gate_p = define_primitive("test_taylor_gate", _gate)
several_p = define_primitive("test_taylor_several", _several, multiple_results=True)
from_results_p = define_primitive(
    "test_taylor_from_results",
    _sine,
    vjp=lambda ct, out, x: (ct * jnp.sign(jnp.cos(x)) * jnp.sqrt(1 - out**2),),
    vjp_with_results=True,
)

X, W, N = normal(3), normal(3, 2, seed=1), array([1, 2])
gate_p_of, gate_of = (lambda x, gate=gate: gate(x, W, power=2) for gate in (gate_p, _gate))
CASES = {
    "one operand": (lambda x: gate_p(x, W, power=2), lambda x: _gate(x, W, power=2)),
    "both operands": (
        lambda x: gate_p(x, W * x[:, None], power=3),
        lambda x: _gate(x, W * x[:, None], power=3),
    ),
    "several results": (lambda x: several_p(x, N)["sine"], lambda x: _several(x, N)["sine"]),
    "an integer": (
        lambda x: several_p(x, N)["next"].astype(x.dtype) * x[:2],
        lambda x: _several(x, N)["next"].astype(x.dtype) * x[:2],
    ),
    "mapped": (lambda x: jax.vmap(gate_p_of)(x[None] * W.T), lambda x: jax.vmap(gate_of)(x[None] * W.T)),
    "derivative": (jax.grad(lambda x: gate_p(x, W, power=2)[0]), jax.grad(lambda x: _gate(x, W, power=2)[0])),
    "from results": (from_results_p, _sine),
}


@pytest.mark.quick("from results-jit")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", CASES)
def test_of_the_function(case, wrap):
    defined, plain = CASES[case]
    series = [0.3 * X, jnp.cos(X), -0.5 * X]
    coefficients = lambda f: wrap(lambda x, *series: jet(f, (x,), (series,)))(X, *series)
    expected = coefficients(lambda x: plain(x) * jnp.ones(()))
    for x, y in zip(jax.tree.leaves(coefficients(defined)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
