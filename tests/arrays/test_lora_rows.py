"""A few trained rows of an embedding."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files.tensors import open_tensors
from quaxlike.lm import peft
from tests.array_types import TYPES
from tests.samples import array, normal


class Model(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    head: eqx.nn.Linear

    def __call__(self, ids):
        return jax.vmap(self.head)(jax.vmap(self.embed_tokens)(ids)) @ self.embed_tokens.weight.T


@pytest.fixture(scope="module")
def model():
    plain = Model(eqx.nn.Embedding(weight=normal(7, 4)), eqx.nn.Linear(4, 4, key=jax.random.key(0)))
    return ql.loraify(plain, rank=2, key=jax.random.key(1), trainable_token_indices=[5, 2])


def moved(model):
    where = lambda m: m.embed_tokens.weight.rows
    return eqx.tree_at(where, model, where(model) + 1.0)


IDS = array([0, 5, 2, 6, 5])


def test_rows_take_the_place_of_those_of_the_matrix(model):
    rows = moved(model).embed_tokens.weight
    assert isinstance(rows, ql.TrainableRows)
    dense = np.array(rows.w)
    dense[[5, 2]] += 1
    np.testing.assert_array_equal(ql.materialise(rows), dense)
    look_up = jax.jit(ql.quaxify(lambda w, ids: (w[ids], w.at[ids + 3].get(mode="clip"), w[1:6])))
    with ql.on_materialise("error"):
        found = look_up(rows, IDS)
        last = ql.TrainableRows(rows.w, rows.rows[:1], (6,))
        beyond = ql.quaxify(lambda w: w.at[jnp.array([7, 40])].get(mode="clip"))(last)
    np.testing.assert_array_equal(beyond, np.tile(rows.rows[:1], (2, 1)))
    clipped = dense[np.clip(np.asarray(IDS) + 3, 0, 6)]
    for x, wanted in zip(found, (dense[np.asarray(IDS)], clipped, dense[1:6]), strict=True):
        np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize(("rows", "indices"), [(2, (1, 1)), (1, (3,)), (1, (-1,)), (2, (1,))])
def test_they_are_different_rows_of_the_matrix(rows, indices):
    with pytest.raises(ValueError, match=r"different rows of w; found w \(3, 4\), rows .* and indices \("):
        ql.TrainableRows(normal(3, 4), normal(rows, 4), indices)


@pytest.mark.slow
def test_a_product_in_a_custom_derivative_is_transposed():
    w = TYPES["TrainableRows of NF4Array"]()
    f = jax.custom_jvp(lambda w: w @ w)
    f.defjvp(lambda x, t: jax.jvp(lambda w: w @ w, x, t))
    loss = lambda rows, w: jnp.sum(jnp.sin(ql.quaxify(f)(eqx.tree_at(lambda w: w.rows, w, rows))))
    dense = lambda rows: jnp.sum(
        jnp.sin(jnp.linalg.matrix_power(w.w.materialise().at[jnp.array([0, 2])].set(rows), 2))
    )
    with ql.on_materialise("allow"):
        found = jax.grad(loss)(w.rows, w)
    np.testing.assert_allclose(found, jax.grad(dense)(w.rows), rtol=1e-4, atol=1e-5)


def test_they_alone_have_gradients(model):
    model = moved(model)
    params, frozen = eqx.partition(model, ql.trainable(model))
    sizes = [x.shape for x in jax.tree.leaves(params)]
    assert sorted(sizes) == [(2, 4), (2, 4), (4, 2)]

    def loss(params, quaxified):
        whole = eqx.combine(params, frozen)
        return jnp.sum(jnp.sin(ql.quaxify(whole)(IDS) if quaxified else ql.materialise(whole)(IDS)))

    with ql.on_materialise("error"):
        found = jax.jit(jax.grad(lambda params: loss(params, True)))(params)
    wanted = jax.jit(jax.grad(lambda params: loss(params, False)))(params)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


PRODUCTS = {
    "an output layer": lambda w, x: x @ w.T,
    "on the left": lambda w, x: w @ x[0],
    "rows summed over": lambda w, x: (x @ w.T) @ w,
    "transposed on the left": lambda w, x: w.T @ (w @ x.T),
    "of a batch": lambda w, x: jax.vmap(lambda x: w @ x)(x),
    "with itself": lambda w, x: w @ w.T,
}


@pytest.mark.quick("with itself")
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_never_form_the_matrix(name, model):
    rows, x = moved(model).embed_tokens.weight, normal(3, 4, seed=1)
    if name == "with itself":
        x = x[:0]
    loss = lambda w, x: jnp.sum(jnp.sin(PRODUCTS[name](w, x)))

    def of_parts(rows, x):
        return loss(rows, x)

    with ql.on_materialise("error"):
        found = jax.jit(jax.value_and_grad(ql.quaxify(of_parts), argnums=(0, 1)))(rows, x)
        jaxpr = jax.make_jaxpr(jax.grad(ql.quaxify(of_parts)))(rows, x)
    wanted = jax.value_and_grad(lambda r, x: loss(ql.materialise(r), x), argnums=(0, 1))(rows, x)
    assert np.any(np.asarray(found[1][0].rows))
    assert not np.any(np.asarray(found[1][0].w))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    # No rows are put into a matrix of the same shape.
    scattered = [e.invars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "scatter"]
    assert rows.shape not in scattered


def test_files_hold_the_rows_alone(model, tmp_path):
    model = moved(model)
    peft.save_adapter(tmp_path, model)
    tensors = open_tensors(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    assert tensors[name].shape == (2, 4)
    assert len(tensors) == 3
    base = ql.merge(model)
    np.testing.assert_array_equal(base.embed_tokens.weight, ql.materialise(model.embed_tokens.weight))
    again = peft.load_adapter(
        tmp_path, Model(eqx.nn.Embedding(weight=model.embed_tokens.weight.w), base.head)
    )
    assert again.embed_tokens.weight.indices == (5, 2)
    np.testing.assert_array_equal(again.embed_tokens.weight.rows, model.embed_tokens.weight.rows)
    assert ql.summary(model).trainable == 8 + 16


@pytest.mark.parametrize("indices", [[7], [1, 1], [-1]])
def test_rows_that_are_not_there(indices, model):
    with pytest.raises(ValueError, match=r"rows of a plain matrix, each once; embed_tokens\.weight is a"):
        ql.loraify(ql.merge(model), rank=1, key=jax.random.key(0), trainable_token_indices=indices)
