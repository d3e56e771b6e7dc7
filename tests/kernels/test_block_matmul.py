"""Weights in block formats run in the fused kernels, on GPUs and TPUs, as the reference does."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import kernels
from quaxlike.kernels.block_matmul import block_matmul_p, gpu, primitive, reference
from tests.primitives.jaxprs import equations
from tests.samples import normal

from .weights import lowered, relative_error, tpu_at_hand

FUSED = [
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "fp8",
    "q4_0",
    "q4_1",
    "q4_k",
    "q8_0",
    "iq4_nl",
    "uint4_block",
    "int8_block",
]
N, K = 128, 256


def _product(codec, transpose, dtype=jnp.bfloat16, m=3, make=lambda fn, *args: fn(*args)):
    w = make(functools.partial(ql.BlockArray.quantize, codec=codec), normal(N, K, dtype=dtype))
    x = normal(m, N if transpose else K, dtype=dtype, seed=1)
    return ql.quaxify(lambda x, w: x @ (w if transpose else w.T)), x, w


def _choice(codec, transpose, platform, **options):
    fn, x, w = _product(codec, transpose, make=jax.eval_shape, **options)
    (eqn,) = [eqn for eqn in equations(jax.make_jaxpr(fn)(x, w)) if eqn.primitive is block_matmul_p]
    with tpu_at_hand() if platform == "tpu" else contextlib.nullcontext():
        operands = (v.aval for v in eqn.invars)
        return kernels.chosen_backend(eqn.primitive, *operands, platform=platform, **eqn.params)


@pytest.mark.quick(16)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("codec", FUSED)
def test_formats_are_fused(codec, transpose):
    assert _choice(codec, transpose, "cuda").reason == "one fused kernel"
    assert _choice(codec, transpose, "tpu").reason == "a Pallas kernel"


@pytest.mark.parametrize(
    ("codec", "options", "reason"),
    [
        ("int3_block", {}, "does not take codes of this format"),
        ("q4_0", {"m": 129}, "1 to 128 rows of x, not 129"),
        ("q4_0", {"dtype": jnp.float32}, "takes bfloat16 and float16, not float32"),
    ],
)
def test_what_is_not_fused_is_told(codec, options, reason):
    assert reason in _choice(codec, False, "cuda", **options).reason


@pytest.mark.quick(2)
@pytest.mark.parametrize("codec", ["mxfp4", "q4_1", "q8_0"])
def test_lowers_for_cuda(codec):
    fn, x, w = _product(codec, False, make=jax.eval_shape)
    backward = lambda x, w: jax.grad(lambda x: jnp.sum(fn(x, w).astype(jnp.float32)))(x)
    for f in (fn, backward):
        assert "stored_matmul" in jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.quick("uint4_block-True")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("codec", ["mxfp4", "q4_1", "uint4_block", "fp8"])
def test_the_tpu_kernel_interpreted(codec, transpose):
    fn, x, w = _product(codec, transpose, jnp.float32)
    with kernels.backend("tpu"):
        y = jax.jit(fn)(x, w)
    dense = np.float64(w.materialise())
    assert relative_error(y, np.float64(x) @ (dense if transpose else dense.T)) < 1e-5


def _adapted(codec, dtype, make=lambda fn, *args: fn(*args)):
    fn, x, w = _product(codec, False, dtype, make=make)
    a, b = normal(4, K, dtype=dtype, seed=2), normal(N, 4, dtype=dtype, seed=3)
    return fn, x, ql.LoraArray(w, a, b, alpha=8)


@pytest.mark.quick(2)
@pytest.mark.parametrize("codec", ["mxfp4", "q4_1", "q8_0"])
def test_adapters_are_fused_on_devices(codec):
    fn, x, w = _adapted(codec, jnp.bfloat16, make=jax.eval_shape)
    assert "stored_matmul" in lowered(fn, x, w)
    with tpu_at_hand():
        assert "tpu_custom_call" in lowered(fn, x, w, platform="tpu")


@pytest.mark.quick("mxfp4-gpu")
@pytest.mark.parametrize("backend", ["gpu", "tpu"])
@pytest.mark.parametrize("codec", ["mxfp4", "q4_1", "q6_k", "int8"])
def test_adapters_on_other_backends(codec, backend):
    fn, x, w = _adapted(codec, jnp.float32)
    with kernels.backend(backend):
        y = jax.jit(fn)(x, w)
    dense = np.float64(ql.materialise(w.w)) + w.scaling * np.float64(w.b) @ np.float64(w.a)
    assert relative_error(y, np.float64(x) @ dense.T) < 1e-5


@pytest.mark.quick("quantize0", "quantize1")
@pytest.mark.parametrize("quantise", [ql.NF4Array.quantize, ql.Int8Array.quantize, ql.BlockArray.quantize])
def test_the_reference_is_traced_once(quantise, monkeypatch):
    traced = []
    count = lambda *args, **params: traced.append(1) or reference.tiled(*args, **params)
    monkeypatch.setattr(primitive, "tiled", count)
    w = quantise(normal(24, 64))
    with kernels.backend("reference"):
        jax.block_until_ready(ql.quaxify(lambda x, w: x @ w.T)(normal(7, 64), w))
    assert len(traced) == 1


@pytest.mark.quick("mxfp4-False")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("codec", ["mxfp4", "q6_k"])
def test_many_rows_are_decoded_in_chunks(codec, transpose, monkeypatch):
    monkeypatch.setattr(gpu, "_MOST", N * K)  # a quarter, in float32
    fn, x, w = _product(codec, transpose, jnp.float32, m=65)
    expected = np.float64(x) @ np.float64(ql.materialise(w) if transpose else ql.materialise(w).T)
    with kernels.backend("gpu"):
        lowered = jax.jit(fn).lower(x, w)
        assert relative_error(fn(x, w), expected) < 1e-6
    assert lowered.as_text().count("stablehlo.dot_general") == 4
    assert "decoded for the library's product" in _choice(codec, transpose, "cuda", m=2000).reason
    assert "in the expression of the library's product" in _choice("q6_k", transpose, "cuda", m=64).reason


@pytest.mark.quick("63-f32-True", "64-bf16-False", "64-bf16-True")
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("m", "dtype"), [(63, "f32"), (64, "bf16")])
def test_many_rows_are_multiplied_in_their_dtype(m, dtype, transpose):
    fn, x, w = _product("q4_k", transpose, jnp.bfloat16, m=m)
    with kernels.backend("reference"):
        program, y = jax.jit(fn).lower(x, w).as_text(), jax.jit(fn)(x, w)
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert products
    assert all(f"x{dtype}>, tensor" in line and "xf32>\n" in f"{line}\n" for line in products)
    dense = np.float64(ql.materialise(w).astype(jnp.float32))
    assert relative_error(y, np.float64(x) @ (dense if transpose else dense.T)) < 4e-3
