import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike import kernels
from quaxlike.kernels import NestedScales, blockwise, lora_matmul
from tests.primitives.jaxprs import names
from tests.samples import array, normal

from .weights import quantised, relative_error

BACKENDS = ["reference", "gpu", "tpu"]
TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3}
N, K, RANK = 128, 256, 8


def _adapters(count=None, dtype="float32"):
    lead = () if count is None else (count,)
    a, b = normal(*lead, RANK, K, dtype=dtype), normal(*lead, N, RANK, dtype=dtype)
    return a / np.sqrt(K).astype(dtype), b


def _x(lead, dtype="float32"):
    return normal(*lead, K, dtype=dtype)


def _expected(x, w, a, b, scaling=1.0, index=None):
    x, a, b = (np.float64(z) for z in (x, a, b))
    base = x @ w.dense.T
    if index is None:
        return base + scaling * (x @ a.T) @ b.T
    rows = x.reshape(-1, K)
    term = [
        np.zeros(N) if i < 0 else b[i] @ (a[i] @ row) for i, row in zip(np.ravel(index), rows, strict=True)
    ]
    return base + scaling * np.reshape(term, base.shape)


@pytest.mark.parametrize("backend", BACKENDS)
class TestOnEachBackend:
    @pytest.fixture(autouse=True)
    def _on_backend(self, backend):
        with kernels.backend(backend):
            yield

    @pytest.mark.slow
    @pytest.mark.parametrize(("lead", "dtype"), [((), "float32"), ((3, 5), "bfloat16"), ((130,), "float32")])
    def test_equals_the_dense_product(self, backend, lead, dtype):
        w, x = quantised((N, K)), _x(lead, dtype)
        a, b = _adapters(dtype=dtype)
        y = jax.jit(functools.partial(lora_matmul, scaling=2.0, **w.params))(x, *w.operands, a, b)
        assert y.dtype == x.dtype
        assert relative_error(y, _expected(x, w, a, b, 2.0)) < TOLERANCE[dtype]

    @pytest.mark.quick(1)
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_an_adapter_for_each_row(self, backend, dtype):
        w, x = quantised((N, K)), _x((2, 4), dtype)
        a, b = _adapters(3, dtype)
        index = jnp.array([[0, 2, 1, 1], [-1, 2, 0, -1]])
        y = lora_matmul(
            x, *w.operands, a, b, scaling=0.5, adapter_index=index, out_dtype="float32", **w.params
        )
        assert relative_error(y, _expected(x, w, a, b, 0.5, index)) < TOLERANCE[dtype]

    @pytest.mark.slow
    def test_adapters_are_cast_to_the_activations(self, backend):
        w, x = quantised((N, K)), _x((4,), "bfloat16")
        a, b = _adapters()
        y = lora_matmul(x, *w.operands, a, b, **w.params)
        assert y.dtype == jnp.bfloat16
        assert relative_error(y, _expected(x, w, a, b)) < TOLERANCE["bfloat16"]

    @pytest.mark.slow
    def test_gradients(self, backend):
        w, x = quantised((N, K)), _x((5,)) / 16
        a, b = _adapters()
        dense = w.dense.astype(np.float32)
        fused = lambda x, a, b, s: lora_matmul(x, *w.operands, a, b, scaling=s, **w.params)
        product = lambda x, a, b, s: x @ dense.T + s * (x @ a.T) @ b.T
        of = lambda fn: jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args)) ** 2), (0, 1, 2, 3))
        arguments = x, a, b, jnp.float32(1.5)
        found = names(of(fused), *arguments)
        assert (found.count("lora_matmul"), found.count("nf4_matmul")) == (1, 1)
        pairs = zip(jax.jit(of(fused))(*arguments), of(product)(*arguments), strict=True)
        assert max(relative_error(*pair) for pair in pairs) < 1e-5


@pytest.mark.slow
def test_gradients_over_nested_scales_are_the_kernel():
    w, x = quantised((N, K)), _x((5,))
    packed, absmax, codebook = w.operands
    nested = NestedScales(*blockwise.quantize_scales(absmax), jnp.asarray(blockwise.dynamic_map()))
    loss = lambda absmax: (
        lambda x, a, b: jnp.sum(jnp.sin(lora_matmul(x, packed, absmax, codebook, a, b, **w.params)))
    )
    of = lambda absmax: jax.grad(loss(absmax), (0, 1, 2))
    arguments = x, *_adapters()
    found = [name for name in names(of(nested), *arguments) if "matmul" in name]
    assert found == ["lora_matmul", "nf4_matmul"]
    dense = blockwise.dequantize_scales(*nested[:3])
    pairs = zip(of(nested)(*arguments), of(dense)(*arguments), strict=True)
    assert max(relative_error(*pair) for pair in pairs) < 1e-5


@pytest.mark.slow
def test_forward_mode_and_second_derivatives():
    w, x = quantised((N, K)), _x((5,))
    a, b = _adapters()
    dense = w.dense.astype(np.float32)
    fused = lambda x, a, b: jnp.sum(jnp.sin(lora_matmul(x, *w.operands, a, b, **w.params)))
    product = lambda x, a, b: jnp.sum(jnp.sin(x @ dense.T + (x @ a.T) @ b.T))
    tangents = x + 1, a - 1, b * 2
    for i in range(3):
        hvp = lambda fn: jax.jvp(jax.grad(fn, i), (x, a, b), tangents)[1]
        assert relative_error(hvp(fused), hvp(product)) < 1e-5


@pytest.mark.slow
def test_gradients_of_an_adapter_for_each_example():
    w, x = quantised((N, K)), _x((3, 5))
    a, b = _adapters(3)
    dense = w.dense.astype(np.float32)
    fused = lambda x, a, b: jnp.sum(jnp.sin(lora_matmul(x, *w.operands, a, b, **w.params)))
    product = lambda x, a, b: jnp.sum(jnp.sin(x @ dense.T + (x @ a.T) @ b.T))
    for transform in (
        lambda fn: jax.vmap(jax.grad(fn, (0, 1, 2))),
        lambda fn: jax.grad(lambda *args: jnp.sum(jax.vmap(fn)(*args)), (0, 1, 2)),
    ):
        pairs = zip(transform(fused)(x, a, b), transform(product)(x, a, b), strict=True)
        assert max(relative_error(*pair) for pair in pairs) < 1e-5


def test_frozen_base_costs_no_gradient_of_x():
    w, x = quantised((N, K)), _x((5,))
    a, b = _adapters()
    fn = lambda b: jnp.sum(lora_matmul(x, *w.operands, a, b, **w.params))
    assert names(jax.grad(fn), b).count("lora_matmul") == 1
    assert "nf4_matmul" not in names(jax.grad(fn), b)


@pytest.mark.slow
def test_vmap_over_adapters_and_over_rows():
    w, x = quantised((N, K)), _x((3, 5))
    a, b = _adapters(3)
    fn = lambda x, a, b: lora_matmul(x, *w.operands, a, b, **w.params)
    y = jax.vmap(fn)(x, a, b)
    expected = np.stack([_expected(*args) for args in zip(x, [w] * 3, a, b, strict=True)])
    assert relative_error(y, expected) < 1e-6
    # The weight is read once for all adapters, not once for each.
    assert names(jax.vmap(fn), x, a, b).count("nf4_matmul") == 1
    shared = jax.vmap(fn, in_axes=(None, 0, 0))(x[0], a, b)
    expected = np.stack([_expected(x[0], w, *args) for args in zip(a, b, strict=True)])
    assert relative_error(shared, expected) < 1e-6
    rows = jax.vmap(fn, in_axes=(0, None, None))
    assert names(rows, x, a[0], b[0]).count("lora_matmul") == 1
    assert relative_error(rows(x, a[0], b[0]), _expected(x, w, a[0], b[0])) < 1e-6


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a": array(np.ones((RANK, 7)))}, r"a must be \(\.\.\., rank, 256\) .* got shapes \(8, 7\)"),
        ({"b": array(np.ones((N, 5)))}, r"b \(\.\.\., 128, rank\), got shapes"),
        ({"adapter_index": array(np.zeros(2, int))}, r"must have 3 axes with adapter_index"),
        ({"a": array(np.ones((2, RANK, K)))}, r"must have 2 axes without adapter_index"),
        ({"x": array(np.ones((2, 7)))}, r"lora_matmul: the last axis of x must be K = 256"),
    ],
)
def test_operands_that_do_not_fit(change, match):
    w = quantised((N, K))
    names = ("packed", "absmax", "codebook")
    arguments = {"x": jnp.ones((2, K))} | dict(zip(names, w.operands, strict=True)) | w.params
    arguments |= dict(zip("ab", _adapters(), strict=True))
    with pytest.raises(ValueError, match=match):
        lora_matmul(**(arguments | change))


def test_an_index_for_rows_that_are_not_there():
    w = quantised((N, K))
    with pytest.raises(ValueError, match=r"leading shape \(2,\) of x, got \(3,\)"):
        lora_matmul(
            jnp.ones((2, K)),
            *w.operands,
            *_adapters(3),
            adapter_index=jnp.zeros(3, int),
            **w.params,
        )
