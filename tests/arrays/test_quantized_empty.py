"""Quantised arrays without rows or without columns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import kernels

QUANTIZE = {cls.__name__: cls.quantize for cls in (ql.NF4Array, ql.FP4Array, ql.Int4Array, ql.Int8Array)}
QUANTIZE |= {
    codec: functools.partial(ql.BlockArray.quantize, codec=codec)
    for codec in ("fp8_block", "int3_block", "mxfp4", "nvfp4", "q2_k", "q4_k", "q8_0", "uint4_block")
}
KINDS = ("NF4Array", "Int8Array", "mxfp4")  # of weights, which the fallbacks of GPUs tell apart
PROGRAMS = {
    "x @ W.T": lambda w: jnp.ones((3, w.shape[1])) @ w.T,
    "x @ W": lambda w: jnp.ones((3, w.shape[0])) @ w,
    "many rows": lambda w: jnp.ones((130, w.shape[1])) @ w.T,
    "sum": jnp.sum,
    "rows": lambda w: jax.lax.map(lambda row: row * 2, w),
    "reshaped": lambda w: w.reshape(w.shape[::-1]),
    "stacked": lambda w: jnp.stack([w, w]),
}


@pytest.mark.quick("reference-uint4_block-shape1", "reference-q2_k-shape0")
@pytest.mark.parametrize("shape", [(0, 256), (64, 0), (0, 0)])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("reference", name) for name in QUANTIZE),
        *(pytest.param("gpu", name, marks=() if name in KINDS else pytest.mark.slow) for name in QUANTIZE),
    ],
)
@pytest.mark.filterwarnings("ignore::quaxlike.MaterialisationWarning")
@pytest.mark.filterwarnings("ignore::quaxlike.kernels.KernelFallbackWarning")
def test_is_what_it_is_on_arrays(name, shape, backend):
    dense = jnp.zeros(shape)

    def both(w):
        run = lambda w: [program(w) for program in PROGRAMS.values()]
        return run(dense), jax.tree.map(ql.materialise, ql.quaxify(run)(w), is_leaf=ql.is_value)

    with kernels.backend(backend):
        expected, found = jax.jit(both)(QUANTIZE[name](dense))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("rows", "experts"), [(0, 3), (4, 0), (0, 0)])
def test_products_by_expert(name, rows, experts):
    w, x = QUANTIZE[name](jnp.zeros((experts, 64, 32))), jnp.ones((rows, 64))
    with ql.on_materialise("error"):
        y = ql.quaxify(jax.lax.ragged_dot)(x, w, jnp.zeros(experts, int))
    np.testing.assert_array_equal(y, jnp.zeros((rows, 32)))
