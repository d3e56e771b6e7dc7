"""The fused kernel for many rows: its program executed in a model of a GPU, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaxlike.kernels import blockwise, lanes, lora_matmul, nf4_matmul
from quaxlike.kernels.block_matmul import costs, gpu, mosaic, wgmma
from quaxlike.kernels.block_matmul.product import Product
from quaxlike.kernels.block_matmul.tilings import Problem, Tiling

from .programs import FORMATS, execute, in_fixed_point, problem, run
from .weights import gpu_at_hand, lowered, quantised, relative_error, stored_nf4

# Warpgroups with one tile and 256 tokens, with two tiles and 128; blocks that share what is contracted.
ONE, TWO, SPLIT = Tiling(1, 8, 1, 1), Tiling(2, 8, 1, 1), Tiling(1, 8, 1, 1, 3)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("p", "tiling"),
    [
        (problem(40, 136, 320, wide=256), ONE),
        (problem(40, 260, 192, wide=128), TWO),
        (problem(20, 129, 256, wide=256), SPLIT),  # one feature at a time is stored
        (problem(70, 64, 128, wide=32, out_dtype="bfloat16"), ONE),  # groups of tokens
        (problem(32, 72, 256, scales="nested", wide=256), ONE),
        (problem(30, 72, 128, bits=8, block_size=128, dtype="float16", wide=128), TWO),
        (problem(30, 72, 64, adapters=1, rank=128, wide=256), SPLIT),
        (problem(30, 200, 64, adapters=1, rank=64, wide=128), TWO),
    ],
    ids=str,
)
def test_kinds_of_problems(p, tiling):
    y, expected, stats = execute(p, tiling)
    assert relative_error(y, expected) < (1e-2 if p.out_dtype == "bfloat16" else 1e-6)
    assert stats.load_conflicts == 0 or p.scales == "nested"


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    form = {"kind": "float32", "zeros": None, "low_first": True, "bits": 4} | FORMATS[name]
    scales, kind = form.pop("scales"), form.pop("kind")
    p = Problem(Product((128, 128), **form), 9, scales=scales, zeros=kind, wide=256)
    y, expected, _ = execute(p, ONE)
    assert relative_error(y, expected) < 1e-6


@pytest.mark.parametrize("codebook", [blockwise.NF4, blockwise.FP4], ids=["nf4", "fp4"])
def test_fixed_point_adds_nothing_to_rounding(codebook):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((256, 1024)).astype(np.float32)
    packed, absmax = blockwise.quantize_codebook(jnp.asarray(w), codebook, block_size=64)
    dense = lambda codebook: np.float64(
        blockwise.dequantize_codebook(packed, absmax, codebook, n=w.size, block_size=64)
    )
    rounded = lambda codebook: dense(codebook).astype(ml_dtypes.bfloat16)
    exact = dense(codebook)
    fixed = rounded(in_fixed_point(codebook).astype(np.float32))
    assert relative_error(fixed, exact) < 1.001 * relative_error(rounded(codebook), exact)


def test_fixed_point_is_exact_for_numbers_on_a_grid():
    mxfp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for values in (np.arange(-8, 8), np.arange(16), np.array([mxfp4, -mxfp4])):
        np.testing.assert_array_equal(in_fixed_point(values), values)


@pytest.mark.slow
@pytest.mark.parametrize("m", [129, 300])
def test_as_large_as_it_is_used(m):
    p = problem(m, 264, 1024, scales="nested")
    for tiling in (ONE, TWO):
        y, expected, _ = execute(p._replace(wide=costs.MOST_TOKENS[tiling.row_tiles]), tiling)
        assert relative_error(y, expected) < 1e-6


@pytest.mark.slow
@settings(max_examples=15)
@given(
    p=st.builds(
        problem,
        m=st.integers(1, 130),
        n=st.integers(1, 300),
        k=st.integers(1, 6).map(lambda i: 128 * i),
        block_size=st.sampled_from([16, 32, 64, 128]),
        adapters=st.just(1),
        rank=st.sampled_from([0, 64, 128]),
        scales=st.sampled_from(["float32", "nested", "bfloat16"]),
        dtype=st.sampled_from(["bfloat16", "float16"]),
        wide=st.sampled_from([32, 64, 128]),
        bits=st.sampled_from([4, 8]),
        zeros=st.just("float32"),
    ),
    row_tiles=st.integers(1, 2),
    splits=st.integers(1, 4),
)
def test_any_problem(p, row_tiles, splits):
    p = p._replace(adapters=int(p.rank > 0))
    y, expected, _ = execute(p, Tiling(row_tiles, 8, 1, 1, splits))
    assert relative_error(y, expected) < 1e-6


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "without", "error"),
    [
        ("publish_copies", lambda: None, "no fence between what is written and a product"),
        ("wgmma_fence", list, "no fence between a register"),
        ("wgmma_wait", lambda pending: None, "a product in flight reads this register"),
        ("wgmma_wait", lambda pending, wait=lanes.wgmma_wait: wait(pending + 1), "reads this register"),
        ("wgmma_sums", list, "sums of a product that is not done are read"),
        (
            "wait_for_copies",
            lambda pending, wait=lanes.wait_for_copies: wait(pending + 1),
            "no waiting for a copy",
        ),
        ("swizzled", lambda row, chunk: row * 128 + chunk * 16, None),
    ],
)
def test_the_model_notices(monkeypatch, name, without, error):
    if name == "wgmma_sums":  # and no wait for the last products
        monkeypatch.setattr(lanes, "wgmma_wait", lambda n, wait=lanes.wgmma_wait: wait(n) if n else None)
    monkeypatch.setattr(lanes, name, without)
    p = problem(8, 64, 512, wide=256)
    if error is None:
        y, expected, _ = execute(p, ONE)
        assert relative_error(y, expected) > 0.1
        return
    with pytest.raises(AssertionError, match=error):
        execute(p, ONE)


def test_the_model_notices_too_few_stages(monkeypatch):
    # Where what is multiplied is copied over.
    init = wgmma._OfWarpgroup.__init__

    def with_one_more_ahead(self, *args):
        init(self, *args)
        self.ahead += 1

    monkeypatch.setattr(wgmma._OfWarpgroup, "__init__", with_one_more_ahead)
    with pytest.raises(AssertionError, match="a product reads where a copy writes"):
        execute(problem(8, 64, 512, wide=256), ONE)


@pytest.mark.parametrize("m", [129, 512, 2048])
@pytest.mark.parametrize("shape", [(14336, 4096), (4096, 14336), (4096, 4096), (128, 64)], ids=str)
@pytest.mark.parametrize("form", [{}, {"bits": 8, "block_size": 32, "zeros": "plus"}], ids=str)
def test_plans_fit_the_hardware(form, shape, m):
    p, tiling = wgmma.of_warpgroups(problem(m, *shape, **form))
    assert wgmma.shared_words(p, tiling) * 4 <= 227 * 1024
    assert mosaic.stages(p, tiling) >= 3
    assert p.token_tiles * 8 <= costs.MOST_TOKENS[tiling.row_tiles]
    assert tiling.splits * m * shape[0] * 4 <= 2**25 or tiling.splits == 1


def test_which_products_warpgroups_make():
    taken = lambda m, *shape: costs.is_faster(Product(shape, 64), m, "bfloat16")
    assert taken(256, 14336, 4096)
    assert taken(256, 4096, 14336)
    assert not taken(512, 14336, 4096)  # the cost of decoding the weight is shared by so many rows
    assert not taken(256, 512, 512)  # which takes no time, beside beginning
    assert not taken(512, 0, 64)


def test_columns_are_put_in_order():
    x = jnp.arange(128).reshape(1, 128)
    columns = np.asarray(wgmma.in_order(x))[0]
    # The second instruction of the second block: what the third thread of four holds.
    of_instruction = columns[64 + 16 : 64 + 32]
    held = [of_instruction[i] for i in (4, 5, 12, 13)]
    assert held == [64 + 2 * 16 + 4 + i for i in range(4)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("k", [128, 1024])
@pytest.mark.parametrize("adapters", [0, 3])
@pytest.mark.parametrize(("dtype", "error"), [("float16", 1e-6), ("bfloat16", 5e-4)])
def test_what_the_kernel_is_given(monkeypatch, k, adapters, dtype, error):
    # On the model of a GPU: the order of columns, ranks beside each other, sums of terms.
    splits = []

    def on_the_model(p, tiling):
        splits.append(tiling.splits)
        return lambda *operands: jnp.asarray(run(p, tiling, *operands)[0])

    monkeypatch.setattr(gpu, "pallas_kernel", on_the_model)
    weight, rng = quantised((72, k)), np.random.default_rng(0)
    of = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    low_rank = (of(2, 33, adapters, 24), of(adapters, 72, 24)) if adapters else ()
    x, product = of(2, 33, k), Product((72, k), 64)
    packed, absmax, codebook = weight.operands
    y = gpu.fused(x, packed, absmax, jnp.asarray(codebook), *low_rank, product=product, wide=True)
    expected = np.float64(x) @ np.float64(weight.dense.astype(dtype)).T
    if adapters:
        expected += np.einsum("...ar,anr->...n", *map(np.float64, low_rank))
    assert relative_error(y, expected) < error
    assert (splits[0] > 1) == (k > 512)


@pytest.mark.quick(3)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", [(14336, 4096), (4096, 14336)], ids=str)
def test_lowers_for_cuda(shape, nested):
    x = jax.ShapeDtypeStruct((256, shape[1]), jnp.bfloat16)
    fn = lambda x, *w: nf4_matmul(x, *w, blockwise.NF4, shape=shape, block_size=64)
    assert "stored_matmul" in lowered(fn, x, *stored_nf4(*shape, nested))


@pytest.mark.parametrize("adapters", [None, 4, 32])
def test_adapters_lower(adapters):
    n, k = 14336, 4096
    lead = () if adapters is None else (adapters,)
    of = lambda *shape: jax.ShapeDtypeStruct((*lead, *shape), jnp.bfloat16)
    index = None if adapters is None else jnp.zeros(256, int)
    fn = lambda x, packed, absmax, a, b: lora_matmul(
        x, packed, absmax, blockwise.NF4, a, b, shape=(n, k), block_size=64, adapter_index=index
    )
    x = jax.ShapeDtypeStruct((256, k), jnp.bfloat16)
    text = lowered(fn, x, *stored_nf4(n, k), of(16, k), of(n, 16))
    assert ("stored_matmul" in text) == (adapters != 32)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, "one fused kernel of warpgroups"),
        ({"block_size": 16, "zeros": "plus"}, "one fused kernel of warpgroups"),
        ({"transpose": True}, "1 to 64 rows of x, not 256; that of warpgroups computes x @ W.T"),
        ({"shape": (64, 128)}, "1 to 128 rows of x, not 256; decoding the weight is estimated to be faster"),
        ({"dtype": "float32"}, "takes bfloat16 and float16, not float32"),
        ({"shape": (2**17, 4096)}, "up to 2 GiB of activations"),
        ({"b": (20, 14336, 16)}, "adapters of up to 256 ranks together"),
        ({"platform": "rocm"}, "compiles for CUDA, not for platform 'rocm'"),
    ],
)
def test_what_warpgroups_take(change, reason):
    given = {"dtype": "bfloat16", "shape": (14336, 4096), "platform": "cuda", "block_size": 64} | change
    dtype, platform, b = given.pop("dtype"), given.pop("platform"), given.pop("b", None)
    product = Product(**given)
    m = 4097 if product.shape[0] > 2**16 else 256
    x = jax.ShapeDtypeStruct((m, product.contracted), dtype)
    low_rank = None if b is None else jax.ShapeDtypeStruct(b, dtype)
    choice = gpu.choose(platform, x, product=product, partitioned=False, low_rank=low_rank)
    assert reason in (choice if isinstance(choice, str) else choice.reason)


@pytest.mark.parametrize(("capability", "m"), [("8.0", 256), ("10.0", 256), ("12.0", 256), ("12.0", 16)])
def test_other_gpus_get_the_chunks(capability, m):
    x = jax.ShapeDtypeStruct((m, 4096), jnp.bfloat16)
    with gpu_at_hand(capability):
        refusal = gpu.choose("cuda", x, product=Product((14336, 4096), 64), partitioned=False)
    assert f"not for devices of compute capability {capability}" in refusal
