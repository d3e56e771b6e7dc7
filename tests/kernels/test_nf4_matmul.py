import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike import kernels
from quaxlike.kernels import NestedScales, blockwise, nf4_matmul, nf4_matmul_p
from quaxlike.kernels.block_matmul import NIBBLES, gpu
from quaxlike.kernels.block_matmul import tpu as nf4_tpu
from quaxlike.kernels.block_matmul.product import Product
from tests.primitives.jaxprs import names
from tests.samples import array, normal

from .weights import quantised, relative_error, tpu_at_hand

BACKENDS = ["reference", "gpu", "tpu"]
# Rounding of the inputs is no error of the operation: the oracle sees rounded activations. Weights
# are rounded to the dtype of the activations.
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}


_MAY_FALL_BACK = pytest.mark.filterwarnings("ignore::quaxlike.kernels.KernelFallbackWarning")


def _x(w, lead, transpose=False, dtype="float32"):
    return normal(*lead, w.dense.shape[not transpose], dtype=dtype)


def _nested(absmax):
    return NestedScales(*blockwise.quantize_scales(absmax), jnp.asarray(blockwise.dynamic_map()))


def _expected(x, w, transpose=False):
    return np.float64(x) @ (w.dense if transpose else w.dense.T)


@pytest.mark.parametrize("backend", BACKENDS)
class TestOnEachBackend:
    @pytest.fixture(autouse=True)
    def _on_backend(self, backend):
        with kernels.backend(backend):
            yield

    @pytest.mark.quick(2)
    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize(
        ("shape", "lead", "dtype"),
        [
            ((128, 256), (), "float32"),
            ((256, 512), (1,), "bfloat16"),
            ((128, 256), (3, 5), "bfloat16"),
            pytest.param((256, 512), (130,), "float32", marks=pytest.mark.slow),
            ((128, 768), (300,), "bfloat16"),
        ],
    )
    def test_equals_the_dense_product(self, backend, shape, lead, transpose, dtype):
        w = quantised(shape)
        x = _x(w, lead, transpose, dtype)
        y = jax.jit(functools.partial(nf4_matmul, transpose=transpose, **w.params))(x, *w.operands)
        assert y.dtype == x.dtype
        assert relative_error(y, _expected(x, w, transpose)) < TOLERANCE[dtype]

    @pytest.mark.quick("FP4-reference", "INT4-tpu")
    @pytest.mark.parametrize("codebook", ["FP4", "INT4"])
    def test_any_codebook(self, backend, codebook):
        w = quantised((128, 256), codebook=codebook)
        x = _x(w, (4,))
        assert relative_error(nf4_matmul(x, *w.operands, **w.params), _expected(x, w)) < 1e-6

    @pytest.mark.slow
    @pytest.mark.parametrize("transpose", [False, True])
    def test_nested_scales(self, backend, transpose):
        w = quantised((128, 256))
        packed, absmax, codebook = w.operands
        nested = _nested(absmax)
        x = _x(w, (4,), transpose)
        y = nf4_matmul(x, packed, nested, codebook, transpose=transpose, **w.params)
        absmax = blockwise.dequantize_scales(*nested[:3])
        expected = nf4_matmul(x, packed, absmax, codebook, transpose=transpose, **w.params)
        assert relative_error(y, expected) < 1e-6
        assert relative_error(y, _expected(x, w, transpose)) < 0.05

    @_MAY_FALL_BACK
    def test_half_precision(self, backend):
        w = quantised((128, 256))
        x = _x(w, (16,), dtype="float16")
        y = nf4_matmul(x, *w.operands, **w.params)
        assert relative_error(y, _expected(x, w)) < TOLERANCE["float16"]

    @pytest.mark.quick("shape0-64-True-tpu", "shape2-32-False-gpu")
    @_MAY_FALL_BACK
    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize(
        ("shape", "block_size"), [((33, 35), 64), ((7, 96), 64), ((12, 64), 32), ((40, 100), 4096)]
    )
    def test_blocks_that_cross_rows(self, backend, shape, block_size, transpose):
        w = quantised(shape, block_size)
        x = _x(w, (4,), transpose)
        y = nf4_matmul(x, *w.operands, transpose=transpose, **w.params)
        assert relative_error(y, _expected(x, w, transpose)) < 1e-6

    @pytest.mark.quick("reference", "gpu")
    def test_the_result_can_be_wider_than_the_activations(self, backend):
        w = quantised((128, 256))
        x = _x(w, (4,), dtype="bfloat16")
        y = nf4_matmul(x, *w.operands, out_dtype=jnp.float32, **w.params)
        assert y.dtype == jnp.float32
        assert relative_error(y, _expected(x, w)) < TOLERANCE["bfloat16"]

    @pytest.mark.slow
    @pytest.mark.parametrize("is_nested", [False, True])
    def test_gradient_of_x_is_the_transposed_contraction(self, backend, is_nested):
        w = quantised((128, 256))
        packed, absmax, codebook = w.operands
        absmax = _nested(absmax) if is_nested else absmax
        x = _x(w, (3,))
        loss = lambda x: jnp.sum(nf4_matmul(x, packed, absmax, codebook, **w.params) ** 2)
        assert [name for name in names(jax.grad(loss), x) if "matmul" in name] == ["nf4_matmul"] * 2
        expected = 2 * _expected(x, w) @ w.dense
        assert relative_error(jax.jit(jax.grad(loss))(x), expected) < (0.05 if is_nested else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("operand", ["absmax", "codebook"])
@pytest.mark.parametrize("transpose", [False, True])
def test_scales_and_codebook_can_be_trained(operand, transpose):
    w = quantised((48, 64))
    packed, absmax, codebook = w.operands
    x = _x(w, (3,), transpose)
    position = {"absmax": 1, "codebook": 2}[operand]

    def dense(*operands):
        flat = blockwise.dequantize_codebook(*operands, n=w.dense.size, block_size=64)
        return flat.reshape(w.dense.shape)

    product = lambda x, *operands: x @ (dense(*operands) if transpose else dense(*operands).T)
    fused = functools.partial(nf4_matmul, transpose=transpose, **w.params)
    operands = packed, absmax, jnp.asarray(codebook)
    of = lambda fn: jax.grad(lambda *ops: jnp.sum(jnp.sin(fn(x, *ops))), position)(*operands)
    assert relative_error(of(fused), of(product)) < 1e-5


@pytest.mark.slow
def test_second_derivatives():
    w = quantised((48, 64))
    x, v = _x(w, (64,))[:2]
    loss = lambda fn: lambda x: jnp.sum(jnp.sin(fn(x)))
    fused = loss(lambda x: nf4_matmul(x, *w.operands, **w.params))
    dense = loss(lambda x: x @ w.dense.T.astype(np.float32))
    hvp = lambda fn: jax.jvp(jax.grad(fn), (x,), (v,))[1]
    assert relative_error(hvp(fused), hvp(dense)) < 1e-5
    assert names(lambda: hvp(fused)).count("nf4_matmul") == 4


def test_vmap_over_x_is_one_matmul():
    w = quantised((48, 64))
    x = _x(w, (5, 3))
    fn = jax.vmap(lambda x: nf4_matmul(x, *w.operands, **w.params), in_axes=1, out_axes=2)
    assert names(fn, x) == ["transpose", "nf4_matmul", "transpose"]
    assert relative_error(fn(x), np.moveaxis(_expected(np.moveaxis(x, 1, 0), w), 0, 2)) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("axis", [None, 0])
def test_vmap_over_weights(axis):
    layers = [quantised((48, 64), seed=i) for i in range(3)]
    packed, absmax = (jnp.stack([w.operands[i] for w in layers]) for i in range(2))
    x = _x(layers[0], (3, 2))
    fn = lambda x, packed, absmax: nf4_matmul(x, packed, absmax, blockwise.NF4, **layers[0].params)
    mapped = jax.vmap(fn, in_axes=(axis, 0, 0))
    assert "nf4_matmul" in names(mapped, x, packed, absmax)
    rows = [x] * 3 if axis is None else x
    expected = np.stack([_expected(r, w) for r, w in zip(rows, layers, strict=True)])
    assert relative_error(mapped(x, packed, absmax), expected) < 1e-6
    grad = jax.grad(lambda x: jnp.sum(jnp.sin(mapped(x, packed, absmax))))(x)
    dense = jnp.stack([w.dense.astype(np.float32) for w in layers])
    product = jax.vmap(lambda x, w: x @ w.T, in_axes=(axis, 0))
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(product(x, dense))))(x)
    assert relative_error(grad, expected) < 1e-5


def test_double_precision_is_kept(x64):
    w = quantised((48, 64))
    x = _x(w, (3,), dtype="float64")
    for backend in ("reference", "gpu"):
        with kernels.backend(backend):
            y = nf4_matmul(x, *w.operands, **w.params)
        assert y.dtype == jnp.float64
        assert relative_error(y, _expected(x, w)) < 1e-14


@pytest.mark.slow
def test_no_dense_copy_between_forward_and_backward():
    w = quantised((2048, 2048))
    x = _x(w, (16,))
    layer = lambda x: nf4_matmul(jnp.tanh(x), *w.operands, **w.params)
    step = jax.jit(jax.grad(lambda x: jnp.sum(layer(layer(x)))))
    temporary = step.lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temporary < w.dense.size * 4 / 2


# Blocks that cross rows, and blocks within rows; a last chunk that is smaller.
@pytest.mark.quick("True-shape0-64")
@pytest.mark.parametrize(("shape", "block_size"), [((67, 96), 64), ((50, 160), 32)])
@pytest.mark.parametrize("transpose", [False, True])
def test_chunks_end_where_blocks_do(shape, block_size, transpose, monkeypatch):
    monkeypatch.setattr(gpu, "_MOST", 8000)
    w = quantised(shape, block_size)
    x = _x(w, (4,), transpose)
    with kernels.backend("gpu"):
        multiply = lambda x: nf4_matmul(x, *w.operands, transpose=transpose, **w.params)
        assert relative_error(multiply(x), _expected(x, w, transpose)) < 1e-6
        assert jax.jit(multiply).lower(x).as_text().count("stablehlo.dot_general") > 3


def test_chunks_of_a_large_weight():
    assert gpu.chunk_size(14336, 2 * 4096) == 14336
    assert gpu.chunk_size(131072, 2 * 8192, aligned=64) == 8192  # 128 MiB


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"x": array(np.ones((2, 63)))}, r"last axis of x must be K = 64 .* got x of shape \(2, 63\)"),
        ({"transpose": True}, r"last axis of x must be N = 48"),
        ({"packed": array(np.zeros(7, jnp.uint8))}, r"packed .* must have shape \(1536,\), got \(7,\)"),
        ({"absmax": array(np.ones(7))}, r"absmax .* must have shape \(48,\), got \(7,\)"),
        ({"codebook": array(np.ones(8))}, r"codebook .* must have shape \(16,\), got \(8,\)"),
        ({"block_size": 63}, r"block_size must be a positive even number, got 63"),
    ],
)
def test_operands_that_do_not_fit(change, match):
    w = quantised((48, 64))
    names = ("packed", "absmax", "codebook")
    arguments = {"x": jnp.ones((2, 64))} | dict(zip(names, w.operands, strict=True)) | w.params
    with pytest.raises(ValueError, match=match):
        nf4_matmul(**(arguments | change))


def test_chosen_backend_tells_what_runs():
    w = quantised((128, 256))
    x = jnp.ones((2, 256))
    (eqn,) = jax.make_jaxpr(lambda x: nf4_matmul(x, *w.operands, **w.params))(x).eqns
    on = lambda platform: kernels.chosen_backend(
        eqn.primitive, *(v.aval for v in eqn.invars), platform=platform, **eqn.params
    )
    assert eqn.primitive is nf4_matmul_p
    assert on("cpu").backend in ("native", "reference")
    assert on("cuda").backend == on("rocm").backend == "gpu"
    assert on("tpu").backend == "reference"
    assert "must know which TPU" in on("tpu").reason
    with tpu_at_hand():
        assert on("tpu").backend == "tpu"
    with kernels.backend("tpu"):
        (eqn,) = jax.make_jaxpr(lambda x: nf4_matmul(x, *w.operands, **w.params))(x).eqns
    assert on(None).reason == "a Pallas kernel, interpreted"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": (96, 256)}, r"multiples of 128 and 256, not \(96, 256\)"),
        ({"block_size": 96}, "blocks of a power of two within rows, not 96"),
        ({"dtype": "float16"}, "bfloat16 and float32, not float16"),
        ({"m": 0}, "at least one row"),
        ({"platform": "cuda"}, "not on platform 'cuda'"),
    ],
)
def test_what_the_tpu_kernel_takes(change, reason):
    given = {"m": 4, "dtype": "bfloat16", "shape": (128, 256), "platform": "tpu"} | change
    m, dtype, platform = (given.pop(name) for name in ("m", "dtype", "platform"))
    product = Product(**({"block_size": 64} | given))
    x = jax.ShapeDtypeStruct((m, product.contracted), dtype)
    params = {"platform": platform, "backend": "tpu", "decode": NIBBLES, "product": product}
    with tpu_at_hand():
        choice = kernels.chosen_backend(nf4_matmul_p, x, None, None, None, **params)
    assert choice.backend == "reference"
    assert re.search(reason, choice.reason)


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("m", "nested"),
    [
        *((16, True), (512, False)),
        *(pytest.param(m, False, marks=pytest.mark.slow) for m in (1, 16, 64, 4096)),
    ],
)
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 4096),
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(14336, 4096), (4096, 14336)]),
    ],
    ids=str,
)
def test_lowers_for_tpu(shape, m, nested, transpose):
    n, k = shape
    of, blocks = jax.ShapeDtypeStruct, n * k // 64
    absmax = of((blocks,), jnp.float32)
    if nested:
        sizes = ((blocks,), jnp.uint8), ((blocks // 256,), jnp.float32), ((), jnp.float32)
        absmax = NestedScales(*(of(*size) for size in sizes), of((256,), jnp.float32))
    operands = of((n * k // 2,), jnp.uint8), absmax
    fn = lambda x, packed, absmax: nf4_matmul(
        x, packed, absmax, blockwise.NF4, shape=shape, block_size=64, transpose=transpose
    )
    with tpu_at_hand():
        traced = jax.jit(fn).trace(of((m, shape[not transpose]), jnp.bfloat16), *operands)
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_codes_are_looked_up_along_lanes_before_tpu_v5(monkeypatch):
    w = quantised((128, 256))
    run = functools.partial(nf4_matmul, **w.params)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (_x(w, (16,)), *w.operands))
    with tpu_at_hand("TPU v4"):
        traced = jax.jit(run).trace(*shapes)
        assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    asked = []
    monkeypatch.setattr(nf4_tpu, "_looks_up_along_sublanes", asked.append)
    x = _x(w, (7,))
    with kernels.backend("tpu"):
        y = jax.jit(lambda x: run(x, *w.operands))(x)
    assert asked == [True]
    assert relative_error(y, _expected(x, w)) < TOLERANCE["float32"]


@pytest.mark.parametrize("stored", ["array", "tuple", "usual"])
def test_the_map_of_nested_scales(stored):
    """Kernels take it however it is stored; only an array is a leaf."""
    w = quantised((128, 256))
    packed, absmax, codebook = w.operands
    nested, x = _nested(absmax), _x(w, (4,), False)
    quant_map = {"array": nested.quant_map, "tuple": tuple(nested.quant_map.tolist()), "usual": None}[stored]
    scales = dataclasses.replace(nested, quant_map=quant_map)
    assert len(jax.tree.leaves(scales)) == (4 if stored == "array" else 3)
    product = lambda scales: nf4_matmul(x, packed, scales, codebook, **w.params)
    np.testing.assert_array_equal(jax.jit(product)(scales), product(nested))
    again = jax.tree.map(lambda leaf: leaf, scales)
    assert jax.tree.structure(again) == jax.tree.structure(scales)
    assert stored == "array" or again.quant_map == quant_map
