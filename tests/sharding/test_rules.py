"""Rules that are made for whole models, for the states of optimisers, and for parts of models."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike.lm import tensor_parallel
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.sharding import abstract, fsdp, shard, specs_for
from tests.samples import drawn, random_key

KEY = random_key(0)
MESH = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
LLAMA = DecoderConfig.from_json(
    {"architectures": ["LlamaForCausalLM"],
     "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
     "vocab_size": 48, "rms_norm_eps": 1e-6}
)  # fmt: skip


@functools.cache
def _llama(*, double_quant: bool = False) -> Decoder:
    model = ql.quantize(drawn(Decoder, LLAMA, key=KEY), "nf4", block_size=32, double_quant=double_quant)
    return ql.loraify(model, rank=4, key=KEY)


@pytest.mark.slow
def test_outputs_then_inputs_by_name():
    model = _llama()
    specs = specs_for(model, tensor_parallel(model, MESH))
    (layer,) = specs.model.layers
    out = [layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj, layer.mlp.up_proj]
    for w in (proj.weight for proj in out):
        assert (w.w.codes, w.w.scale, w.a, w.b) == (
            *[jax.P("model", None)] * 2,
            jax.P(None, None),
            jax.P("model", None),
        )
    for w in (proj.weight for proj in (layer.self_attn.o_proj, layer.mlp.down_proj)):
        assert (w.w.codes, w.w.scale, w.a, w.b) == (*[jax.P(None, "model")] * 3, jax.P(None, None))
    assert specs.lm_head.weight == specs.model.embed_tokens.weight == jax.P("model", None)
    assert specs.model.norm.weight == jax.P()


def test_layers_of_equinox_by_class():
    mlp = eqx.filter_eval_shape(lambda: eqx.nn.MLP(64, 6, 64, depth=2, key=KEY))
    specs = specs_for(mlp, tensor_parallel(mlp, MESH))
    cuts = [(layer.weight, layer.bias) for layer in specs.layers]
    assert cuts[0] == cuts[2] == (jax.P("model", None), jax.P("model"))
    assert cuts[1] == (jax.P(None, "model"), jax.P())
    attention = eqx.filter_eval_shape(lambda: eqx.nn.MultiheadAttention(4, 64, key=KEY))
    specs = specs_for(attention, tensor_parallel(attention, MESH))
    assert specs.query_proj.weight == specs.key_proj.weight == jax.P("model", None)
    assert specs.output_proj.weight == jax.P(None, "model")


def test_layers_that_cannot_be_told_are_divided_where_that_is_possible():
    tree = eqx.filter_eval_shape(
        lambda: [eqx.nn.Linear(8, 3, key=KEY), eqx.nn.Linear(8, 6, key=KEY), eqx.nn.Embedding(8, 8, key=KEY)]
    )
    specs = specs_for(tree, tensor_parallel(tree, MESH))
    assert [layer.weight for layer in specs] == [jax.P(), jax.P("model", None), jax.P()]
    assert specs[1].bias == jax.P("model")


def test_embeddings_of_each_layer():
    """The table is divided by tokens. What is projected to all layers, or to few features, is not."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = DecoderConfig.from_json(
        {"architectures": ["Gemma4ForCausalLM"], **sizes, "vocab_size": 48, "vocab_size_per_layer_input": 48}
    )
    model = eqx.filter_eval_shape(Decoder, config, key=KEY)
    specs = specs_for(model, tensor_parallel(model, MESH))
    assert specs.model.embed_tokens_per_layer.weight == jax.P("model", None)
    parts = specs.model, *(2 * [specs.model.layers[0]])
    names = "per_layer_model_projection", "per_layer_input_gate", "per_layer_projection"
    assert {getattr(part, name).weight for part, name in zip(parts, names, strict=True)} == {jax.P()}
    assert specs.model.layers[1].self_attn.o_proj.weight == jax.P(None, "model")


def test_weights_that_are_stored_the_other_way_round():
    config = DecoderConfig.from_json(
        {"architectures": ["GPT2LMHeadModel"],
         "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 8, "vocab_size": 47}
    )  # fmt: skip
    model = eqx.filter_eval_shape(Decoder, config, key=KEY)
    specs = specs_for(model, tensor_parallel(model, MESH, axis="data"))
    (layer,) = specs.transformer.h
    assert layer.attn.c_attn.weight == layer.mlp.c_fc.weight == jax.P(None, "data")
    assert layer.attn.c_proj.weight == layer.mlp.c_proj.weight == jax.P("data", None)
    assert layer.mlp.c_fc.bias == jax.P("data")
    assert specs.transformer.wte.weight == jax.P()  # 47 words


@pytest.mark.quick("fsdp", "both")
@pytest.mark.parametrize("kind", ["tensor_parallel", "fsdp", "both"])
def test_partitioned_models_and_optimiser_states_go_with_the_model(kind: str):
    model = _llama(double_quant=True)
    by_layer = tensor_parallel(model, MESH)
    rule = {"tensor_parallel": by_layer, "fsdp": fsdp(MESH), "both": fsdp(MESH, over=by_layer)}[kind]
    specs = specs_for(model, rule)
    params, frozen = eqx.partition(model, ql.trainable(model))
    is_packed = lambda x: isinstance(x, ql.NF4Array)
    packed = lambda tree: [
        (w.codes, w.scale) for w in jax.tree.leaves(tree, is_leaf=is_packed) if is_packed(w)
    ]
    assert packed(specs_for(eqx.filter(frozen, eqx.is_array), rule)) == packed(specs)
    assert len(packed(specs)) == 7
    state = eqx.filter_eval_shape(optax.adam(1e-3).init, params)
    found = specs_for(state, rule)[0]
    assert found.count == jax.P()
    a_and_b = lambda tree: [
        (w.a, w.b)
        for w in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, ql.LoraArray))
        if isinstance(w, ql.LoraArray)
    ]
    assert len(a_and_b(specs)) == 7
    assert a_and_b(found.mu) == a_and_b(found.nu) == a_and_b(specs) == a_and_b(specs_for(params, rule))


@pytest.mark.slow
def test_doubly_quantised_weights_get_float32_scales_where_they_are_divided():
    model = _llama(double_quant=True)
    placed = shard(model, MESH, tensor_parallel(model, MESH))
    before, after = (m.model.layers[0].mlp.down_proj.weight.w for m in (model, placed))
    assert after.scale.sharding.spec == after.codes.sharding.spec == jax.P(None, "model")
    np.testing.assert_array_equal(before.materialise(), after.materialise())
    # Where every array is gathered before it is used they stay nested, and are cut each on its own.
    kept = shard(model, MESH, fsdp(MESH)).model.layers[0].mlp.down_proj.weight.w
    assert jax.tree.structure(kept) == jax.tree.structure(before)
    assert kept.codes.addressable_shards[0].data.nbytes * 4 == before.codes.nbytes


@pytest.mark.slow
def test_fully_sharded_and_tensor_parallel():
    model = _llama()
    rule = fsdp(MESH, over=tensor_parallel(model, MESH))
    w = shard(model, MESH, rule).model.layers[0].mlp.up_proj.weight
    assert w.w.codes.sharding.spec == jax.P(("model", "data"), None)
    assert w.a.sharding.spec == jax.P(None, ("data", "model"))
    assert fsdp(MESH, axis="data")("norm.weight", jnp.ones(64)) == jax.P()


def test_shapes_with_shardings_are_those_of_the_placed_model():
    model = ql.quantize(
        drawn(eqx.nn.MLP, 64, 64, 256, depth=1, key=KEY), "nf4", block_size=32, double_quant=True
    )
    arrays, _ = eqx.partition(model, eqx.is_array)
    rule = fsdp(MESH, over=tensor_parallel(model, MESH))
    found = abstract(eqx.filter_eval_shape(lambda: arrays), MESH, rule)
    told = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    found, placed = told(found), told(shard(arrays, MESH, rule))
    assert jax.tree.leaves(found) == jax.tree.leaves(placed)
    assert jax.tree.structure(found) == jax.tree.structure(placed)


@pytest.mark.slow
def test_the_least_divisor_is_told():
    model = ql.quantize({"down_proj": {"weight": jnp.ones((8, 64 * 6))}}, "nf4")
    mesh = jax.sharding.AbstractMesh((4,), ("model",))
    with pytest.raises(ValueError, match=r"down_proj.weight.scale.* over 4 devices.* divide 6, as 2 does"):
        tensor_parallel(model, mesh)
    with pytest.raises(ValueError, match=r"layers.0.weight has shape \(3, 4\).* 3 is not a multiple"):
        tensor_parallel(eqx.nn.MLP(4, 6, 3, depth=1, key=KEY), MESH)


def test_a_mesh_without_the_axis():
    for make in (fsdp, lambda mesh, axis: tensor_parallel({}, mesh, axis=axis)):
        with pytest.raises(ValueError, match="no axis 'expert'; it has data, model"):
            make(MESH, axis="expert")
