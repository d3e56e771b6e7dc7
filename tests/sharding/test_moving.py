"""Values from mesh to mesh, in host memory, donated, and in programs that are divided by hand in part."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.lm import tensor_parallel
from quaxlike.sharding import fsdp, shard
from tests.samples import normal, random_key

KEY = random_key(0)
AUTO = (jax.sharding.AxisType.Auto,) * 2
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=AUTO)
OTHER = jax.make_mesh((1, 4), ("data", "model"), axis_types=AUTO)
X = normal(8, 128)


def _weight() -> Any:
    w = ql.LoraArray(ql.quantize(normal(64, 128), "nf4", block_size=32), normal(4, 128), normal(64, 4))
    return shard(w, MESH, jax.P("model", None))


def _bytes(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def _kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree)}


@pytest.mark.slow
def test_from_one_mesh_to_another():
    w = _weight()
    columns = jax.NamedSharding(OTHER, jax.P(None, "model"))
    for moved in (ql.quaxify(jax.device_put)(w, columns), shard(w, OTHER, jax.P(None, "model"))):
        assert isinstance(moved, ql.LoraArray)
        assert {x.sharding.mesh.shape_tuple for x in jax.tree.leaves(moved)} == {OTHER.shape_tuple}
        assert moved.w.codes.addressable_shards[0].data.shape == (64, 16)
        assert moved.b.addressable_shards[0].data.shape == (64, 4)
        assert _bytes(moved) == _bytes(w)


@pytest.mark.slow
def test_in_host_memory_and_back():
    """Weights that wait in host memory lie there as they are stored, and are spread as before."""
    w = _weight()
    to_host = lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host"))
    waiting = jax.tree.map(to_host, w)
    assert _kinds(waiting) == {"pinned_host"}
    assert [x.sharding.spec for x in jax.tree.leaves(waiting)] == [
        x.sharding.spec for x in jax.tree.leaves(w)
    ]
    assert _bytes(waiting) == _bytes(w)
    rows = jax.NamedSharding(MESH, jax.P("model", None), memory_kind="pinned_host")
    assert _kinds(ql.quaxify(jax.device_put)(w, rows)) == {"pinned_host"}
    back = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")), waiting)
    assert _kinds(back) == {"device"}
    assert _bytes(back) == _bytes(w)


@pytest.mark.slow
def test_fetched_from_host_memory_within_a_program():
    w = _weight()
    waiting = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), w)

    @jax.jit
    @ql.quaxify
    def product(w: Any, x: Any) -> Any:
        return x @ jax.device_put(w, jax.memory.Space.Device).T

    with ql.on_materialise("error"):
        found = product(waiting, X)
    np.testing.assert_allclose(found, X @ np.asarray(ql.materialise(w)).T, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_donated_parts_of_weights_are_gone():
    w = _weight()
    double = jax.jit(ql.quaxify(lambda w: w * 2.0), donate_argnums=0)
    expected = 2 * np.asarray(ql.materialise(w))
    with ql.on_materialise("error"):
        found = double(w)
    assert isinstance(found, ql.LoraArray)
    assert all(x.is_deleted() for x in jax.tree.leaves(w))
    assert [x.sharding.spec for x in jax.tree.leaves(found)][:1] == [jax.P("model", None)]
    np.testing.assert_allclose(ql.materialise(found), expected, rtol=1e-5)


def test_some_axes_by_hand_and_the_others_by_the_compiler():
    """Rows of the weight by hand; the batch is divided by the compiler."""
    w = _weight()
    x = jax.device_put(X, jax.NamedSharding(MESH, jax.P("data")))
    fn = jax.shard_map(
        lambda w, x: x @ w.T,
        mesh=MESH,
        in_specs=(jax.P("model"), jax.P()),
        out_specs=jax.P(None, "model"),
        axis_names={"model"},
    )
    with ql.on_materialise("error"):
        found = jax.jit(ql.quaxify(fn))(w, x)
        gradient = jax.jit(jax.grad(lambda a: jnp.sum(ql.quaxify(fn)(w.replace(a=a), x) ** 2)))(w.a)
    np.testing.assert_allclose(found, X @ np.asarray(ql.materialise(w)).T, rtol=1e-4, atol=1e-3)
    dense = lambda a: jnp.sum((X @ ql.materialise(w.replace(a=a)).T) ** 2)
    np.testing.assert_allclose(gradient, jax.jit(jax.grad(dense))(w.a), rtol=1e-4, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["tensor_parallel", "fsdp"])
def test_whole_models_from_mesh_to_mesh(rule: str):
    model = ql.quantize(eqx.nn.MLP(64, 64, 256, depth=1, key=KEY), "nf4", block_size=32)
    made = (lambda mesh: fsdp(mesh)) if rule == "fsdp" else (lambda mesh: tensor_parallel(model, mesh))
    first = shard(model, MESH, made(MESH))
    second = shard(first, OTHER, made(OTHER))
    arrays = lambda tree: eqx.filter(tree, eqx.is_array)
    assert _bytes(arrays(second)) == _bytes(arrays(model))
    codes = second.layers[1].weight.codes
    assert codes.addressable_shards[0].data.nbytes * 4 == codes.nbytes
