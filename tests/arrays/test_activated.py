"""Activated LoRA: a weight that is the base for the rows before its invocation tokens, and adapted after."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.adapters import ALoRAArray
from tests.samples import array, normal

IDS = array([3, 5, 9, 1, 5, 9, 9, 2])  # 5, 9 stands last at 4
ACTS = np.arange(8) >= 4


def _alora(w=None, ids=IDS, **options):
    w = normal(6, 8) if w is None else w
    x = ALoRAArray(w, normal(2, 8, seed=1), normal(6, 2, seed=2), invocation=(5, 9), alpha=4.0, **options)
    return x if ids is None else ql.activate(x, ids)


def _expected(x):
    """Rows by rows."""
    lora = _alora(ids=None).lora()
    return np.where(ACTS[:, None], x @ ql.materialise(lora).T, x @ lora.w.T)


X = normal(8, 8, seed=3)
PRODUCTS = {
    "x @ w.T": lambda w, x: x @ w.T,
    "w @ x.T": lambda w, x: (w @ x.T).T,
    "a layer for each": lambda w, x: jax.vmap(lambda x: w @ x)(x),
    "scanned": lambda w, x: jax.lax.scan(lambda c, _: (c, x @ w.T), 0, length=2)[1][1],
    "under jit": jax.jit(lambda w, x: x @ w.T),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRODUCTS)
def test_rows_before_the_invocation_see_the_base_alone(name):
    with ql.on_materialise("error"):
        y = ql.quaxify(PRODUCTS[name])(_alora(), X)
    np.testing.assert_allclose(y, _expected(X), atol=1e-5)


@pytest.mark.slow
def test_a_weight_of_inputs_by_outputs():
    lora = _alora(ids=None)
    axes = {"out_axes": (-1,), "in_axes": (-2,)}
    x = ALoRAArray(lora.w.T, lora.a, lora.b, invocation=(5, 9), alpha=4.0, **axes)
    y = ql.quaxify(lambda w, x: x @ w)(ql.activate(x, IDS), X)
    np.testing.assert_allclose(y, _expected(X), atol=1e-5)


@pytest.mark.slow
def test_each_text_of_a_batch_has_its_own_tokens():
    ids = jnp.stack([IDS, jnp.ones_like(IDS), jnp.roll(IDS, 2).at[0].set(9)])
    run = jax.vmap(lambda ids: ql.quaxify(lambda w, x: x @ w.T)(_alora(ids=ids), X))
    base, whole = (X @ w.T for w in (normal(6, 8), ql.materialise(_alora(ids=None).lora())))
    starts = [4, 8, 6]
    for y, start in zip(run(ids), starts, strict=True):
        np.testing.assert_allclose(y, np.where(np.arange(8)[:, None] >= start, whole, base), atol=1e-5)


def test_texts_that_are_packed_into_one_row():
    """The tokens of an invocation are of one text; padding is one of its own."""
    ids = jnp.array([5, 9, 1, 5, 9, 5, 9, 2, 5, 9, 3, 0])
    segments = jnp.array([1] * 4 + [2] * 5 + [3] * 2 + [0])
    active = ql.activate(_alora(ids=None), ids, segments).active
    np.testing.assert_array_equal(active, [True] * 4 + [False] + [True] * 4 + [False] * 3)
    one = ql.activate(_alora(ids=None), ids, jnp.zeros_like(ids)).active
    np.testing.assert_array_equal(one, ql.activate(_alora(ids=None), ids).active)


@pytest.mark.slow
def test_only_active_rows_are_learned_from():
    model = {"w": _alora(ql.NF4Array.quantize(normal(6, 8), block_size=32))}
    params, rest = eqx.partition(model, ql.trainable(model))
    assert [leaf.shape for leaf in jax.tree.leaves(params)] == [(2, 8), (6, 2)]

    def loss(params, x):
        return jnp.sum(jnp.sin(ql.quaxify(lambda w: x @ w.T)(eqx.combine(params, rest)["w"])))

    with ql.on_materialise("error"):
        found, of_x = jax.grad(loss, argnums=(0, 1))(params, X)
        other = jax.grad(loss)(params, X.at[:4].add(1))
    np.testing.assert_allclose(found["w"].a, other["w"].a, atol=1e-5)
    base = normal(6, 8)
    dense = ql.materialise(model["w"].w)
    delta = ql.materialise(_alora(base, None).lora()) - base

    def plain(x):
        return jnp.sum(jnp.sin(x @ dense.T + jnp.float32(ACTS)[:, None] * (x @ delta.T)))

    np.testing.assert_allclose(of_x, jax.grad(plain)(X), atol=1e-4)
    within = ql.quaxify(jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T))))
    with ql.on_materialise("error"):
        np.testing.assert_allclose(within(X, model["w"]), of_x, atol=1e-5)


def test_loraify_makes_them_and_layers_are_stacked():
    layers = [eqx.nn.Linear(8, 8, key=key) for key in jax.random.split(jax.random.key(0))]
    model = ql.loraify(layers, rank=2, init="gaussian", invocation_tokens=[5, 9], key=jax.random.key(1))
    assert "ALoRAArray[r=2, from 5 9 on]" in str(ql.summary(model))
    model = jax.tree.map(
        lambda x: x.replace(b=normal(8, 2)) if ql.is_value(x) else x, model, is_leaf=ql.is_value
    )
    run = ql.quaxify(
        lambda stacked, x: jax.lax.scan(lambda x, layer: (jax.vmap(layer)(x), None), x, stacked)[0]
    )
    with ql.on_materialise("error"):
        found = jax.jit(run)(ql.activate(ql.stack_layers(model), IDS), X)
        x, one = X, jax.jit(lambda layer, x: ql.quaxify(jax.vmap(layer))(x))
        for layer in ql.activate(model, IDS):
            x = one(layer, x)
    np.testing.assert_allclose(found, x, atol=1e-5)


def _loraify(**options):
    return ql.loraify(
        {"a.weight": X}, rank=2, where=["a"], invocation_tokens=(1,), key=jax.random.key(0), **options
    )


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: ql.quaxify(jnp.matmul)(_alora(ids=None), X.T), r"Call `quaxlike\.activate\(model, ids\)`"),
        (lambda: ql.quaxify(jnp.matmul)(_alora(), X[:3].T), r"knows 8 tokens .* found rows of shape \(3,\)"),
        (lambda: ql.quaxify(jnp.matmul)(_alora(), X[0]), r"found rows of shape \(\)"),
        (lambda: ql.materialise(_alora()), "has no dense array: it is another weight for tokens from"),
        (lambda: ql.merge({"w": _alora()}), "has no dense array"),
        (lambda: ql.to_lora({"w": _alora()}, rank=2), "has no dense array"),
        (lambda: ql.activate(_alora(), IDS[None]), r"integers of shape \(tokens,\); found int32 of shape"),
        (lambda: ql.activate(_alora(), IDS, IDS[:3]), r"`segments` must be integers of shape \(8,\)"),
        (lambda: ALoRAArray(X, X[:2], X[:, :2], invocation=()), "one or more tokens"),
        (lambda: ALoRAArray(X, X[:2], X[:, :3], invocation=(1,)), "a is of rank 2, b of rank 3"),
        (lambda: _loraify(dora=True), "loraify takes no dora with invocation_tokens"),
        (lambda: _loraify(lora_bias=True), "loraify takes no lora_bias with invocation_tokens"),
        (lambda: _loraify(init="pissa"), "loraify takes no init='pissa' with invocation_tokens"),
    ],
)  # fmt: skip
def test_what_it_cannot_do(run, message):
    with pytest.raises(ValueError, match=message):
        run()
