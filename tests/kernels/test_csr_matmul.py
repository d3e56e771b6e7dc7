"""The sparse matmul against the dense product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaxlike import kernels
from quaxlike.kernels import csr_index, csr_matmul, csr_sampled_matmul
from quaxlike.kernels.csr_matmul import cpu, reference
from tests.primitives.jaxprs import names
from tests.samples import normal

from .weights import relative_error


def weight(n, k, density, padding=0, seed=0):
    """Elements, their index, and the matrix as a function of them."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, k)) < density
    rows, columns = np.nonzero(mask)
    data = jnp.asarray(np.append(rng.standard_normal(rows.size), np.zeros(padding)), jnp.float32)
    index = csr_index(np.append(rows, np.full(padding, n)), np.append(columns, np.full(padding, k)), (n, k))
    dense = lambda data: jnp.zeros((n, k), data.dtype).at[rows, columns].set(data[: rows.size])
    return data, index, dense


IMPLEMENTATIONS = {"reference": reference.matmul_reference, "cpu": cpu.matmul}
SAMPLED = {"reference": reference.sampled_reference, "cpu": cpu.sampled}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=15)
@given(
    st.integers(0, 5), st.integers(0, 5), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 2), st.booleans()
)
def test_equals_the_dense_product(implementation, n, k, density, padding, transpose):
    data, index, dense = weight(n, k, density, padding)
    x = normal(2, 3, n if transpose else k)
    fn = IMPLEMENTATIONS[implementation]
    y = fn(x, data, *map(jnp.asarray, index), transpose=transpose, out_dtype=np.dtype(np.float32))
    w = np.float64(dense(data))
    np.testing.assert_allclose(y, np.float64(x) @ (w if transpose else w.T), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", SAMPLED)
@pytest.mark.parametrize(
    ("n", "k", "density", "padding"),
    [(700, 300, 0.2, 3), (700, 300, 0.005, 3), (1, 1, 1.0, 0), (5, 4, 0.0, 2), (3, 0, 1.0, 0)],
)
def test_products_at_elements_alone(implementation, n, k, density, padding):
    """More rows than are multiplied at a time, and more elements than are taken."""
    _, index, _ = weight(n, k, density, padding)
    y, x = normal(2, 3, n), normal(2, 3, k, seed=2)
    found = SAMPLED[implementation](y, x, *map(jnp.asarray, index), out_dtype=np.dtype(np.float32))
    product = np.einsum("abn,abk->nk", np.float64(y), np.float64(x))
    stored = len(index.rows) - padding
    np.testing.assert_allclose(
        found[:stored], product[index.rows[:stored], index.columns[:stored]], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(found[stored:], 0)


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
def test_derivatives_of_first_and_second_order(transpose):
    data, index, dense = weight(6, 5, 0.4, padding=1)
    x = normal(3, 6 if transpose else 5)
    fused = lambda data, x: jnp.sum(jnp.sin(csr_matmul(x, data, index, transpose=transpose)))
    plain = lambda data, x: jnp.sum(jnp.sin(x @ (dense(data) if transpose else dense(data).T)))

    def derivatives(fn, data, x):
        grad = jax.grad(fn, (0, 1))
        return jax.jvp(grad, (data, x), (jnp.cos(data), jnp.cos(x)))

    found = jax.jit(lambda *args: derivatives(fused, *args))(data, x)
    expected = jax.jit(lambda *args: derivatives(plain, *args))(data, x)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        stored = slice(None, -1) if ours.shape == data.shape else slice(None)
        np.testing.assert_allclose(ours[stored], theirs[stored], rtol=1e-4, atol=1e-5)
    assert found[0][0][-1] == 0
    assert set(names(jax.grad(fused, (0, 1)), data, x)) >= {"csr_matmul", "csr_sampled_matmul"}


@pytest.mark.slow
def test_vmap_over_rows_and_over_weights():
    data, index, dense = weight(6, 5, 0.4)
    x, stack = normal(2, 3, 5), jnp.stack([data, 2 * data])
    rows = jax.vmap(lambda x: csr_matmul(x, data, index))
    assert names(rows, x) == ["csr_matmul"]
    np.testing.assert_allclose(rows(x), x @ dense(data).T, rtol=1e-5, atol=1e-6)
    weights = jax.vmap(lambda data, x: jax.grad(lambda d: jnp.sum(csr_matmul(x, d, index) ** 2))(data))
    expected = jax.vmap(lambda data, x: jax.grad(lambda d: jnp.sum((x @ dense(d).T) ** 2))(data))
    np.testing.assert_allclose(weights(stack, x), expected(stack, x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "complex64", "int8"])
def test_dtypes(dtype):
    data, index, dense = weight(40, 300, 0.5)
    data, x = (4 * data).astype(dtype), (4 * normal(3, 300)).astype(dtype)
    y = csr_matmul(x, data, index)
    assert y.dtype == dtype
    wide = np.complex128 if dtype == "complex64" else np.float64
    exact = np.asarray(x, wide) @ np.asarray(dense(data), wide).T
    if dtype == "int8":
        np.testing.assert_array_equal(y, exact.astype(np.int64).astype(np.int8))
    else:
        assert relative_error(np.asarray(y, wide).real, exact.real) < 4e-3


def test_lowers_for_other_platforms():
    data, index, _ = weight(40, 30, 0.5)
    step = jax.value_and_grad(lambda data, x: jnp.sum(csr_matmul(x, data, index)), (0, 1))
    traced = jax.jit(step).trace(data, normal(3, 30))
    for platform in ("cuda", "tpu"):
        assert "scatter" in traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda d, i: csr_matmul(normal(3, 6), d, i),
            r"axis of x must be K = 5 of the weight's shape \(6, 5\)",
        ),
        (lambda d, i: csr_matmul(normal(3, 5), d, i, transpose=True), r"must be N = 6"),
        (lambda d, i: csr_matmul(normal(3, 5), d[1:], i), r"data must have the shape"),
        (lambda d, i: csr_sampled_matmul(normal(3, 5), normal(3, 6), i), r"shape \(6, 5\), got \(3, 5\)"),
        (lambda d, i: csr_index(np.array([1, 0]), np.array([0, 0]), (2, 2)), r"sorted by rows, then"),
        (lambda d, i: csr_index(np.array([0, 0]), np.array([1, 1]), (2, 2)), r"without repetition"),
    ],
)
def test_operands_that_do_not_fit(call, match):
    data, index, _ = weight(6, 5, 0.4)
    with pytest.raises(ValueError, match=match):
        call(data, index)


@pytest.mark.slow
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32", "complex64"])
def test_exported_for_cpus(dtype, transpose):
    data, index, dense = weight(4, 6, 0.5)
    data, x = data.astype(dtype), jnp.arange(8 if transpose else 12).reshape(2, -1).astype(dtype)
    run = jax.jit(lambda x: csr_matmul(x, data, index, transpose=transpose))
    found = jax.export.export(run, platforms=["cpu", "cuda"])(x).call(x)
    w = np.asarray(dense(data).astype("complex64"))
    np.testing.assert_allclose(
        np.asarray(found.astype("complex64")),
        np.asarray(x.astype("complex64")) @ (w if transpose else w.T),
        rtol=2e-2,
    )


@pytest.mark.slow
def test_the_reference_on_a_cpu():
    data, index, _ = weight(4, 6, 0.5)
    lowered = lambda: jax.jit(lambda x: csr_matmul(x, data, index)).lower(jnp.ones((2, 6))).as_text()
    assert "csr" in lowered()
    with kernels.backend("reference"):
        assert "custom_call" not in lowered()
