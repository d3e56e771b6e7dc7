"""Taylor coefficients of products with stored weights are those of the products with the dense ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

import quaxlike as ql
from tests.samples import Lazy, normal

W, X = normal(8, 64), normal(64, seed=1)


def _adapted(w):
    return ql.LoraArray(w, a=normal(2, 64, seed=2), b=normal(8, 2, seed=3))


WEIGHTS = Lazy(
    {
        "nf4": lambda: ql.NF4Array.quantize(W),
        "nested": lambda: ql.NF4Array.quantize(W, double_quant=True),
        "int4": lambda: ql.Int4Array.quantize(W),
        "int8": lambda: ql.Int8Array.quantize(W),
        "lora over nf4": lambda: _adapted(ql.NF4Array.quantize(W)),
        "sparse": lambda: ql.SparseArray.from_dense(W, density=0.3),
        "blocks": lambda: ql.BlockSparseArray.from_dense(W, block_size=8, density=0.5),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("weight", WEIGHTS)
def test_of_a_product(weight):
    w = WEIGHTS[weight]
    series = (0.1 * X, 0.3 * X**2)
    coefficients = lambda run, w: jet(lambda x: run(lambda w, x: jnp.tanh(w @ x))(w, x), (X,), (series,))
    with ql.on_materialise("error"):
        found = coefficients(ql.quaxify, w)
    expected = coefficients(lambda f: f, ql.materialise(w))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
