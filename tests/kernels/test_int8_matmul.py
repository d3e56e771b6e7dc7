"""The int8 matmul against a float64 product with the dequantised weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike.kernels import blockwise, int8_matmul
from quaxlike.kernels.block_matmul import INTEGERS, gpu, reference
from quaxlike.kernels.block_matmul.product import Product


def _operands(m, shape, block_size, transpose):
    rng = np.random.default_rng(sum(shape) + m)
    weight = jnp.asarray(rng.standard_normal(shape), jnp.float32)
    codes, scale = blockwise.quantize_int(weight, 127, block_size)
    dense = np.asarray(blockwise.dequantize_int(codes, scale, block_size=block_size), np.float64)
    x = jnp.asarray(rng.standard_normal((m, shape[not transpose])), jnp.float32)
    return x, codes, scale, np.asarray(x, np.float64) @ (dense if transpose else dense.T)


def _relative_error(y, expected):
    return np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected)


@pytest.mark.quick(2)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize("shape", [(67, 40), (8, 33), (1, 1)])
def test_equals_the_dense_product(monkeypatch, shape, block_size, transpose):
    monkeypatch.setattr(reference, "_TILE_FEW", 512)
    x, codes, scale, expected = _operands(3, shape, block_size, transpose)
    y = int8_matmul(x, codes, scale, block_size=block_size, transpose=transpose)
    assert _relative_error(y, expected) < 1e-6
    product = Product(shape, block_size or shape[1], transpose, y.dtype)
    y = reference.whole(x, (codes, scale), decode=INTEGERS, product=product)
    assert _relative_error(y, expected) < 1e-6


@pytest.mark.quick("19-shape0-None-False-float32")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("block_size", [None, 16])
@pytest.mark.parametrize(("m", "shape"), [(19, (67, 40)), (3, (8, 33)), (0, (8, 16)), (3, (0, 16))])
def test_parts_for_gpus_give_the_product(monkeypatch, m, shape, block_size, transpose, dtype):
    monkeypatch.setattr(gpu, "_LEAST", 64)
    x, codes, scale, _ = _operands(m, shape, block_size, transpose)
    x = x.astype(dtype).reshape(m, 1, x.shape[1])
    product = Product(shape, block_size or shape[1], transpose, np.dtype("float32"))
    y, expected = (
        run(x, (codes, scale), decode=INTEGERS, product=product) for run in (gpu.chunked, reference.whole)
    )
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("transpose", "products"), [(False, 1), (True, 4)])
def test_on_gpus_activations_meet_scales_a_quarter_at_a_time(transpose, products):
    shape = n, k = 14336, 4096
    of = jax.ShapeDtypeStruct
    matmul = jax.jit(lambda *operands: int8_matmul(*operands, transpose=transpose))
    for m, count in ((4096, products), (1024, 1)):
        operands = of((m, n if transpose else k), jnp.bfloat16), of(shape, jnp.int8), of((n, 1), jnp.float32)
        text = matmul.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.dot_general") == count


@pytest.mark.slow
def test_gradients_and_vmap():
    x, codes, scale, _ = _operands(3, (8, 32), None, False)
    dense = lambda scale: codes.astype(jnp.float32) * scale
    loss = lambda y: jnp.sum(jnp.sin(y))
    actual = jax.grad(lambda x, scale: loss(int8_matmul(x, codes, scale)), argnums=(0, 1))(x, scale)
    expected = jax.grad(lambda x, scale: loss(x @ dense(scale).T), argnums=(0, 1))(x, scale)
    assert all(_relative_error(a, np.float64(e)) < 1e-5 for a, e in zip(actual, expected, strict=True))
    stacked = [jnp.stack([a, a[::-1]]) for a in (codes, scale)]
    y = jax.vmap(int8_matmul, in_axes=(None, 0, 0))(x, *stacked)
    np.testing.assert_allclose(y[1], (x @ dense(scale).T)[:, ::-1], atol=1e-4)


@pytest.mark.parametrize("transpose", [False, True])
def test_no_dense_copy_of_the_weight(transpose):
    n = 2048
    operands = [
        jax.ShapeDtypeStruct((16, n), jnp.float32),
        jax.ShapeDtypeStruct((n, n), jnp.int8),
        jax.ShapeDtypeStruct((n, 1), jnp.float32),
    ]
    matmul = jax.jit(lambda *operands: int8_matmul(*operands, transpose=transpose))
    # A tile of 4 MiB, where the dense weight would take 16.
    assert matmul.lower(*operands).compile().memory_analysis().temp_size_in_bytes <= 5 * 2**20


def test_shapes_are_checked():
    x, codes, scale, _ = _operands(3, (8, 32), None, False)
    with pytest.raises(ValueError, match=r"scale of a weight of shape \(8, 32\) in blocks of 16"):
        int8_matmul(x, codes, scale, block_size=16)
    with pytest.raises(ValueError, match=r"last axis of x must be N .* got x of shape \(3, 32\)"):
        int8_matmul(x, codes, scale, transpose=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("block_size", [None, 16])
def test_one_expression_in_half_precision(block_size, transpose, dtype):
    x, codes, scale, _ = _operands(3, (67, 40), block_size, transpose)
    x = x.astype(dtype) * jnp.asarray(1e-3, dtype)  # in float16 a product with scales would be subnormal
    product = Product((67, 40), block_size or 40, transpose, np.dtype("float32"))
    dense = np.asarray(blockwise.dequantize_int(codes, scale, block_size=product.block_size), np.float64)
    expected = np.asarray(x, np.float64) @ (dense if transpose else dense.T)
    y = reference.whole(x, (codes, scale), decode=INTEGERS, product=product)
    # With scales of rows outside of the product nothing is rounded but the sum.
    exact = block_size is None and not transpose
    assert _relative_error(y, expected) < (1e-6 if exact else {"bfloat16": 4e-3, "float16": 5e-4}[dtype])
