"""Layers that read the keys and values of others, and embeddings of each layer, as in Gemma 4."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.lm import generate
from quaxlike.lm.folders.model_config import UnsupportedConfigError
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.surgery.trees import named_arrays
from tests.lm.models.fixtures import agree, check_adapters_on_quantised_weights
from tests.samples import random_key

_KINDS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")]
_CONFIG = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 40, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 40,
    "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "sliding_window": 3, "layer_types": _KINDS,
}  # fmt: skip


def _drawn(**changes):
    """With weights that make tokens differ."""
    config = DecoderConfig.from_json(_CONFIG | changes)
    make = eqx.filter_jit(
        lambda key: jax.tree.map(lambda x: x if x.ndim == 1 else 2 * x, Decoder(config, key=key))
    )
    return make(random_key())


@pytest.fixture(scope="module")
def model():
    return _drawn()


@pytest.mark.slow
def test_layers_without_keys_and_values(model):
    assert model.config.sources == (0, 1, 0, 1)
    names = named_arrays(model)
    of_layer = lambda i: {x.split(".")[4] for x in names if x.startswith(f"model.layers.{i}.self_attn.")}
    assert of_layer(1) == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
    assert of_layer(2) == of_layer(3) == {"q_proj", "o_proj", "q_norm"}
    layers = [f"model.layers.{i}.{x}.weight" for i in (0, 3) for x in ("self_attn.q_proj", "mlp.up_proj")]
    assert [names[x].shape for x in layers] == [(16, 16), (24, 16), (32, 16), (48, 16)]
    assert [part is None for part in model.memory(4)] == [False, False, True, True]
    # Values of a layer that gives nothing on itself reach the layer that reads them.
    at = lambda name: lambda model: getattr(model.model.layers[0].self_attn, name).weight
    quiet = eqx.tree_at(at("o_proj"), model, replace_fn=jnp.zeros_like)
    changed = eqx.tree_at(at("v_proj"), quiet, replace_fn=lambda x: -x)
    run = jax.jit(lambda model: model(jnp.arange(6), jnp.ones(6, bool)))
    assert np.abs(run(quiet) - run(changed)).max() > 1e-3


def test_the_layer_that_is_read_is_the_last_of_its_kind():
    kinds = ["full_attention", "sliding_attention", "sliding_attention", *_KINDS[2:]]
    config = DecoderConfig.from_json(_CONFIG | {"layer_types": kinds, "num_hidden_layers": 5})
    assert config.sources == (0, 1, 2, 2, 0)


@pytest.mark.slow
def test_generation_is_the_whole_prompt_step_by_step(model):
    prompts = np.random.default_rng(0).integers(0, 40, (2, 9)).astype(np.int32)
    mask = np.ones((2, 9), bool)
    mask[0, :4] = False
    run = jax.jit(lambda ids, seen: jnp.argmax(model(ids, seen)[jnp.sum(seen) - 1]))
    tokens = generate(model, prompts, mask=mask, max_new_tokens=5)
    for row, seen, found in zip(prompts, mask, tokens, strict=True):
        ids = list(row[seen])
        for token in found:
            padded = np.pad(ids, (0, 24 - len(ids))).astype(np.int32)
            assert int(run(padded, np.arange(24) < len(ids))) == token
            ids.append(int(token))


@pytest.mark.slow
def test_caches_of_few_bits(model):
    """Queries are rotated as keys were, in layers that read those of others, too."""
    ids, seen = jnp.arange(12) % 7, jnp.ones(12, bool)

    def run(cache):
        hidden = lambda model: model.body(ids, seen, model.memory(12, cache))[0]
        return jax.jit(ql.quaxify(hidden))(model)

    exact, rounded = run(None), run("int4_block")
    assert np.std(exact - rounded) < 0.2 * np.std(exact)


@pytest.mark.slow
def test_packed_texts_do_not_see_each_other(model):
    ids = np.random.default_rng(0).integers(0, 40, 12).astype(np.int32)
    logits = jax.jit(lambda ids, segments: model.logits(model.hidden(ids, ids >= 0, segments)))
    packed = logits(ids, np.repeat(np.int32([1, 2]), [5, 7]))
    agree(packed[:5], logits(ids[:5], np.ones(5, np.int32)), 5e-4)
    agree(packed[5:], logits(ids[5:], np.ones(7, np.int32)), 5e-4)
    whole = logits(ids, np.ones(12, np.int32))
    assert np.abs(whole[5:] - packed[5:]).max() > 0.1


@pytest.mark.slow
def test_checkpoints(model, tmp_path):
    """Published files have keys and values of layers that share them; nothing reads those."""
    tensors = named_arrays(model)
    (tmp_path / "config.json").write_text(json.dumps(_CONFIG))
    beside = {f"model.layers.3.self_attn.{x}.weight": jnp.ones((2, 2)) for x in ("k_proj", "v_norm")}
    lm.write(tmp_path / "model.safetensors", tensors | beside)
    read, _ = lm.load(tmp_path)
    assert eqx.tree_equal(read, model)
    larger = lm.resize_vocabulary(read, 44)
    lm.save(tmp_path / "out", larger, tmp_path)
    assert lm.read(tmp_path / "out").keys() == tensors.keys()
    again, config = lm.load(tmp_path / "out")
    assert config["vocab_size"] == config["vocab_size_per_layer_input"] == 44
    assert again.model.embed_tokens_per_layer.weight.shape == (44, 16)
    # transformers 5.24 says the same in another way.
    of_layers = {"1": {"head_dim": 16}, "3": {"head_dim": 16}}
    changed = {x: _CONFIG[x] for x in _CONFIG if x != "global_head_dim"} | {"per_layer_config": of_layers}
    assert DecoderConfig.from_json(changed) == DecoderConfig.from_json(_CONFIG)


@pytest.mark.slow
def test_adapters_on_quantised_weights(model, tmp_path):
    adapted = check_adapters_on_quantised_weights(model, tmp_path)
    assert len(ql.select(model)) == sum(isinstance(x, ql.LoraArray) for x in named_arrays(adapted).values())


@pytest.mark.slow
def test_scanned_layers_have_their_own_embeddings():
    alike = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "layer_types": ["full_attention"] * 4}
    model = _drawn(**alike)
    prompts = np.arange(6, dtype=np.int32)[None]
    first, second = (generate(x, prompts, max_new_tokens=4) for x in (model, model.stacked()))
    np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_norms_are_folded_where_layers_have_keys(model):
    moments = {name: np.eye(x.shape[1]) for name, x in named_arrays(model).items() if x.ndim == 2}
    balanced = ql.balance(model, moments, "int4_block", block_size=8)
    run = jax.jit(lambda model: model(jnp.arange(6), jnp.ones(6, bool)))
    agree(run(balanced), run(model), 1e-3)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"enable_moe_block": True}, "num_experts=None; Gemma4Config supports a number with enable_moe_"),
        ({"enable_moe_block": True, "num_experts": 4}, "top_k_experts=None; Gemma4Config supports a number"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3; Gemma4Config supports fewer layers"),
        ({"sliding_window": 0}, "a window of at least one token"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 4}, "3": {"head_dim": 8}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"rms_norm_eps": 4}, "3": {"rms_norm_eps": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"1": 3, "3": 3}}, "per_layer_config"),
        ({"vocab_size_per_layer_input": 39}, "=39; Gemma4Config supports at least vocab_size=40"),
        ({"global_head_dim": 0, "head_dim": None}, "global_head_dim=None.*a positive head size"),
    ],
)
def test_configurations_that_are_refused(entries, said):
    with pytest.raises(UnsupportedConfigError, match=said):
        DecoderConfig.from_json(_CONFIG | entries)


def test_heads_of_global_layers_are_those_of_others_unless_they_differ():
    entries = {"global_head_dim": None, "num_key_value_heads": None}
    config = DecoderConfig.from_json(_CONFIG | entries)
    assert (config.global_head_dim, config.num_global_key_value_heads) == (8, 2)
    of_layers = {"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}}}
    assert DecoderConfig.from_json(_CONFIG | entries | of_layers).num_global_key_value_heads == 2


def test_the_last_layer_is_global():
    config = DecoderConfig.from_json(
        _CONFIG | {"layer_types": None, "num_hidden_layers": 8, "num_kv_shared_layers": 0}
    )
    assert config.windows == (True,) * 5 + (False, True, False)
