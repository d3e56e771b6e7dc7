"""`OneHotVector` against the dense vector it stands for."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quaxlike as ql
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.primitives.classes import ZERO_PRESERVING
from tests.samples import array, normal

SINGLE = OneHotVector(jax.device_put(5.0), jax.device_put(2), length=4)
STACKED = OneHotVector(array([5.0, 3.0, 2.0]), array([2, -1, 7]), length=4)  # the last: nowhere


def agrees(f, *args):
    """`f` of the Values is `f` of the arrays, and materialises nothing."""
    with ql.on_materialise("error"):
        out = eqx.filter_jit(ql.quaxify(f))(*args)
    np.testing.assert_allclose(ql.materialise(out), eqx.filter_jit(f)(*ql.materialise(args)), rtol=1e-6)
    return out


@pytest.mark.slow
def test_what_it_stands_for():
    np.testing.assert_array_equal(SINGLE.materialise(), [0, 0, 5, 0])
    np.testing.assert_array_equal(STACKED.materialise(), [[0, 0, 5, 0], [0, 0, 0, 3], [0, 0, 0, 0]])
    assert (SINGLE.shape, STACKED.shape) == ((4,), (3, 4))


@st.composite
def contractions(draw):
    """dimension_numbers of a stack of one-hot vectors (3, 4) with an array that has an axis of 4."""
    batched = draw(st.booleans())
    shape = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    axis = draw(st.integers(0, len(shape)))
    shape.insert(axis, 4)
    if not batched:
        return tuple(shape), (((1,), (axis,)), ((), ()))
    at = draw(st.integers(0, len(shape)))
    shape.insert(at, 3)
    return tuple(shape), (((1,), (axis + (at <= axis),)), ((0,), (at,)))


@pytest.mark.slow
@given(contractions())
def test_dot_general_on_both_sides(case):
    shape, dims = case
    y = normal(*shape)
    agrees(lambda x, y: jax.lax.dot_general(x, y, dims), STACKED, y)
    swapped = (dims[0][::-1], dims[1][::-1])
    agrees(lambda x, y: jax.lax.dot_general(y, x, swapped), STACKED, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZERO_PRESERVING)
def test_functions_that_keep_zero_keep_the_type(name):
    functions = {
        "convert_element_type": lambda x: x.astype(jnp.int32),
        "reduce_precision": lambda x: jax.lax.reduce_precision(x, 5, 10),
        "neg": jnp.negative,
        "erf": jax.lax.erf,
        "erf_inv": lambda x: jax.lax.erf_inv(x / 10),
        "bessel_i1e": jax.lax.bessel_i1e,
        "asin": lambda x: jnp.arcsin(x / 10),
        "atanh": lambda x: jnp.arctanh(x / 10),
        "imag": lambda x: jax.lax.imag(x.astype(jnp.complex64)),
        "real": lambda x: jax.lax.real(x.astype(jnp.complex64)),
    }
    f = functions.get(name) or getattr(jax.lax, name, None) or getattr(jnp, name)
    assert type(agrees(f, SINGLE)) is OneHotVector


@pytest.mark.slow
def test_what_has_no_rule_is_materialised_visibly():
    with pytest.raises(ql.MaterialisationError, match="OneHotVector"), ql.on_materialise("error"):
        jnp.ones(4) + SINGLE
    np.testing.assert_array_equal(jnp.ones(4) + SINGLE, [1, 1, 6, 1])


@pytest.mark.slow
def test_a_vector_without_elements_in_products():
    x = OneHotVector(1.0, 0, 0)
    stack = OneHotVector(jnp.ones(2), jnp.zeros(2, int), 0)
    for product in (
        lambda x: jnp.ones((3, 0)) @ x,
        lambda x: x @ jnp.ones((0, 3)),
        lambda x: x @ jnp.ones(0),
    ):
        assert jnp.array_equal(ql.quaxify(product)(x), product(x.materialise()))
        assert jnp.array_equal(ql.quaxify(jax.vmap(product))(stack), jax.vmap(product)(stack.materialise()))
