import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from quaxlike import kernels
from quaxlike.kernels import block_sparse_matmul, transposed_index
from quaxlike.kernels.block_sparse_matmul import hopper, tpu
from tests.primitives.jaxprs import equations, names
from tests.samples import array, normal

from .weights import block_sparse, densify, relative_error, tpu_at_hand

BACKENDS = ["reference", "tpu"]
TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3}

MASKS = {
    "mixed": np.array([[1, 0, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]], bool),
    "one block": np.array([[0, 1]], bool),
    "dense": np.ones((2, 2), bool),
    "tall": np.array([[1, 0], [1, 0], [1, 1], [1, 0], [1, 0]], bool),
}


def _x(w, lead, transpose=False, dtype="float32"):
    return normal(*lead, w.dense.shape[not transpose], dtype=dtype)


@pytest.fixture
def interpret():
    """What Mosaic GPU interprets kernels by, where it does."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if not hasattr(plgpu, "InterpretGPUParams"):
        pytest.skip("this Mosaic GPU has no interpreter")
    return plgpu.InterpretGPUParams()


_MAY_FALL_BACK = pytest.mark.filterwarnings("ignore::quaxlike.kernels.KernelFallbackWarning")


@pytest.mark.parametrize("backend", BACKENDS)
class TestOnEachBackend:
    @pytest.fixture(autouse=True)
    def _on_backend(self, backend):
        with kernels.backend(backend):
            yield

    @pytest.mark.slow
    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize("mask", MASKS)
    def test_equals_the_dense_product(self, backend, mask, transpose):
        w = block_sparse(MASKS[mask], 128, "bfloat16")
        x = _x(w, (2, 35), transpose, "bfloat16")
        y = jax.jit(functools.partial(block_sparse_matmul, transpose=transpose))(x, *w)
        assert y.dtype == x.dtype
        expected = np.float64(x) @ (w.dense if transpose else w.dense.T)
        assert relative_error(y, expected) < TOLERANCE["bfloat16"]

    @pytest.mark.slow
    @_MAY_FALL_BACK
    @pytest.mark.parametrize("transpose", [False, True])
    @pytest.mark.parametrize(
        ("mask", "b", "lead", "dtype"),
        [
            (MASKS["mixed"], 64, (300,), "bfloat16"),
            (MASKS["mixed"], 128, (), "float32"),
            (MASKS["mixed"], 8, (3,), "float32"),
            (np.zeros((2, 3), bool), 64, (3,), "float32"),
        ],
    )
    def test_sizes_and_dtypes(self, backend, mask, b, lead, dtype, transpose):
        w = block_sparse(mask, b, dtype)
        x = _x(w, lead, transpose, dtype)
        y = block_sparse_matmul(x, *w, transpose=transpose)
        expected = np.float64(x) @ (w.dense if transpose else w.dense.T)
        assert relative_error(y, expected) < TOLERANCE[dtype]

    @pytest.mark.slow
    @_MAY_FALL_BACK
    @pytest.mark.parametrize("transpose", [False, True])
    def test_padding_is_not_seen(self, backend, transpose):
        """Whatever it holds, and whatever it meets in the gradient."""
        w = block_sparse(MASKS["mixed"], 128)
        stored = (w.col_idx < 3)[..., None, None]
        x = _x(w, (5,), transpose).at[0].set(jnp.inf)
        product = lambda x, blocks: block_sparse_matmul(x, blocks, *w[1:], transpose=transpose)
        expected = product(x, jnp.where(stored, w.blocks, 0))
        np.testing.assert_array_equal(product(x, jnp.where(stored, w.blocks, jnp.nan)), expected)
        of_blocks = jax.grad(lambda blocks: jnp.sum(product(x, blocks)))(w.blocks)
        assert not of_blocks[~stored[..., 0, 0]].any()

    @pytest.mark.slow
    @_MAY_FALL_BACK
    @pytest.mark.parametrize("transpose", [False, True])
    def test_gradients_on_stored_blocks(self, backend, transpose):
        w = block_sparse(MASKS["mixed"], 64)
        x = _x(w, (5,), transpose)
        fused = lambda x, blocks: block_sparse_matmul(x, blocks, *w[1:], transpose=transpose)

        def product(x, blocks):
            dense = densify(w, blocks)
            return x @ (dense if transpose else dense.T)

        of = lambda fn: jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1))
        assert names(of(fused), x, w.blocks).count("block_sparse_matmul") == 2
        pairs = zip(of(fused)(x, w.blocks), of(product)(x, w.blocks), strict=True)
        assert max(relative_error(*pair) for pair in pairs) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(
    ("mask", "b", "lead", "dtype"),
    [
        ("mixed", 128, (2, 36), "bfloat16"),
        ("mixed", 64, (304,), "bfloat16"),
        ("one block", 64, (8,), "float16"),
        ("tall", 128, (16,), "bfloat16"),
    ],
)
def test_the_kernel_for_hopper_interpreted(interpret, mask, b, lead, dtype, transpose):
    # Not by way of the primitive: interpreting has effects, which a primitive must not have.
    w = block_sparse(MASKS[mask], b, dtype)
    stored = jnp.asarray(w.col_idx < len(w.transposed_idx))[..., None, None]
    x = _x(w, lead, transpose, dtype)
    y = hopper.matmul(
        x,
        jnp.where(stored, w.blocks, jnp.nan),
        *map(jnp.asarray, w[1:]),
        transpose=transpose,
        out_dtype=jnp.dtype(dtype),
        interpret=interpret,
    )
    expected = np.float64(x) @ (w.dense if transpose else w.dense.T)
    assert relative_error(y, expected) < TOLERANCE["bfloat16"]


@pytest.mark.slow
def test_second_derivatives():
    w = block_sparse(MASKS["mixed"], 8)
    x = _x(w, (5,))
    fused = lambda x, blocks: jnp.sum(jnp.sin(block_sparse_matmul(x, blocks, *w[1:])))
    product = lambda x, blocks: jnp.sum(jnp.sin(x @ densify(w, blocks).T))
    for i in range(2):
        hvp = lambda fn: jax.jvp(jax.grad(fn, i), (x, w.blocks), (jnp.cos(x), jnp.cos(w.blocks)))[1]
        assert relative_error(hvp(fused), hvp(product)) < 1e-5


@pytest.mark.slow
def test_vmap_over_rows_is_one_matmul():
    w = block_sparse(MASKS["mixed"], 8)
    x = _x(w, (2, 5))
    fn = jax.vmap(lambda x: block_sparse_matmul(x, *w))
    assert names(fn, x) == ["block_sparse_matmul"]
    assert relative_error(fn(x), np.float64(x) @ w.dense.T) < 1e-6


@pytest.mark.slow
def test_vmap_over_weights():
    experts = [block_sparse(MASKS["mixed"], 8, seed=i) for i in range(3)]
    blocks = jnp.stack([w.blocks for w in experts])
    x = _x(experts[0], (5,))
    fn = jax.vmap(lambda blocks: block_sparse_matmul(x, blocks, *experts[0][1:]))
    assert "block_sparse_matmul" in names(fn, blocks)
    expected = np.stack([np.float64(x) @ w.dense.T for w in experts])
    assert relative_error(fn(blocks), expected) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
def test_within_shard_map(transpose):
    w = block_sparse(MASKS["mixed"], 8)
    x = _x(w, (8,), transpose)
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    fn = lambda x, blocks: block_sparse_matmul(x, blocks, *w[1:], transpose=transpose)
    specs = jax.P("rows"), jax.P()
    mapped = jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=jax.P("rows")))
    of = lambda fn: jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(fn(*args)) ** 2), (0, 1))(x, w.blocks)
    (actual, gradients), (expected, expected_gradients) = of(mapped), of(fn)
    assert relative_error(actual, expected) < 1e-5
    pairs = zip(gradients, expected_gradients, strict=True)
    assert max(relative_error(*pair) for pair in pairs) < 1e-5


@pytest.mark.slow
def test_nothing_dense_is_made_of_the_weight():
    rng = np.random.default_rng(0)
    w = block_sparse(rng.random((16, 16)) < 0.1, 64)
    x = _x(w, (32,))
    step = jax.value_and_grad(lambda x, b: jnp.sum(block_sparse_matmul(x, b, *w[1:])), (0, 1))
    dense = 16 * 16 * 64 * 64
    compiled = jax.jit(step).lower(x, w.blocks).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < dense * 4 / 4
    results = [v.aval.size for eqn in equations(jax.make_jaxpr(step)(x, w.blocks)) for v in eqn.outvars]
    assert max(results) == w.blocks.size


@pytest.mark.slow
@given(
    st.tuples(st.integers(1, 7), st.integers(0, 5), st.integers(1, 6)).flatmap(
        lambda s: st.tuples(arrays(np.int32, s[:2], elements=st.integers(0, s[2])), st.just(s[2]))
    )
)
def test_the_index_inverts_exactly(pattern):
    col_idx, columns = pattern
    transposed = transposed_index(col_idx, columns)
    back = np.full(col_idx.size + 1, columns, np.int32)
    back[transposed] = np.arange(columns)[:, None]
    np.testing.assert_array_equal(back[:-1].reshape(col_idx.shape), col_idx)
    counts = np.bincount(col_idx.ravel(), minlength=columns + 1)[:columns]
    assert transposed.shape == (columns, counts.max(initial=0))
    np.testing.assert_array_equal((transposed < col_idx.size).sum(1), counts)


def test_an_index_out_of_bounds():
    with pytest.raises(ValueError, match=r"must lie in \[0, 3\], got values in \[-1, 2\]"):
        transposed_index(np.array([[-1, 2]]), 3)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"x": array(np.ones((2, 7)))},
            r"last axis of x must be K = 24 of the weight's shape \(32, 24\)",
        ),
        ({"transpose": True}, r"last axis of x must be N = 32"),
        ({"blocks": array(np.ones((4, 3, 8, 9)))}, r"blocks must have shape \(N / b, slots, b, b\)"),
        ({"blocks": array(np.ones((4, 2, 8, 8)))}, r"col_idx must have the shape \(4, 2\)"),
    ],
)
def test_operands_that_do_not_fit(change, match):
    w = block_sparse(MASKS["mixed"], 8)
    with pytest.raises(ValueError, match=match):
        block_sparse_matmul(**({"x": jnp.ones((2, 24))} | w._asdict() | change))


@pytest.mark.quick(2)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.5])
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers(platform, density, transpose):
    of = jax.ShapeDtypeStruct
    blocks = 4096 // 128
    slots = round(density * blocks)
    w = of((blocks, slots, 128, 128), jnp.bfloat16)
    index = [of((blocks, n), jnp.int32) for n in (slots, slots + 3)]
    fn = functools.partial(block_sparse_matmul, transpose=transpose)
    with tpu_at_hand():
        traced = jax.jit(fn).trace(of((4096, 4096), jnp.bfloat16), w, *index)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform] in text


@pytest.mark.parametrize(
    ("change", "platform", "reason"),
    [
        ({"b": 24}, "cuda", "blocks of a multiple of 32, not 24"),
        ({"b": 64}, "tpu", "a multiple of 128, not 64"),
        ({"dtype": "float32"}, "cuda", "bfloat16 or float16, not float32 and float32"),
        ({"dtype": "float16"}, "tpu", "bfloat16 or float32, not float16 and float16"),
        ({"m": 0}, "cuda", "at least one row"),
        ({"m": 0}, "tpu", "at least one row"),
        ({}, "rocm", "compiles for CUDA, not for platform 'rocm'"),
        ({"out_dtype": np.dtype("float32")}, "cuda", "is of the dtype of x, not float32"),
    ],
)
def test_what_the_kernels_take(change, platform, reason):
    given = {"b": 128, "dtype": "bfloat16", "m": 4, "out_dtype": jnp.bfloat16} | change
    of = functools.partial(jax.ShapeDtypeStruct, dtype=given["dtype"])
    b, out_dtype = given["b"], given["out_dtype"]
    operands = of((given["m"], 4 * b)), of((4, 2, b, b)), of((4, 2)), of((4, 3))
    with tpu_at_hand():
        choice = kernels.chosen_backend(
            kernels.block_sparse_matmul_p,
            *operands,
            platform=platform,
            transpose=False,
            out_dtype=out_dtype,
        )
    assert choice.backend == "reference"
    assert reason in choice.reason


@pytest.mark.slow
@pytest.mark.parametrize(("b", "dtype"), [(128, "float32"), (128, "bfloat16")])
def test_the_sampled_product_on_tpus(b, dtype):
    y, x, w, expected = _sampled_case(b, 35, dtype)
    params = {"block_size": b, "out_dtype": jnp.dtype(dtype)}
    actual = tpu.sampled(y, x, *map(jnp.asarray, w[1:]), **params, interpret=True)
    assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("b", [64, 128])
def test_the_sampled_product_for_hopper_interpreted(interpret, b):
    y, x, w, expected = _sampled_case(b, 104, "bfloat16")
    params = {"block_size": b, "out_dtype": jnp.dtype("bfloat16")}
    actual = hopper.sampled(y, x, *map(jnp.asarray, w[1:]), **params, interpret=interpret)
    assert relative_error(actual, expected) < TOLERANCE["bfloat16"]


def _sampled_case(b, m, dtype):
    w = block_sparse(MASKS["mixed"], b)
    y, x = normal(m, 4 * b, dtype=dtype), normal(m, 3 * b, dtype=dtype, seed=1)
    dense = (np.float64(y).T @ np.float64(x)).reshape(4, b, 3, b).transpose(0, 2, 1, 3)
    padded = np.concatenate([dense, np.zeros((4, 1, b, b))], axis=1)
    return y, x, w, padded[np.arange(4)[:, None], w.col_idx]


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_gradient_of_blocks_is_a_kernel(platform):
    of = jax.ShapeDtypeStruct
    w = of((4, 2, 128, 128), jnp.bfloat16)
    index = [of((4, n), jnp.int32) for n in (2, 3)]
    loss = lambda w, x, *index: jnp.sum(block_sparse_matmul(x, w, *index))
    with tpu_at_hand():
        traced = jax.jit(jax.grad(loss)).trace(w, of((16, 512), jnp.bfloat16), *index)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}[platform] in text
    assert "stablehlo.while" not in text
