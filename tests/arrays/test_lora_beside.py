"""`TrainableArray` and `LoraBias`: stacked, looked up, and differentiated, as the arrays that they are; and
adapters beneath others."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.array_types import TYPES, WEIGHTS
from tests.samples import normal, tree_equal

BIAS, ADDED = normal(4, 3), normal(4, 3, seed=1)

# name: (how it is made of a bias and that of an adapter, the array, whether the first of them is trained)
KINDS = {
    "bias": (lambda w, b: ql.LoraBias(w, b, 0.5), lambda w, b: w + 0.5 * b, False),
    "trained bias": (
        lambda w, b: ql.LoraBias(ql.TrainableArray(w), b, 0.5),
        lambda w, b: w + 0.5 * b,
        True,
    ),
    "no bias": (lambda w, b: ql.LoraBias(None, b, 0.5), lambda w, b: 0.5 * b, False),
    "trained array": (lambda w, b: ql.TrainableArray(w), lambda w, b: w, True),
}


@pytest.mark.quick("no bias", "trained array")
@pytest.mark.parametrize("kind", KINDS)
def test_merged_is_differentiated_in_all_parts(kind):
    make, array, _ = KINDS[kind]
    x = make(BIAS, ADDED)
    assert (x.shape, x.dtype) == ((4, 3), BIAS.dtype)
    got, want = (
        jax.grad(lambda w, b, f=f: jnp.sum(jnp.sin(f(w, b))), (0, 1))(BIAS, ADDED)
        for f in (lambda w, b: make(w, b).merged(), array)
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-6), got, want)


def test_the_dtype_is_that_of_the_layer():
    x = ql.LoraBias(BIAS.astype(jnp.bfloat16), ADDED, 0.5)
    assert x.dtype == x.materialise().dtype == jnp.bfloat16
    assert ql.LoraBias(None, ADDED, 0.5).dtype == ADDED.dtype


def test_a_scaling_for_each_of_a_stack():
    scaling = jnp.arange(1.0, 5.0)
    expected = BIAS + scaling[:, None] * ADDED
    np.testing.assert_allclose(ql.LoraBias(BIAS, ADDED, scaling).materialise(), expected)


@pytest.mark.quick("Zero")
@pytest.mark.parametrize("inner", ["BlockSparseArray", "NF4Array", "Zero", "LoraArray"])
def test_a_value_that_is_trained_in_full(inner):
    """Its rows are scanned, and a plain array takes its place, as far as those of the value inside."""
    x = ql.TrainableArray(WEIGHTS[inner]())
    programs = [
        lambda x: lax.map(jnp.sin, x),
        lambda x: lax.cond(x[0, 0] > 9, lambda: x, lambda: jnp.cos(x)),
        lambda x: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c), x),
    ]
    with ql.on_materialise("allow"):
        for program in programs:
            out = ql.materialise(ql.quaxify(program)(x))
            np.testing.assert_allclose(out, program(ql.materialise(x)), rtol=1e-5, atol=1e-6)


OUTER = ["LoraArray", "ScaledArray", "RotatedArray", "SumArray", "OFTArray"]
INNER = {
    "TrainableArray": lambda w: ql.TrainableArray(w),
    "TrainableRows": lambda w: ql.TrainableRows(w, w[:2] + 1, (3, 1)),
    "LoraArray": lambda w: ql.LoraArray(w, w[:1], w[:, :1]),
    "trained scales": lambda w: ql.NF4Array.quantize(w, block_size=32, train_scales=True),
}
MOVED = {
    "a scale": lambda x: x * 2,
    "a traced scale": lambda x: x * jnp.sum(x[0]),
    "a conversion": lambda x: x.astype(jnp.float16),
    "the transpose": lambda x: x.T,
    "reversed": lambda x: x[::-1],
    "rows": lambda x: x[jnp.array([0, -1, 0])],
    "joined": lambda x: jnp.concatenate([x, x]),
    "stacked beside an array": lambda x: jnp.stack([x, jnp.ones((4, 4))]),
    "a sum": lambda x: x + x.T,
    "a product of two": lambda x: x.T @ x,
    "a loop": lambda x: lax.fori_loop(0, 2, lambda i, c: c * 0.5, x),
}


@pytest.mark.each_value
@pytest.mark.quick(1)
@pytest.mark.parametrize("program", MOVED)
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_an_adapter_beneath_decides_about_its_gradients(outer, inner, program):
    """Also where the base of the result is dense."""
    dense = TYPES[outer]()
    x = dense.with_base(INNER[inner](ql.materialise(dense.w)))

    def weighted(f):
        return lambda x: jnp.sum(jnp.sin(ql.materialise(f(x))).astype(float))

    run = MOVED[program]
    with ql.on_materialise("allow"):
        got = eqx.filter_grad(weighted(ql.quaxify(run)))(x)
    want = eqx.filter_grad(weighted(lambda x: run(ql.materialise(x))))(x)
    tolerance = 2e-2 if program == "a conversion" else 1e-4
    assert tree_equal(got, want, rtol=tolerance, atol=tolerance)
