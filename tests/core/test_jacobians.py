"""Jacobians of functions that return Values with integers, in whose place `jax.jacfwd` puts zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.arrays.structured import DiagonalMatrix
from tests.samples import array

MAKE = {
    "SparseArray": lambda: ql.SparseArray.from_dense(jnp.array([[0.0, 2.0], [3.0, 0.0]])),
    "SparseArray, one element": lambda: ql.SparseArray.from_dense(jnp.array([[0.0, 0.0], [0.0, 1.0]])),
    "SparseArray, vector": lambda: ql.SparseArray.from_dense(jnp.array([0.0, 2.0, 3.0])),
    "BlockSparseArray": lambda: ql.BlockSparseArray.from_dense(jnp.eye(8), block_size=2),
    "Int8Array": lambda: ql.Int8Array.quantize(jnp.eye(4)),
    "OneHotVector": lambda: OneHotVector(2.0, 2, length=4),
}


@pytest.mark.quick("SparseArray, vector-vector")
@pytest.mark.parametrize("argument", [3.0, array(np.ones(3))], ids=["scalar", "vector"])
@pytest.mark.parametrize("name", MAKE)
def test_the_function_of_jacfwd_may_not_return_one(name, argument):
    x = MAKE[name]()
    scaled = lambda s: x * s.sum()
    with pytest.raises(TypeError, match=r"jacfwd of a function that returns .* Return an array"):
        jax.eval_shape(jax.jacfwd(ql.quaxify(scaled)), jnp.asarray(argument))
    with pytest.raises(TypeError, match="requires real-valued outputs"):
        jax.eval_shape(jax.jacrev(ql.quaxify(scaled)), jnp.asarray(argument))
    dense = jax.jit(jax.jacfwd(lambda s: ql.materialise(ql.quaxify(scaled)(s))))(jnp.asarray(argument))
    want = np.broadcast_to(np.expand_dims(x.materialise(), [-1] * jnp.ndim(argument)), dense.shape)
    np.testing.assert_allclose(dense, want, rtol=1e-6)


@pytest.mark.quick(
    "SparseArray", "SparseArray, one element", "SparseArray, vector", "Int8Array", "OneHotVector"
)
@pytest.mark.parametrize("name", MAKE)
def test_under_jit_it_is_not_used_as_an_array(name):
    x = MAKE[name]()
    with pytest.raises(ValueError, match="derivative of a function that returns"):
        jax.jit(lambda s: ql.materialise(jax.jacfwd(lambda s: x * s)(s)))(3.0)


@pytest.mark.quick("SparseArray, vector")
@pytest.mark.parametrize("name", [name for name in MAKE if "Sparse" in name])
def test_a_pattern_of_zeros_is_not_used_as_an_array(name):
    x = MAKE[name]()
    with pytest.raises(ValueError, match="derivative of a function that returns"):
        ql.materialise(jax.jacfwd(lambda s: x * s)(3.0))


def test_a_rule_returns_nothing_to_jacfwd():
    """JAX itself calls rules while it evaluates a derivative, with no function of the user's between."""
    x = NamedArray(MAKE["Int8Array"](), ("a", "b"))
    hessian = jax.hessian(lambda x: jnp.sum(jnp.real(x * jnp.conj(x))))

    def of_scales(s):
        scaled = lambda leaf: leaf * s if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
        return ql.materialise(ql.quaxify(hessian)(jax.tree.map(scaled, x)))

    s = jnp.float32(2.0)
    with ql.on_materialise("allow"):
        got, tangent = jax.jit(lambda s: jax.jvp(of_scales, (s,), (s,)))(s)
    np.testing.assert_allclose(got, jax.jit(hessian)(s * ql.materialise(x)), rtol=1e-6)
    np.testing.assert_array_equal(tangent, np.zeros_like(tangent))


def test_values_of_inexact_leaves_are_returned():
    x = DiagonalMatrix(jnp.arange(1.0, 4.0))
    np.testing.assert_array_equal(jax.jacfwd(ql.quaxify(lambda s: x * s))(3.0).diagonal, x.diagonal)
