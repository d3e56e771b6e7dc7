"""Products in 8 bits against float64 products of the rounded numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike.kernels import int8_matmul
from quaxlike.kernels.code_matmul import code_matmul, rounded_rows
from tests.samples import normal


def weight(activations, n=7, k=24, groups=1):
    rows = normal(n, groups, k // groups, seed=1)
    codes, scale = rounded_rows(rows, activations)
    codes = codes.reshape(n, k)
    return codes if activations == "int8" else codes.view(jnp.uint8), scale[..., 0]


def dense(codes, scale):
    values = np.asarray(codes if codes.dtype == np.int8 else codes.view(jnp.float8_e4m3fn), np.float64)
    return values * np.repeat(np.asarray(scale, np.float64), codes.shape[1] // scale.shape[1], axis=1)


def unrounded(x, codes, scale):
    values = codes if codes.dtype == jnp.int8 else jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return x @ (values.astype(jnp.float32) * jnp.repeat(scale, codes.shape[1] // scale.shape[1], axis=1)).T


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_the_product_of_rounded_rows(activations, groups):
    """Rows of zeros stay zeros; each row has its own scale."""
    codes, scale = weight(activations, groups=groups)
    x = normal(2, 5, 24, seed=2) * jnp.logspace(-3, 3, 5).reshape(1, 5, 1)
    x = x.at[0, 1].set(0)
    y = code_matmul(x, codes, scale, activations=activations, derivative=unrounded)
    each, of_row = rounded_rows(x, activations)
    rounded = np.asarray(each, np.float64) * np.asarray(of_row, np.float64)
    np.testing.assert_allclose(y, rounded @ dense(codes, scale).T, rtol=2e-6, atol=1e-9)
    assert not np.any(y[0, 1])
    step = np.abs(x).max(-1, keepdims=True) / 254 if activations == "int8" else np.abs(x) / 16
    assert np.all(np.abs(rounded - x) <= step * 1.0001 + np.abs(x).max(-1, keepdims=True) * 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_derivatives_are_those_without_rounding(activations):
    """Of inputs and of scales, forwards and backwards."""
    codes, scale = weight(activations)
    x, ct = normal(5, 24, seed=3), normal(5, 7, seed=4)
    run = lambda x, scale: code_matmul(x, codes, scale, activations=activations, derivative=unrounded)
    plain = lambda x, scale: unrounded(x, codes, scale)
    (found, wanted) = (jax.vjp(f, x, scale)[1](ct) for f in (run, plain))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    (found, wanted) = (jax.jvp(lambda x: f(x, scale), (x,), (x,))[1] for f in (run, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_numbers_beyond_the_limit_are_clipped():
    codes, scale = weight("int8")
    x = normal(5, 24, seed=2)
    y = code_matmul(x, codes, scale, activations="int8", derivative=unrounded, limit=1.5)
    rounded = np.clip(np.round(np.asarray(x) * (127 / 1.5)), -127, 127) * (1.5 / 127)
    np.testing.assert_allclose(y, rounded @ dense(codes, scale).T, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("activations", ["int8", "fp8"])
def test_gradients_by_products_of_codes(activations, groups):
    """Cotangents are rounded row by row, after the scales of the outputs; scales have exact derivatives."""
    codes, scale = weight(activations, groups=groups)
    x, ct = normal(2, 5, 24, seed=3), normal(2, 5, 7, seed=4) * jnp.logspace(-3, 3, 5).reshape(1, 5, 1)
    options = {"activations": activations, "derivative": unrounded, "rounds_gradients": True}
    run = lambda x, scale: code_matmul(x, codes, scale, **options)
    found = jax.jit(lambda *args: jax.vjp(run, *args[:2])[1](args[2]))(x, scale, ct)
    wanted = []
    for i, part in enumerate(np.split(dense(codes, jnp.ones_like(scale)), groups, axis=1)):
        each, of_row = rounded_rows(ct * scale[:, i].reshape(1, 1, -1), activations)
        wanted.append(np.asarray(each, np.float64) * np.asarray(of_row, np.float64) @ part)
    np.testing.assert_allclose(found[0], np.concatenate(wanted, axis=-1), rtol=2e-5, atol=1e-6)
    exact = jax.vjp(lambda x, scale: unrounded(x, codes, scale), x, scale)[1](ct)
    np.testing.assert_allclose(found[1], exact[1], rtol=1e-4, atol=1e-3)


def test_constant_scales_cost_no_derivative():
    codes, scale = weight("int8")
    plain = lambda x, codes, scale: int8_matmul(x, codes, scale)
    run = lambda x: code_matmul(x, codes, scale, activations="int8", derivative=plain)
    text = str(jax.make_jaxpr(lambda x: jax.vjp(run, x)[1](jnp.ones((5, 7))))(normal(5, 24)))
    assert text.count("= int8_matmul[") == 2  # of which the forward one is not used
    assert text.count("_:f32[5,7] = int8_matmul[") == 1


def test_sums_that_int32_cannot_hold():
    codes, scale = jax.ShapeDtypeStruct((2, 133_145), jnp.int8), jax.ShapeDtypeStruct((2, 1), jnp.float32)
    x = jax.ShapeDtypeStruct((1, 133_145), jnp.float32)
    run = functools.partial(code_matmul, activations="int8", derivative=unrounded)
    with pytest.raises(ValueError, match=r"adds up to 133,144 numbers in int32; found a weight of 133,145"):
        jax.eval_shape(run, x, codes, scale)
    codes, scale = jax.ShapeDtypeStruct((133_145, 2), jnp.int8), jax.ShapeDtypeStruct((133_145, 1), "float32")
    rounding = functools.partial(run, rounds_gradients=True)
    with pytest.raises(ValueError, match=r"a weight of 133,145 outputs"):
        jax.eval_shape(rounding, jax.ShapeDtypeStruct((1, 2), jnp.float32), codes, scale)
