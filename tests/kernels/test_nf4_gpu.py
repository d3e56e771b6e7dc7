"""The fused kernel for GPUs: its program executed in a model of a GPU, and lowered for CUDA."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaxlike import kernels
from quaxlike.kernels import NestedScales, blockwise, lora_matmul, nf4_matmul
from quaxlike.kernels.block_matmul import NIBBLES, gpu, tilings
from quaxlike.kernels.block_matmul.product import Product
from quaxlike.kernels.block_matmul.tilings import Problem, Tiling
from tests.samples import Late

from . import simt
from .programs import DTYPES, FORMATS, execute, problem, stored
from .weights import gpu_at_hand, lowered, relative_error, stored_nf4, tpu_at_hand

# Each of them imports Mosaic.
decode_rows, mosaic = (Late(f"quaxlike.kernels.block_matmul.{name}") for name in ("decode_rows", "mosaic"))

TABLE = [tiling for *_, tiling in tilings._TILINGS]


@pytest.mark.slow
@pytest.mark.parametrize("tiling", sorted(set(TABLE), key=str), ids=str)
def test_the_program_computes_the_product(tiling):
    # Neither rows, tokens nor columns fill the last tile, block or step.
    p = problem(m=19, n=tiling.rows + 24, k=64 * (tiling.k_warps + 1))
    y, expected, stats = execute(p, tiling)
    assert relative_error(y, expected) < 1e-6
    # Sums of fewer than 32 features are read from two tokens at a time.
    assert stats.load_conflicts <= (tiling.rows < 32)
    assert stats.cache_conflicts == 0


SPLIT = Tiling(1, 1, 2, 1, 3)
PROBLEMS = [
    (problem(64, 40, 192), Tiling(1, 2, 2, 2)),
    (problem(100, 40, 128), Tiling(2, 1, 4, 1)),
    (problem(3, 40, 512, block_size=256), SPLIT),
    (problem(9, 40, 128, scales="nested"), SPLIT),
    (problem(9, 40, 128, adapters=1, rank=48), SPLIT),
    (problem(70, 40, 64, adapters=5, rank=32), Tiling(1, 2, 2, 2)),
    (problem(7, 33, 128, bits=8, block_size=128, dtype="float16"), SPLIT),
]


@pytest.mark.slow
@pytest.mark.parametrize(("p", "tiling"), PROBLEMS, ids=str)
def test_kinds_of_problems(p, tiling):
    y, expected, _ = execute(p, tiling)
    assert relative_error(y, expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, transpose):
    form = {"kind": "float32", "zeros": None, "low_first": True, "bits": 4} | FORMATS[name]
    scales, kind = form.pop("scales"), form.pop("kind")
    product = Product((32, 128), transpose=transpose, **form)
    adapters = {} if transpose else {"adapters": 3, "rank": 16}
    p = Problem(product, 9, scales=scales, zeros=kind, **adapters)
    y, expected, _ = execute(p, Tiling(4 if transpose else 1, 1, 2, 1))
    assert relative_error(y, expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("m", "n", "k", "tiling"),
    [(3, 48, 64, Tiling(4, 1, 2, 1)), (40, 32, 192, Tiling(4, 2, 1, 2)), (9, 96, 128, Tiling(4, 1, 2, 1, 3))],
    ids=str,
)
def test_rows_are_contracted(m, n, k, tiling):
    y, expected, _ = execute(problem(m, n, k, transpose=True), tiling)
    assert relative_error(y, expected) < 1e-6


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("shape", [(14336, 4096), (4096, 14336), (4096, 4096)], ids=str)
@pytest.mark.parametrize(
    "form", [{}, {"transpose": True}, {"bits": 8, "block_size": 32, "zeros": "plus"}], ids=str
)
def test_tilings_fit_every_gpu(form, shape, m):
    p = problem(m, *shape, **({"block_size": 64} | form))
    tiling = tilings.tiling_for(p)
    assert mosaic.shared_words(p, tiling) * 4 <= 99 * 1024  # of compute capability 8.6 and 8.9
    assert tilings.blocks(p, tiling) >= 64


@pytest.mark.slow
@settings(max_examples=15)
@given(
    p=st.builds(
        problem,
        m=st.integers(1, 130),
        n=st.integers(1, 80),
        k=st.integers(1, 4).map(lambda i: 128 * i),
        block_size=st.sampled_from([64, 128]),
        adapters=st.integers(0, 3),
        rank=st.sampled_from([16, 80]),
        scales=st.sampled_from(["float32", "nested"]),
        dtype=st.sampled_from(["bfloat16", "float16"]),
    ),
    tiling=st.sampled_from(TABLE),
)
def test_anyproblem(p, tiling):
    y, expected, _ = execute(p, tiling)
    assert relative_error(y, expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_byte_is_decoded_bit_for_bit(dtype):
    # Rows of the identity read one weight each: a product with one, sums with zeros.
    p, tiling = problem(64, 256, 64, dtype=dtype), Tiling(2, 2, 2, 1)
    packed = (np.arange(256)[:, None] + 37 * np.arange(32)).astype(np.uint8)
    absmax = np.random.default_rng(0).uniform(0.5, 2, 256).astype(np.float32)
    y, _ = simt.run(
        functools.partial(mosaic.emit, p=p, tiling=tiling),
        [np.eye(64).astype(DTYPES[dtype]), packed, absmax, blockwise.NF4],
        ((64, 256), np.float32),
        [((mosaic.shared_words(p, tiling),), np.uint32)],
        blocks=tilings.blocks(p, tiling),
        threads=tiling.threads,
    )
    codes = np.stack([packed >> 4, packed & 15], -1).reshape(256, 64)
    weights = blockwise.NF4.astype(DTYPES[dtype]).astype(np.float32)[codes] * absmax[:, None]
    np.testing.assert_array_equal(y.T, weights)


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*FORMATS, "nested"])
def test_rows_are_decoded(name, dtype, monkeypatch):
    monkeypatch.setattr("quaxlike.kernels.block_matmul.decode_rows.BLOCKS", 2)
    form = {"kind": "float32", "zeros": None, "low_first": True, "bits": 4}
    form |= FORMATS.get(name, {"block_size": 64, "scales": "nested"})
    scales, kind = form.pop("scales"), form.pop("kind")
    p = Problem(Product((80, 640), **form), 0, dtype, scales=scales, zeros=kind)
    first, rows = 16, 56  # more than the threads decode at once, and no multiple of it
    operands, dense = stored(p)
    y, _ = simt.run(
        functools.partial(decode_rows.emit, p=p, first=first, rows=rows),
        operands,
        ((rows, 640), DTYPES[dtype]),
        [((decode_rows.shared_words(p),), np.uint32)],
        blocks=2,
        threads=decode_rows.THREADS,
    )
    np.testing.assert_array_equal(y, dense[first : first + rows].astype(np.float32).astype(DTYPES[dtype]))


@pytest.mark.slow
@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_the_weight_are_reduced(nested):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((96, 128)).astype(np.float32)
    packed, absmax = blockwise.quantize_codebook(jnp.asarray(w), blockwise.NF4, block_size=64)
    if nested:
        absmax = NestedScales(*blockwise.quantize_scales(absmax), jnp.asarray(blockwise.dynamic_map()))
    dense = blockwise.dequantize_codebook(
        packed, gpu.dense_scales(absmax), blockwise.NF4, n=w.size, block_size=64
    )
    x = jnp.asarray(rng.standard_normal((2, 96)), jnp.float32)
    product = Product(w.shape, 64, transpose=True)
    y = gpu.reduced(x, packed, absmax, jnp.asarray(blockwise.NF4), product=product)
    assert relative_error(y, np.float64(x) @ np.float64(dense).reshape(w.shape)) < 1e-6


def test_adapters_that_the_kernel_cannot_address():
    x, b = (
        jax.ShapeDtypeStruct((4, 4096), jnp.bfloat16),
        jax.ShapeDtypeStruct((1200, 14336, 64), jnp.bfloat16),
    )
    params = {"decode": NIBBLES, "product": Product((14336, 4096), 64), "platform": "cuda"}
    choice = kernels.chosen_backend(kernels.lora_matmul_p, x, None, None, None, None, b, **params)
    assert "up to 2 GiB of adapters, not those of shape (1200, 14336, 64)" in choice.reason


@pytest.mark.slow
def test_rounding_the_codebook_costs_less_than_rounding_the_weights():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((256, 1024)).astype(np.float32)
    packed, absmax = blockwise.quantize_codebook(jnp.asarray(w), blockwise.NF4, block_size=64)
    dense = lambda codebook: np.float64(
        blockwise.dequantize_codebook(packed, absmax, codebook, n=w.size, block_size=64)
    )
    exact = dense(blockwise.NF4)
    rounded_codebook = dense(blockwise.NF4.astype(ml_dtypes.bfloat16).astype(np.float32))
    rounded_weight = exact.astype(ml_dtypes.bfloat16)
    assert relative_error(rounded_codebook, exact) < relative_error(rounded_weight, exact)


@pytest.mark.quick("(4096, 4096)-1-False", "(14336, 4096)-64-True")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("m", [1, 16, 64, 4096])
@pytest.mark.parametrize("shape", [(4096, 4096), (14336, 4096), (4096, 14336)], ids=str)
def test_lowers_for_cuda(shape, m, nested):
    x = jax.ShapeDtypeStruct((m, shape[1]), jnp.bfloat16)
    fn = lambda x, packed, absmax: nf4_matmul(x, packed, absmax, blockwise.NF4, shape=shape, block_size=64)
    text = lowered(fn, x, *stored_nf4(*shape, nested))
    assert ("stored_matmul" in text) == (m <= 128)


@pytest.mark.quick("1", "65")
@pytest.mark.parametrize("m", [1, 64, 65])
def test_the_gradient_of_x_lowers_for_cuda(m):
    shape = n, k = 14336, 4096
    product = lambda x, *w: nf4_matmul(x, *w, blockwise.NF4, shape=shape, block_size=64)
    fn = lambda x, ct, *w: jax.vjp(lambda x: product(x, *w), x)[1](ct)
    x, ct = (jax.ShapeDtypeStruct((m, size), jnp.bfloat16) for size in (k, n))
    assert ("stored_matmul" in lowered(fn, x, ct, *stored_nf4(n, k))) == (m <= 64)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "adapters"), [(1, None), (4096, None), (64, 32)])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_adapters_lower(platform, m, adapters):
    shape = n, k = 14336, 4096
    lead = () if adapters is None else (adapters,)
    a = jax.ShapeDtypeStruct((*lead, 16, k), jnp.float32)
    b = jax.ShapeDtypeStruct((*lead, n, 16), jnp.float32)
    index = None if adapters is None else jnp.zeros(m, int)
    fn = lambda x, packed, absmax, a, b: lora_matmul(
        x, packed, absmax, blockwise.NF4, a, b, shape=shape, block_size=64, adapter_index=index
    )
    x = jax.ShapeDtypeStruct((m, k), jnp.bfloat16)
    with tpu_at_hand():
        text = lowered(fn, x, *stored_nf4(*shape), a, b, platform=platform)
    fused = m <= 128 or platform == "tpu"
    assert ({"cuda": "stored_matmul", "tpu": "tpu_custom_call"}[platform] in text) == fused


@pytest.mark.slow
def test_other_platforms_get_the_chunks():
    x = jax.ShapeDtypeStruct((16, 128), jnp.bfloat16)
    fn = lambda x, packed, absmax: nf4_matmul(
        x, packed, absmax, blockwise.NF4, shape=(64, 128), block_size=64
    )
    assert "stored_matmul" in lowered(fn, x, *stored_nf4(64, 128))
    assert "stored_matmul" not in lowered(fn, x, *stored_nf4(64, 128), platform="rocm")
    with kernels.backend("reference"):
        assert "stored_matmul" not in lowered(fn, x, *stored_nf4(64, 128))


def test_newer_gpus_get_no_fused_kernel():
    x = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
    with gpu_at_hand("12.0"):
        refusal = gpu.choose("cuda", x, product=Product((14336, 4096), 64), partitioned=False)
    assert "not for devices of compute capability 12.0" in refusal


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "one fused kernel"),
        ({"transpose": True}, "one fused kernel"),
        ({"transpose": True, "m": 65}, "1 to 64 rows of x, not 65"),
        ({"transpose": True, "shape": (40, 128)}, "16 rows at a time, not (40, 128)"),
        ({"transpose": True, "m": 1, "dtype": "float32"}, "one fused reduction over the rows of W"),
        ({"m": 129}, "1 to 128 rows of x, not 129"),
        ({"m": 0}, "1 to 128 rows of x, not 0"),
        ({"dtype": "float32"}, "takes bfloat16 and float16, not float32"),
        ({"block_size": 32}, "one fused kernel"),
        ({"block_size": 8}, "a multiple of 16 codes within rows, not 8"),
        ({"block_size": 256}, "a multiple of 16 codes within rows, not 256"),
        ({"shape": (64, 96), "block_size": 32}, "rows of a multiple of 64 columns"),
        ({"shape": (2**20, 2**14)}, "up to 2 GiB of codes"),
        ({"platform": "rocm"}, "compiles for CUDA, not for platform 'rocm'"),
    ],
)
def test_what_the_fused_kernel_takes(change, reason):
    given = {"m": 4, "dtype": "bfloat16", "shape": (64, 128), "platform": "cuda"} | change
    given = {"block_size": 64, "transpose": False} | given
    m, dtype, platform = (given.pop(name) for name in ("m", "dtype", "platform"))
    product = Product(**given)
    x = jax.ShapeDtypeStruct((m, product.contracted), dtype)
    params = {"platform": platform, "decode": NIBBLES, "product": product}
    choice = kernels.chosen_backend(kernels.nf4_matmul_p, x, None, None, None, **params)
    assert choice.backend == "gpu"
    assert reason in choice.reason
