"""The block-sparse kernel for GPUs before and after Hopper: its program executed in a model of a GPU."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaxlike import kernels
from quaxlike.kernels import block_sparse_matmul
from quaxlike.kernels.backends import _mosaic_gpu
from quaxlike.kernels.block_sparse_matmul import mma, mma_tiling, reference
from tests.samples import Late, normal

from . import simt
from .weights import block_sparse, gpu_at_hand, relative_error

mma_program = Late("quaxlike.kernels.block_sparse_matmul.mma_program")  # imports Mosaic
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
MIXED = np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]], bool)
ROUNDED = {"bfloat16": 2e-3, "float16": 3e-4}
_MAY_FALL_BACK = pytest.mark.filterwarnings("ignore::quaxlike.kernels.KernelFallbackWarning")


def _execute(p, left, right, index):
    tiling = mma_tiling.tiling_for(p)
    y, stats = simt.run(
        functools.partial(mma_program.emit, p=p, tiling=tiling),
        [left, right, np.asarray(index).view(np.uint32)],
        (p.out, DTYPES[p.dtype]),
        [((tiling.shared_words,), np.uint32)],
        blocks=p.blocks(tiling),
        threads=mma_tiling.THREADS,
    )
    assert stats.load_conflicts == 0
    return y


def _weight(mask, b, dtype):
    """A weight whose padding holds NaN, which nobody may read."""
    w = block_sparse(mask, b, dtype)
    stored = (w.col_idx < len(w.transposed_idx))[..., None, None]
    return w, np.asarray(jnp.where(stored, w.blocks, jnp.nan))


def _matmul(mask, b, m, dtype, transpose):
    w, blocks = _weight(mask, b, dtype)
    x = np.asarray(normal(m, w.dense.shape[not transpose], dtype=dtype))
    p = mma.matmul_problem(x, blocks, w.col_idx, w.transposed_idx, transpose=transpose)
    y = _execute(p, x, blocks.reshape(p.right), w.transposed_idx if transpose else w.col_idx)
    return y, np.float64(x) @ (w.dense if transpose else w.dense.T)


def _sampled(mask, b, m, dtype):
    w, _ = _weight(mask, b, dtype)
    (rows, columns), slots = mask.shape, w.col_idx.shape[1]
    y, x = (np.asarray(normal(m, n * b, dtype=dtype, seed=n)) for n in (rows, columns))
    p = mma.sampled_problem(y, x, w.col_idx, w.transposed_idx, b)
    of_blocks = _execute(p, y, x, w.col_idx).reshape(rows, slots, b, b)
    dense = (np.float64(y).T @ np.float64(x)).reshape(rows, b, columns, b).transpose(0, 2, 1, 3)
    padded = np.concatenate([dense, np.zeros((rows, 1, b, b))], axis=1)
    return of_blocks, padded[np.arange(rows)[:, None], w.col_idx]


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("b", "m", "dtype"), [(64, 150, "bfloat16"), (32, 5, "float16")])
def test_the_program_computes_the_product(b, m, dtype, transpose):
    y, expected = _matmul(MIXED, b, m, dtype, transpose)
    assert relative_error(y, expected) < ROUNDED[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("b", "m", "dtype"), [(64, 35, "bfloat16"), (32, 5, "float16")])
def test_the_program_computes_the_sampled_product(b, m, dtype):
    actual, expected = _sampled(MIXED, b, m, dtype)
    assert relative_error(actual, expected) < ROUNDED[dtype]
    assert not actual[expected == 0].any()


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
def test_padding_meets_nothing(transpose):
    """Infinite activations are not multiplied by the zeros of a slot without a block."""
    w, blocks = _weight(MIXED, 32, "float16")
    x = np.full((3, w.dense.shape[not transpose]), np.inf, np.float16)
    p = mma.matmul_problem(x, blocks, w.col_idx, w.transposed_idx, transpose=transpose)
    ones = np.where(np.isnan(blocks), blocks, np.float16(1)).reshape(p.right)
    y = _execute(p, x, ones, w.transposed_idx if transpose else w.col_idx)
    of_features = np.repeat(MIXED.any(axis=0 if transpose else 1), 32)
    np.testing.assert_array_equal(y, np.broadcast_to(np.where(of_features, np.inf, 0), y.shape))


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("b", "m"), [(96, 64), (128, 1), (128, 130), (256, 20)])
def test_sizes(b, m, transpose):
    y, expected = _matmul(MIXED[1:3, :2], b, m, "bfloat16", transpose)
    assert relative_error(y, expected) < ROUNDED["bfloat16"]


@pytest.mark.slow
@settings(max_examples=8)
@given(
    mask=st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
        lambda shape: st.lists(st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]).map(
            lambda bits: np.array(bits).reshape(shape)
        )
    ),
    b=st.sampled_from([32, 64, 96]),
    m=st.integers(1, 140),
)
def test_any_pattern(mask, b, m):
    mask[0, 0] = True  # one slot, or there is no kernel
    for transpose in (False, True):
        y, expected = _matmul(mask, b, m, "bfloat16", transpose)
        assert relative_error(y, expected) < ROUNDED["bfloat16"]
    actual, expected = _sampled(mask, b, m, "bfloat16")
    assert relative_error(actual, expected) < ROUNDED["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forward", "transposed", "sampled"])
def test_the_largest_tiles(kind, monkeypatch):
    """Those of large problems."""
    monkeypatch.setattr(mma_tiling, "_MULTIPROCESSORS", 1)
    if kind == "sampled":
        y, expected = _sampled(MIXED[:, :2], 128, 100, "bfloat16")
    else:
        y, expected = _matmul(MIXED[:, :2], 128, 130, "bfloat16", kind == "transposed")
    assert relative_error(y, expected) < ROUNDED["bfloat16"]


@pytest.mark.parametrize("b", [32, 96, 128, 512])
@pytest.mark.parametrize("m", [1, 16, 33, 4096])
@pytest.mark.parametrize("transpose", [False, True])
def test_tilings_fit_every_gpu(b, m, transpose):
    blocks = 3072 // b
    of = jax.ShapeDtypeStruct
    x, w = of((m, 3072), jnp.bfloat16), of((blocks, 2, b, b), jnp.bfloat16)
    index = of((blocks, 2), jnp.int32), of((blocks, 3), jnp.int32)
    problems = [
        mma.matmul_problem(x, w, *index, transpose=transpose),
        mma.sampled_problem(x, x, *index, b),
    ]
    for p in problems:
        tiling = mma_tiling.tiling_for(p)
        assert tiling.shared_words * 4 <= 48 * 1024  # two blocks of threads on compute capability 8.6 and 8.9
        assert tiling.stages >= 3
        assert min(tiling.warp_tile) >= 16
        assert b % tiling.width == 0
        assert p.kind != "sampled" or b % tiling.height == 0


@pytest.mark.quick("9.0-64-35-by mma.sync")
@_MAY_FALL_BACK
@pytest.mark.parametrize(
    ("capability", "b", "m", "how"),
    [
        ("8.0", 128, 35, "by mma.sync"),
        ("8.9", 32, 35, "by mma.sync"),
        ("9.0", 32, 40, "by mma.sync"),
        ("9.0", 64, 40, "by wgmma"),
        ("9.0", 128, 4096, "by wgmma"),
        ("9.0", 64, 35, "by mma.sync"),
        ("10.0", 64, 35, "by mma.sync"),
        ("7.5", 64, 35, "not for devices of compute capability 7.5"),
        ("12.0", 64, 35, "not for devices of compute capability 12.0"),
    ],
)
def test_forward_and_backward_are_kernels(capability, b, m, how):
    if capability < "9" and not _mosaic_gpu()[1]:  # this JAX compiles for Hopper and later alone
        how = f"not for devices of compute capability {capability}"
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    x, ct, w = of((m, 3 * b)), of((m, 4 * b)), of((4, 2, b, b))
    index = of((4, 2), dtype=jnp.int32), of((3, 3), dtype=jnp.int32)
    params = {"transpose": False, "out_dtype": x.dtype}

    def both(x: jax.Array, ct: jax.Array, w: jax.Array, *index: jax.Array) -> tuple:
        y, gradients = jax.vjp(lambda x, w: block_sparse_matmul(x, w, *index), x, w)
        return y, gradients(ct)

    with gpu_at_hand(capability):
        choice = kernels.chosen_backend(
            kernels.block_sparse_matmul_p, x, w, *index, platform="cuda", **params
        )
        lowered = jax.jit(both).trace(x, ct, w, *index).lower(lowering_platforms=("cuda",)).as_text()
    assert how in choice.reason
    assert lowered.count("@mosaic_gpu") == (3 if how.startswith("by") else 0)
    assert (choice.backend == "gpu") == how.startswith("by")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"b": 48}, "blocks of a multiple of 32, not 48"),
        ({"dtype": "float32"}, "bfloat16 or float16, not float32 and float32"),
        ({"m": 2**21}, "up to 2 GiB"),
        ({"slots": 2**20}, "up to 2 GiB"),
    ],
)
def test_what_the_kernel_does_not_take(change, reason):
    given = {"b": 32, "dtype": "bfloat16", "m": 4, "slots": 2} | change
    b, slots = given["b"], given["slots"]
    of = functools.partial(jax.ShapeDtypeStruct, dtype=given["dtype"])
    x, y, w, index = of((given["m"], 16 * b)), of((given["m"], 4 * b)), of((4, slots, b, b)), of((4, slots))
    params = {"platform": "cuda", "out_dtype": x.dtype, "partitioned": False}
    assert reason in str(
        mma.choose(x=x, blocks=w, col_idx=index, transposed_idx=of((16, 3)), transpose=False, **params)
    )
    assert reason in str(mma.choose_sampled(params.pop("platform"), y, x, index, block_size=b, **params))


@pytest.mark.slow
def test_slots_of_which_none_holds_a_block():
    """The index by columns has no slots at all."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    operands = of((8, 128)), of((2, 1, 64, 64)), of((2, 1)), of((2, 0))
    for transpose, backend in ((False, "gpu"), (True, "reference")):
        params = {"platform": "cuda", "transpose": transpose, "out_dtype": operands[0].dtype}
        assert kernels.chosen_backend(kernels.block_sparse_matmul_p, *operands, **params).backend == backend
    x, blocks, index = jnp.ones((3, 16)), jnp.ones((2, 1, 8, 8)), jnp.full((2, 1), 2)
    for transpose in (False, True):
        params = {"transpose": transpose, "out_dtype": x.dtype}
        y = reference.matmul_sliced(x, blocks, index, jnp.zeros((2, 0), int), **params)
        np.testing.assert_array_equal(y, np.zeros((3, 16)))


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.4])
def test_slices_give_the_products_of_the_reference(density, transpose):
    """Those that GPUs compute where no kernel does."""
    w = block_sparse(np.random.default_rng(0).random((5, 3)) < density, 8)
    x, y = normal(2, 7, 24), normal(2, 7, 40, seed=1)
    params = {"transpose": transpose, "out_dtype": jnp.dtype("float32")}
    operands = (y if transpose else x, w.blocks, *map(jnp.asarray, w[1:]))
    expected = reference.matmul_reference(*operands, **params)
    np.testing.assert_allclose(reference.matmul_sliced(*operands, **params), expected, atol=1e-5)
    params = {"block_size": 8, "out_dtype": jnp.dtype("float32")}
    operands = y, x, jnp.asarray(w.col_idx)
    expected = reference.sampled_reference(*operands, **params)
    np.testing.assert_allclose(reference.sampled_sliced(*operands, **params), expected, atol=1e-5)


def test_slices_leave_the_activations_as_they_are():
    """On GPUs, in what no kernel takes."""
    m, w = 1024, block_sparse(np.random.default_rng(0).random((16, 16)) < 0.2, 64)
    x = jax.ShapeDtypeStruct((m, 1024), jnp.float32)

    def memory(fn, *operands):
        return jax.jit(fn).lower(*operands).compile().memory_analysis().temp_size_in_bytes

    for transpose in (False, True):
        params = {"transpose": transpose, "out_dtype": x.dtype}
        product = functools.partial(reference.matmul_sliced, **params)
        assert memory(product, x, w.blocks, *w[1:]) < x.size * 4 / 2
    params = {"block_size": 64, "out_dtype": x.dtype}
    assert memory(functools.partial(reference.sampled_sliced, **params), x, x, w.col_idx) < x.size * 4 / 2
