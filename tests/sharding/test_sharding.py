"""Models on meshes: specs follow the logical arrays, parts of Values included, and computing goes on."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.adapters import METHODS
from quaxlike.arrays.unitful import Unit, Unitful
from quaxlike.arrays.zero import Zero
from quaxlike.sharding import fsdp, shard, specs_for
from tests.array_types import TYPES
from tests.differential.program import under
from tests.samples import normal, random_key

KEY = random_key(0)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
# Megatron's layout of two layers: rows of the first and columns of the second are spread out.
RULE = {
    r"layers\.0": jax.P("model", None),
    r"layers\.1": jax.P(None, "model"),
    r"layers\.0\.bias": jax.P("model"),
}
X = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)


def _mlp():
    return eqx.nn.MLP(64, 64, 256, depth=1, key=KEY)


def _adapted(model):
    model = ql.loraify(model, rank=4, key=KEY)
    raised = lambda w: w.replace(b=w.b + 0.1) if isinstance(w, ql.LoraArray) else w
    return jax.tree.map(raised, model, is_leaf=lambda w: isinstance(w, ql.LoraArray))


MODELS = {
    "plain": _mlp,
    "NF4": lambda: ql.quantize(_mlp(), "nf4"),
    "int8": lambda: ql.quantize(_mlp(), "int8"),
    "LoRA": lambda: _adapted(_mlp()),
    "LoRA over NF4": lambda: _adapted(ql.quantize(_mlp(), "nf4")),
}


def _run(model, x):
    with ql.on_materialise("error"):
        return ql.quaxify(jax.vmap(model))(x)


@pytest.mark.slow
def test_what_adapters_share_is_placed_once():
    model = ql.adapt(_mlp(), METHODS["vera"].start, key=KEY)
    first, second = (layer.weight for layer in shard(model, MESH, RULE).layers)
    assert first.a is second.a
    assert first.b is second.b


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_spread_out_and_computes_the_same(name):
    model = MODELS[name]()
    placed = shard(model, MESH, specs_for(model, RULE))
    x = jax.device_put(X, jax.NamedSharding(MESH, jax.P("data")))
    y = eqx.filter_jit(_run)(placed, x)
    np.testing.assert_allclose(y, _run(model, X), rtol=1e-5, atol=1e-5)
    for before, after in zip(jax.tree.leaves(model), jax.tree.leaves(placed), strict=True):
        if eqx.is_array(before):
            np.testing.assert_array_equal(before, after)
            assert after.sharding.mesh.shape == MESH.shape
    grads = eqx.filter_jit(jax.grad(lambda x, model: jnp.sum(_run(model, x) ** 2)))
    np.testing.assert_allclose(grads(x, placed), grads(X, model), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_codes_and_scales_are_cut_as_the_weight_is():
    model = MODELS["LoRA over NF4"]()
    placed = shard(model, MESH, specs_for(model, RULE))
    shapes = lambda w: [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(w)]
    first, second = (layer.weight for layer in placed.layers)
    # (256, 64) by rows: codes, scales, alpha, a, b.
    assert shapes(first) == [(128, 32), (128, 1), (), (4, 64), (128, 4)]
    # (64, 256) by columns.
    assert shapes(second) == [(64, 64), (64, 2), (), (4, 128), (64, 4)]
    assert shapes(placed.layers[0].bias) == [(128,)]
    assert shapes(placed.layers[1].bias) == [(64,)]


@pytest.mark.slow
def test_specs_have_the_structure_of_the_arrays():
    model = MODELS["LoRA over NF4"]()
    specs = specs_for(model, RULE)
    arrays = eqx.filter(model, eqx.is_array)
    assert jax.tree.structure(jax.tree.map(lambda _: 0, specs)) == jax.tree.structure(
        jax.tree.map(lambda _: 0, arrays)
    )
    assert specs == specs_for(eqx.filter_eval_shape(MODELS["LoRA over NF4"]), RULE)
    w = specs.layers[1].weight
    assert (w.w.codes, w.w.scale) == (jax.P(None, "model"),) * 2
    assert (w.a, w.b) == (jax.P(None, "model"), jax.P(None, None))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "NF4", "int8", "LoRA over NF4"])
def test_tensor_parallel_in_shard_map(name):
    """Each device multiplies by its own rows and columns: whole blocks, with their own scales."""
    model = MODELS[name]()
    specs = specs_for(model, RULE)
    arrays, rest = eqx.partition(model, eqx.is_array)

    def local(arrays, x):
        first, second = (layer.weight for layer in eqx.combine(arrays, rest).layers)
        hidden = jax.nn.relu(x @ first.T)
        return jax.lax.psum(hidden @ second.T, "model")

    fn = jax.shard_map(ql.quaxify(local), mesh=MESH, in_specs=(specs, jax.P("data")), out_specs=jax.P("data"))
    with ql.on_materialise("error"):
        y = jax.jit(fn)(shard(arrays, MESH, specs), X)
    first, second = (np.float64(ql.materialise(layer.weight)) for layer in model.layers)
    np.testing.assert_allclose(y, np.maximum(X @ first.T, 0) @ second.T, rtol=1e-4, atol=1e-4)


def test_a_callable_and_a_spec_for_a_whole_part():
    model = MODELS["NF4"]()
    rule = lambda name, leaf: jax.P("model") if leaf.ndim == 2 and "layers.0" in name else None
    specs = specs_for(model, rule)
    assert specs.layers[0].weight.codes == jax.P("model", None)
    assert specs.layers[1].weight.codes == jax.P(None, None)
    assert specs.layers[0].bias == jax.P()
    state = {"w": model.layers[0].weight, "more": {"x": jnp.ones((4, 4)), "n": 3}}
    placed = shard(state, MESH, {"w": jax.P("model"), "more": jax.P(None, "data")})
    assert placed["w"].scale.sharding.spec == jax.P("model", None)
    assert placed["more"]["x"].sharding.spec == jax.P(None, "data")
    assert placed["more"]["n"] == 3


@pytest.mark.slow
def test_stacked_layers_are_spread_by_layers():
    stack = ql.NF4Array.quantize(jnp.ones((4, 8, 64)), stacked=1, double_quant=True)
    placed = shard({"w": stack}, MESH, {"w": jax.P("model")})["w"]
    assert [leaf.addressable_shards[0].data.shape[0] for leaf in jax.tree.leaves(placed)] == [2] * 4


@pytest.mark.slow
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("width", [64, 192, 96])
def test_blocks_are_not_cut(width, double_quant):
    model = {"proj": {"weight": ql.NF4Array.quantize(jnp.ones((8, width)), double_quant=double_quant)}}
    rule = {"proj": jax.P(None, "model")}
    with pytest.raises(ValueError, match=r"proj.weight.*([Bb]locks.* cannot be cut|share blocks)"):
        shard(model, MESH, specs_for(model, rule))


@pytest.mark.quick("outputs")
@pytest.mark.parametrize("spread", ["weights", "outputs", "layers"])
def test_lora_over_flat_codes(spread):
    # Blocks of 64 cross rows of 16, so no device has whole rows, however the adapter is spread.
    layer = _adapted(ql.quantize(eqx.nn.Linear(16, 16, key=KEY), "nf4"))
    stack = ql.stack_layers([layer, layer])
    fn = ql.quaxify(lambda stack, x: jax.lax.scan(lambda x, m: (jax.vmap(m)(x), None), x, stack)[0])
    out = jax.NamedSharding(MESH, jax.P(None, "model") if spread == "outputs" else jax.P())
    rules = {"weights": fsdp(MESH), "outputs": {}, "layers": {"weight": jax.P("data"), "bias": jax.P("data")}}
    placed = shard(stack, MESH, rules[spread])
    y = jax.jit(fn, out_shardings=out)(placed, X[:, :16])
    np.testing.assert_allclose(y, fn(stack, X[:, :16]), rtol=1e-5, atol=1e-5)


def test_a_partial_block_at_the_end_of_rows_is_not_cut():
    w = ql.Int8Array.quantize(jnp.ones((8, 48)), block_size=32)
    with pytest.raises(ValueError, match=r"w: Int8Array .* blocks of 32 do not fill the axis of 48"):
        specs_for({"w": w}, {"w": jax.P(None, "model")})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"layer.0": jax.P("model")}, r"'layer.0' matches none of the arrays .* 'layers.0'"),
        ({r"layers\.0": jax.P(None, None, "model")}, r"layers.0.weight: .* more axes than .*\(256, 64\)"),
    ],
)
def test_rules_that_do_not_fit(rule, message):
    with pytest.raises(ValueError, match=message):
        specs_for(_mlp(), rule)


def test_what_a_mesh_does_not_have():
    with pytest.raises(ValueError, match=r"w: .* names the axis 'expert', but the mesh has data, model"):
        shard({"w": jnp.ones(4)}, MESH, {"w": jax.P("expert")})
    with pytest.raises(ValueError, match=r"w has shape \(3,\), .* 3 is not a multiple"):
        shard({"w": jnp.ones(3)}, MESH, {"w": jax.P("model")})


class _Pair(ql.ArrayValue):
    x: jax.Array
    y: jax.Array

    def materialise(self):
        return jnp.outer(self.x, self.y)


def test_types_of_your_own():
    pair = {"w": _Pair(jnp.ones(4), jnp.ones(6))}
    assert jax.tree.leaves(specs_for(pair, {"w": jax.P()})) == [jax.P(), jax.P()]
    with pytest.raises(ValueError, match=r"w: Cannot tell how .* Define `_Pair.shard_spec\(spec\)`"):
        specs_for(pair, {"w": jax.P("model")})


_SHORT = ["OneHotVector", "Full, array", "BlockSparseArray of NF4Array", "NF4Array"]  # leaves of fewer axes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _SHORT else pytest.mark.slow) for name in TYPES]
)
def test_a_spec_that_names_no_axis_replicates_all_leaves(name):
    with under(True):
        x = TYPES[name]()
        specs = jax.tree.leaves(specs_for({"w": x}, {"w": jax.P(*[None] * x.ndim)}))
        for leaf, spec in zip(jax.tree.leaves(x), specs, strict=True):
            assert len(spec) <= leaf.ndim
            assert set(spec) <= {None}


def test_values_without_arrays():
    placed = shard({"w": Zero((4, 4), jnp.float32)}, MESH, {"w": jax.P("model")})
    assert placed["w"].shape == (4, 4)


@pytest.mark.slow
def test_a_result_whose_parts_differ_between_devices_is_joined_dense():
    """A row for each device, times numbers of its own: the factor of the adapter is shared no more."""
    w = ql.LoraArray(normal(4, 8), normal(2, 8), normal(4, 2))
    y = normal(4, 8)
    spec = jax.P(("data", "model"))
    fn = jax.shard_map(lambda y, w: w * y, mesh=MESH, in_specs=(spec, spec), out_specs=spec)
    with ql.on_materialise("allow"):
        found = ql.quaxify(fn)(y, w)
    np.testing.assert_allclose(found, ql.materialise(w) * y, rtol=1e-6)
    with ql.on_materialise("error"), pytest.raises(RuntimeError, match="differ between devices"):
        ql.quaxify(fn)(y, w)
    with ql.on_materialise("allow"):  # what holds it stays
        found = ql.quaxify(fn)(y, Unitful(w, "m"))
    assert found.unit == Unit("m")
    np.testing.assert_allclose(found.array, ql.materialise(w) * y, rtol=1e-6)
    with ql.on_materialise("error"):  # what all devices do alike is joined as it is
        kept = ql.quaxify(jax.shard_map(lambda w: 2.0 * w, mesh=MESH, in_specs=spec, out_specs=spec))(w)
    assert isinstance(kept, ql.LoraArray)
