"""Initialisations of adapters that look at weights or data."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.arrays.lora.matrices import svd
from tests.samples import drawn, normal, random_key

KEY = random_key(0)
MLP = drawn(eqx.nn.MLP, 6, 3, 16, depth=2, key=KEY)


@pytest.mark.slow
def test_pissa_takes_the_principal_part():
    w = np.asarray(MLP.layers[1].weight, np.float64)
    u, s, vt = np.linalg.svd(w)
    for init, tolerance in (("pissa", 1e-5), ("pissa_niter_16", 1e-3)):
        lora = ql.loraify(MLP, rank=3, alpha=6, init=init, key=KEY).layers[1].weight
        np.testing.assert_allclose(lora.delta(), (u[:, :3] * s[:3]) @ vt[:3], atol=tolerance)
        np.testing.assert_allclose(lora.materialise(), w, atol=1e-6)
        np.testing.assert_allclose(lora.a @ lora.a.T, np.diag(s[:3] / 2), atol=tolerance)


@pytest.mark.slow
def test_olora_takes_orthogonal_columns():
    lora = ql.loraify(MLP, rank=3, init="olora", key=KEY).layers[1].weight
    np.testing.assert_allclose(lora.b.T @ lora.b, np.eye(3), atol=1e-5)
    np.testing.assert_allclose(lora.materialise(), MLP.layers[1].weight, atol=1e-6)


def test_a_randomised_decomposition_of_a_matrix_of_low_rank():
    w = normal(24, 3) @ normal(3, 16, seed=1)
    u, s, vt = svd(w, 3, (KEY, 2))
    np.testing.assert_allclose(u @ jnp.diag(s) @ vt, w, rtol=1e-4, atol=1e-4)


@pytest.mark.quick("nf4")
@pytest.mark.parametrize("scheme", ["nf4", "int4"])
def test_loftq_makes_up_for_the_rounding(scheme):
    linear = eqx.nn.Linear(64, 64, key=KEY)
    error = lambda lora: float(jnp.linalg.norm(lora.materialise() - linear.weight))
    start = error(ql.quantize(ql.loraify(linear, rank=8, key=KEY), scheme).weight)
    errors = [
        error(ql.loraify(linear, rank=8, alpha=3, key=KEY, init=ql.loftq(scheme, iterations=n)).weight)
        for n in (1, 5)
    ]
    assert errors[1] < errors[0] < 0.9 * start
    lora = ql.loraify(linear, rank=8, key=KEY, init=ql.loftq(scheme)).weight
    assert type(lora.w) is type(ql.quantize(linear, scheme).weight)
    u, s, vt = np.linalg.svd(np.asarray(linear.weight - ql.materialise(lora.w), np.float64))
    np.testing.assert_allclose(lora.delta(), (u[:, :8] * s[:8]) @ vt[:8], atol=1e-5)


@pytest.mark.slow
def test_initialisations_that_need_dense_weights():
    with pytest.raises(ValueError, match=r"takes a part of the base.*is of type NF4Array\. Adapt the model"):
        ql.loraify(ql.quantize(MLP), rank=2, init=ql.loftq(), key=KEY)


@pytest.mark.slow
def test_what_was_measured_of_inputs_is_kept_by_nothing_else():
    """Those of a large model take gigabytes, and each batch has its own."""
    measure = ql.input_moments(lambda model, x: jax.vmap(model)(x))
    moments = measure(MLP, jnp.ones((3, 6)))
    kept = [weakref.ref(x) for x in moments.values()]
    assert len(kept) == len(MLP.layers)
    del moments
    gc.collect()
    assert [x() for x in kept] == [None] * len(kept)


@pytest.mark.slow
def test_eva_finds_the_directions_of_the_inputs():
    """Inputs that vary in two directions, and layers that see what the ones before make of them."""
    directions = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 2)))[0].T
    x = (np.random.default_rng(1).normal(size=(64, 2)) * [3, 1] @ directions).astype(np.float32)
    measure = ql.input_moments(jax.jit(lambda model, x: jax.vmap(model)(x)))
    moments = jax.tree.map(jnp.add, measure(MLP, x[:32]), measure(MLP, x[32:]))
    hidden = np.asarray(jax.nn.relu(jax.vmap(MLP.layers[0])(x)))
    np.testing.assert_allclose(moments["layers.0.weight"], x.T @ x, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(moments["layers.1.weight"], hidden.T @ hidden, rtol=1e-4, atol=1e-4)

    model = ql.loraify(MLP, rank=2, init=ql.eva(moments), key=KEY)
    a = np.asarray(model.layers[0].weight.a)
    _, _, vt = np.linalg.svd(x, full_matrices=False)
    np.testing.assert_allclose(np.abs(a @ vt[:2].T), np.eye(2), atol=1e-4)
    np.testing.assert_allclose(ql.quaxify(model)(x[0]), MLP(x[0]), atol=1e-6)
    with pytest.raises(ValueError, match=r"eva has no moments for layers\.1\.weight"):
        ql.loraify(MLP, rank=2, init=ql.eva({"layers.0.weight": x.T @ x}), key=KEY)


def test_eva_gives_ranks_to_what_explains_most():
    """One layer's inputs vary in one direction, another's in all alike."""
    moments = {"layers.0.weight": np.diag([9.0, 3, 2, 0.5, 0, 0]), "layers.1.weight": np.eye(16)}
    assert ql.eva_ranks(moments, 2) == {r"^layers\.0": 3, r"^layers\.1": 1}
    assert ql.eva_ranks(moments, 2, most=2) == {r"^layers\.0": 2, r"^layers\.1": 2}
    # Each layer keeps one, which counts: the ranks add up to what was asked for.
    assert ql.eva_ranks(moments, 1) == {r"^layers\.0": 1, r"^layers\.1": 1}
    three = moments | {"layers.2.weight": np.eye(16)}
    assert ql.eva_ranks(three, 2) == {r"^layers\.0": 3, r"^layers\.1": 2, r"^layers\.2": 1}
    ranks, moments = ql.eva_ranks(moments, 2), moments | {"layers.2.weight": np.eye(16)}
    model = ql.loraify(MLP, rank=2, rank_pattern=ranks, init=ql.eva(moments), key=KEY)
    assert [layer.weight.rank for layer in model.layers] == [3, 1, 2]
    with pytest.raises(ValueError, match="rank of at least 1; found 0"):
        ql.eva_ranks(moments, 0)


@pytest.mark.slow
def test_eva_on_weights_stored_in_any_order():
    class Net(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return x @ self.weight

    x = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    net = Net(jnp.ones((5, 3)))
    moments = ql.input_moments(lambda m, x: m(x), fan_in_fan_out=True)(net, x)
    np.testing.assert_allclose(moments["weight"], x.T @ x, rtol=1e-5)
    model = ql.loraify(net, rank=2, init=ql.eva(moments), key=KEY, fan_in_fan_out=True)
    assert model.weight.a.shape == (2, 5)
