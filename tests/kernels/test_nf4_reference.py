"""The tiled 4-bit matmul against a float64 product with the dequantised weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaxlike.kernels import blockwise
from quaxlike.kernels.block_matmul import NIBBLES, reference
from quaxlike.kernels.block_matmul.product import Product


def _matmul(x, packed, absmax, codebook, *, shape, block_size, transpose=False, out_dtype=None):
    product = Product(shape, block_size, transpose, np.dtype(out_dtype or x.dtype))
    return reference.tiled(x, (packed, absmax, jnp.asarray(codebook)), decode=NIBBLES, product=product)


def _operands(m, shape, block_size, transpose, codebook=blockwise.NF4, dtype=jnp.float32):
    rng = np.random.default_rng(sum(shape) + m)
    weight = rng.standard_normal(shape).astype(np.float32)
    packed, absmax = blockwise.quantize_codebook(weight, codebook, block_size)
    dense = blockwise.dequantize_codebook(
        packed, absmax, codebook, n=weight.size, block_size=block_size, dtype=dtype
    )
    dense = np.asarray(dense, np.float64).reshape(shape)
    x = jnp.asarray(rng.standard_normal((m, shape[not transpose])), dtype)
    expected = np.asarray(x, np.float64) @ (dense if transpose else dense.T)
    return x, packed, absmax, expected


def _check(m, shape, block_size, transpose, codebook=blockwise.NF4):
    x, packed, absmax, expected = _operands(m, shape, block_size, transpose, codebook)
    y = jax.jit(
        lambda *operands: _matmul(
            *operands, codebook, shape=shape, block_size=block_size, transpose=transpose
        )
    )(x, packed, absmax)
    assert y.dtype == x.dtype
    error = np.linalg.norm(y - expected) / max(np.linalg.norm(expected), 1e-30)
    assert error < 5e-7


@pytest.mark.slow
@settings(max_examples=8)
@given(
    st.sampled_from([1, 3, 40]),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from([32, 64, 512]),
    st.booleans(),
    st.sampled_from(["NF4", "FP4"]),
)
def test_any_shape(m, shape, block_size, transpose, codebook):
    _check(m, shape, block_size, transpose, getattr(blockwise, codebook))


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("m", [2, 33])
@pytest.mark.parametrize("shape", [(130, 64), (67, 33), (129, 40), (2, 500), (3, 501)])
def test_many_tiles_and_a_remainder(monkeypatch, m, shape, transpose):
    monkeypatch.setattr(reference, "_TILE_FEW", 1024)
    monkeypatch.setattr(reference, "_TILE_MANY", 2048)
    _check(m, shape, 64, transpose)


@pytest.mark.quick("True-float16")
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("transpose", [False, True])
def test_weights_are_rounded_to_the_dtype_of_x(dtype, transpose):
    x, packed, absmax, expected = _operands(4, (64, 96), 64, transpose, dtype=dtype)
    y = jax.jit(
        lambda *operands: _matmul(
            *operands,
            blockwise.NF4,
            shape=(64, 96),
            block_size=64,
            transpose=transpose,
            out_dtype=jnp.float32,
        )
    )(x, packed, absmax)
    assert np.linalg.norm(y - expected) / np.linalg.norm(expected) < 5e-7


@pytest.mark.slow
def test_leading_axes_of_x_and_vmap_over_weights():
    x, packed, absmax, expected = _operands(6, (8, 64), 64, False)
    matmul = lambda x, packed, absmax: _matmul(x, packed, absmax, blockwise.NF4, shape=(8, 64), block_size=64)
    y = matmul(x.reshape(2, 3, 64), packed, absmax)
    np.testing.assert_allclose(y, expected.reshape(2, 3, 8), rtol=1e-5, atol=1e-5)
    stacked = [jnp.stack([a, a]) for a in (packed, absmax)]
    y = jax.vmap(matmul, in_axes=(None, 0, 0))(x, *stacked)
    np.testing.assert_allclose(y, np.stack([expected] * 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transpose", [False, True])
def test_no_dense_copy_of_the_weight(transpose):
    n = k = 4096
    matmul = jax.jit(
        lambda *operands: _matmul(*operands, blockwise.NF4, shape=(n, k), block_size=64, transpose=transpose)
    )
    operands = [
        jax.ShapeDtypeStruct((16, k), jnp.float32),
        jax.ShapeDtypeStruct((n * k // 2,), jnp.uint8),
        jax.ShapeDtypeStruct((n * k // 64,), jnp.float32),
    ]
    memory = matmul.lower(*operands).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 8 * 2**20
