"""Sparse arrays and all other types: right, kept where that can be, and made dense visibly where not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.named import NamedArray
from quaxlike.arrays.unitful import Unitful
from quaxlike.files import safetensors
from tests.primitives.jaxprs import names
from tests.samples import Lazy, array, normal, tree_equal

DENSE, X = map(array, np.asarray(normal(2, 64, 64)))
SPARSE = Lazy(
    {
        "elements": lambda: ql.SparseArray.from_dense(DENSE, density=0.1),
        "blocks": lambda: ql.BlockSparseArray.from_dense(DENSE, block_size=16, density=0.25),
    }
)
KERNEL = {"elements": "csr_matmul", "blocks": "block_sparse_matmul"}


def lora(w):
    a, b = normal(2, 4, 64) / 8
    return ql.LoraArray(w, a, b.T)


@pytest.mark.slow
def test_rules_are_not_ambiguous():
    ql.check_ambiguities()


@pytest.mark.slow
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


WRAPPED = {
    "LoRA": lora,
    "unit": lambda s: Unitful(s, "m"),
    "names": lambda s: NamedArray(s, ("out", "in")),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", WRAPPED)
@pytest.mark.parametrize("kind", SPARSE)
def test_under_an_adapter_a_unit_and_names(kind, wrapping):
    """The product of the sparse part is the kernel's."""
    wrap, product = WRAPPED[wrapping], ql.quaxify(jnp.matmul)
    w, x = wrap(SPARSE[kind]), X[:, :5]
    with ql.on_materialise("error"):
        out = product(w, x)
    assert KERNEL[kind] in names(product, w, x)
    expected = ql.materialise(wrap(SPARSE[kind].materialise())) @ x
    np.testing.assert_allclose(ql.materialise(out), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "options"), [("nf4", {}), ("nf4", {"double_quant": True}), ("int8", {})], ids=str
)
def test_models_are_pruned_and_then_quantised(scheme, options):
    w = ql.BlockSparseArray.from_dense(DENSE, block_size=32, density=0.5)
    model = eqx.nn.Linear(64, 64, use_bias=False, key=jax.random.key(0))
    model = ql.quantize(eqx.tree_at(lambda m: m.weight, model, w), scheme, **options)
    assert type(model.weight) is ql.BlockSparseArray
    assert model.weight.blocks.codes.size <= w.blocks.size
    apply = lambda w, x: (x @ w.T, x @ w)
    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(apply))(model.weight, X)
    for a, b in zip(found, apply(model.weight.materialise(), X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(model.weight.materialise(), w.materialise(), atol=0.5)


@pytest.mark.slow
def test_files(tmp_path):
    safetensors.save(tmp_path / "sparse.safetensors", dict(SPARSE))
    again = safetensors.load(tmp_path / "sparse.safetensors", like=dict.fromkeys(SPARSE, DENSE))
    assert tree_equal(again, dict(SPARSE))


def test_summary_counts_what_is_stored():
    rows = {row.path: row for row in ql.summary(dict(SPARSE)).rows}
    assert rows["blocks"].logical_bytes == 64 * 64 * 4
    assert rows["blocks"].stored_bytes < 64 * 64 * 4 * 0.26


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPARSE)
def test_activations_on_several_devices_under_jit(kind):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X[:8], jax.NamedSharding(mesh, jax.P("i")))
    loss = lambda w, x: jnp.sum(jnp.sin(ql.quaxify(lambda w, x: x @ w.T)(w, x)))
    found = jax.jit(jax.grad(loss, 1))(SPARSE[kind], x)
    np.testing.assert_allclose(
        found, jax.grad(loss, 1)(SPARSE[kind].materialise(), X[:8]), rtol=1e-3, atol=1e-4
    )


@pytest.mark.quick("2")
@pytest.mark.parametrize("axis", [1, 2])
def test_a_stack_beside_an_array_of_as_many_axes(axis):
    dense = jnp.where(normal(2, 3, 4) > 0, normal(2, 3, 4), 0.0)
    both = ql.SparseArray.from_dense(dense, stacked=1), ql.SparseArray.from_dense(dense)
    for pair in (both, both[::-1]):
        with ql.on_materialise("allow"):
            found = ql.quaxify(lambda x, y: jnp.concatenate([x, 2 * y], axis))(*pair)
        np.testing.assert_array_equal(ql.materialise(found), jnp.concatenate([dense, 2 * dense], axis))


@pytest.mark.parametrize(
    "make",
    [
        ql.SparseArray.from_dense,
        lambda x: ql.BlockSparseArray.from_dense(x, block_size=4, density=1.0),
    ],
)
def test_clamped_indices_that_do_not_fit_in_32_bits(make):
    dense = jnp.arange(64.0).reshape(8, 8) + 1
    f = lambda x, i: jnp.take(x, i, axis=0, mode="clip")
    indices = jnp.array([0, 2**32 - 1, 5], jnp.uint32)
    np.testing.assert_array_equal(ql.quaxify(f)(make(dense), indices), f(dense, indices))
