"""Sparse arrays and all other types: right, kept where that can be, and made dense visibly where not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.arrays.unitful import Unitful
from quaxlike.arrays.zero import Full, Identity, Zero
from quaxlike.interop import safetensors
from tests.primitives.jaxprs import names

DENSE, X = jax.random.normal(jax.random.key(0), (2, 64, 64))
SPARSE = {
    "elements": ql.SparseArray.from_dense(DENSE, density=0.1),
    "blocks": ql.BlockSparseArray.from_dense(DENSE, block_size=16, density=0.25),
}
KERNEL = {"elements": "csr_matmul", "blocks": "block_sparse_matmul"}


def lora(w):
    a, b = jax.random.normal(jax.random.key(1), (2, 4, 64)) / 8
    return ql.LoraArray(w, a, b.T)


OTHERS = {
    "LoRA": lambda: lora(X),
    "LoRA of NF4": lambda: lora(ql.NF4Array.quantize(X)),
    "Zero": lambda: Zero((64, 64), jnp.float32),
    "Full": lambda: Full(0.5, (64, 64)),
    "Identity": lambda: Identity(64),
    "NF4": lambda: ql.NF4Array.quantize(X),
    "int8": lambda: ql.Int8Array.quantize(X),
    "blocks": lambda: SPARSE["blocks"],
    "elements": lambda: SPARSE["elements"],
    "one-hot": lambda: OneHotVector(2.0, 3, length=64),
}
# What is multiplied with arrays alone, or is one: a sparse operand beside it has to be dense.
LOSES = {"Full", "LoRA of NF4", "NF4", "int8", "blocks", "elements", "one-hot"}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", SPARSE)
def test_operations_with_other_types(kind, other, default_promotion):
    w, y = SPARSE[kind], OTHERS[other]()

    def products(w, y):
        return [w @ y, y @ w, w.T @ y, w @ y.T]

    def sums(w, y):
        return [w + y, y - w, w * y]

    with ql.on_materialise("allow"):
        found = jax.jit(ql.quaxify(lambda w, y: [*products(w, y), *sums(w, y)]))(w, y)
    expected = [f for group in (products, sums) for f in group(*ql.materialise((w, y)))]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(ql.materialise(a), b, rtol=1e-3, atol=1e-3)
    with ql.on_materialise("error"):
        if other in LOSES:
            with pytest.raises(ql.MaterialisationError, match=r"SparseArray|Full|OneHot"):
                jax.jit(ql.quaxify(products))(w, y)
        else:
            jax.jit(ql.quaxify(products))(w, y)


def test_rules_are_not_ambiguous():
    ql.check_ambiguities()


@pytest.mark.parametrize("kind", SPARSE)
def test_quantised_weights_stay_quantised(kind):
    """It is the sparse operand that is made dense, not the codes."""
    q = ql.NF4Array.quantize(X)
    with ql.on_materialise("allow"):
        assert "nf4_matmul" in names(ql.quaxify(lambda s, q: s @ q.T), SPARSE[kind], q)
    with (
        ql.on_materialise("error"),
        pytest.raises(ql.MaterialisationError, match=r"SparseArray f32.*NF4Array"),
    ):
        ql.quaxify(lambda s, q: s @ q.T)(SPARSE[kind], q)


@pytest.mark.parametrize("kind", SPARSE)
def test_under_an_adapter_a_unit_and_names(kind):
    """The product of the sparse part is the kernel's."""
    s, x = SPARSE[kind], X[:5]
    wrapped = {
        "LoRA": (lora(s), x, lambda w, x: x @ w.T),
        "unit": (Unitful(s, "m"), Unitful(x, "s"), lambda w, x: (x @ w.T).array),
        "names": (NamedArray(s, ("out", "in")), x, lambda w, x: (w @ x.T).array.T),
    }
    for name, (w, x, f) in wrapped.items():
        f = f if name == "LoRA" else lambda w, x, f=f: f(w, x)
        product = ql.quaxify(lambda w, x: x @ w.T) if name != "names" else ql.quaxify(lambda w, x: w @ x.T)
        with ql.on_materialise("error"):
            out = product(w, x)
        assert KERNEL[kind] in names(product, w, x)
        dense = lora(s.materialise()).materialise() if name == "LoRA" else s.materialise()
        plain = X[:5] @ dense.T
        found = ql.materialise(out)
        np.testing.assert_allclose(found.T if name == "names" else found, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", SPARSE)
def test_adapters_are_trained_over_a_frozen_sparse_base(kind):
    adapted, x = lora(SPARSE[kind]), X[:5]
    params, static = eqx.partition(adapted, ql.trainable(adapted))
    loss = lambda w, x: jnp.sum(jnp.sin(x @ w.T))
    with ql.on_materialise("error"):
        found = jax.grad(lambda params: ql.quaxify(loss)(eqx.combine(params, static), x))(params)
    assert len(jax.tree.leaves(found)) == 2
    expected = jax.grad(lambda ab: loss(lora_of(ab, SPARSE[kind].materialise()), x))((adapted.a, adapted.b))
    np.testing.assert_allclose(found.a, expected[0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found.b, expected[1], rtol=1e-3, atol=1e-4)


def lora_of(ab, w):
    return w + ab[1] @ ab[0]


def test_files(tmp_path):
    safetensors.save(tmp_path / "sparse.safetensors", SPARSE)
    again = safetensors.load(tmp_path / "sparse.safetensors", like=dict.fromkeys(SPARSE, DENSE))
    assert eqx.tree_equal(again, SPARSE)


def test_summary_counts_what_is_stored():
    rows = {row.path: row for row in ql.summary(SPARSE).rows}
    assert rows["blocks"].logical_bytes == 64 * 64 * 4
    assert rows["blocks"].stored_bytes < 64 * 64 * 4 * 0.26


@pytest.mark.parametrize("kind", SPARSE)
def test_activations_on_several_devices_under_jit(kind):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X[:8], jax.NamedSharding(mesh, jax.P("i")))
    loss = lambda w, x: jnp.sum(jnp.sin(ql.quaxify(lambda w, x: x @ w.T)(w, x)))
    found = jax.jit(jax.grad(loss, 1))(SPARSE[kind], x)
    np.testing.assert_allclose(
        found, jax.grad(loss, 1)(SPARSE[kind].materialise(), X[:8]), rtol=1e-3, atol=1e-4
    )
