"""Every architecture against transformers: logits, losses and gradients, in full and in NF4."""

import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import FAMILIES, UnsupportedConfigError, load
from quaxlike.lm.families import OF_FEW
from quaxlike.lm.models import (
    Bert,
    BertConfig,
    Decoder,
    DecoderConfig,
    DecoderForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
)
from quaxlike.lm.models.decoder_config import text_tower
from quaxlike.lm.models.feed_forward import route
from quaxlike.surgery.trees import named_arrays, replace
from tests.lm.models.fixtures import MODELS, agree, expected, folder, in_float32, legacy
from tests.samples import wrong_types

FEW = ["llama_llama3", "gemma3", "qwen2_moe"]  # the others take long
SHARED = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 11}


def logits_of(model, z):
    run = lambda model, ids, seen: jax.vmap(ql.quaxify(model))(ids, seen)
    with ql.on_materialise("error"):
        return jax.jit(run)(model, z["input_ids"], z["attention_mask"].astype(bool))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_logits(name):
    """Of a whole row, and of rows with padding on either side."""
    z = expected(name)
    model = in_float32(name)
    agree(logits_of(model, z)[z["valid"]], z["logits"][z["valid"]], 3e-4 if "longrope" in name else 1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_configurations_of_transformers_4_say_the_same(name, tmp_path):
    config = json.loads((folder(name) / "config.json").read_text())
    old = json.loads((legacy(name, tmp_path) / "config.json").read_text())
    assert DecoderConfig.from_json(config) == DecoderConfig.from_json(old)


@pytest.mark.slow
def test_an_expert_that_no_token_chose_has_no_gradient():
    """Not even what rounding leaves: Adam would make a whole step of it."""
    config = DecoderConfig.from_json(SHARED | {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "norm_topk_prob": True,
    })  # fmt: skip
    logits = jnp.asarray([[0.3, -7.0, 1.1, 0.2], [2.5, -6.0, 0.7, 2.4]])
    chosen, share = route(logits, config)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = -np.sort(-probabilities)[:, :2]
    np.testing.assert_array_equal(chosen, [[2, 0], [0, 3]])
    np.testing.assert_allclose(share, best / best.sum(-1, keepdims=True), rtol=1e-6)
    gradient = jax.grad(lambda logits: jnp.sum(jnp.sin(3 * route(logits, config)[1])))(logits)
    assert (gradient[:, 1] == 0).all()
    assert np.count_nonzero(gradient) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(name):
    z = expected(name)
    model = in_float32(name)
    ids = jnp.asarray(z["train_input_ids"])
    arrays = named_arrays(model)
    wanted = {key.removeprefix("grad::"): z[key] for key in z if key.startswith("grad::")}
    wanted = {key: grad for key, grad in wanted.items() if not ql.is_value(arrays[key])}

    def loss(weights):
        whole = ql.quaxify(replace(model, weights))
        logits = jax.vmap(whole)(ids, jnp.ones_like(ids, bool))[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    with ql.on_materialise("error"):
        value, grads = jax.jit(jax.value_and_grad(loss))({key: arrays[key] for key in wanted})
    agree(value, z["train_loss"], 1e-5)
    for key, grad in wanted.items():
        assert np.linalg.norm(np.asarray(grads[key]) - grad) < 1e-4 * np.linalg.norm(grad), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if "mxfp4" in name])
def test_experts_of_4_bits_stand_for_what_transformers_makes_of_them(name):
    z, arrays = expected(name), named_arrays(in_float32(name))
    stacks = [key.removeprefix("dequant::") for key in z if key.startswith("dequant::")]
    assert stacks
    for key in stacks:
        assert isinstance(arrays[key], ql.BlockArray)
        np.testing.assert_array_equal(ql.materialise(arrays[key]), z[f"dequant::{key}"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_llama3", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_quantised_as_they_are_read(name):
    z, q = expected(name), expected(name, "nf4.npz")
    model, _ = load(folder(name), quantize={"scheme": "nf4", "double_quant": True})
    kinds = {key: type(leaf) for key, leaf in named_arrays(model).items() if ql.is_value(leaf)}
    assert len(kinds) == 7 * 3
    assert set(kinds.values()) == {ql.NF4Array}
    agree(logits_of(model, z)[z["valid"]], q["logits"][z["valid"]])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_llama3", "gemma3"])
def test_the_output_layer_is_quantised_when_it_is_read(name):
    z = expected(name)
    model, _ = load(folder(name), quantize="int8", head=True)
    tied = model.part("lm_head") is None
    assert tied == (name == "gemma3")
    assert ql.is_value(model.embedding) == tied
    assert tied or ql.is_value(model.part("lm_head").weight)
    agree(logits_of(model, z)[z["valid"]], logits_of(ql.materialise(model), z)[z["valid"]])
    with pytest.raises(ValueError, match="`head` says that the output layer is quantised as well: pass"):
        load(folder(name), head=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_quantised_in_their_stacks(name):
    z = expected(name)
    model, _ = load(folder(name), quantize="nf4")
    stacks = {key: leaf for key, leaf in named_arrays(model).items() if ".experts." in key}
    assert all(isinstance(leaf, ql.NF4Array) for leaf in stacks.values() if leaf.ndim == 3)
    dense = logits_of(ql.materialise(model), z)
    agree(logits_of(model, z)[z["valid"]], dense[z["valid"]])


@pytest.mark.slow
def test_each_device_gets_its_part():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    model, _ = load(folder("gemma3"), quantize={"scheme": "nf4", "block_size": 32}, mesh=mesh)
    codes = model.model.layers[0].mlp.up_proj.weight.codes
    assert {shard.data.size for shard in codes.addressable_shards} == {codes.size // 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_scanned_layers(name):
    """Layers of two kinds, those with windows and those without, in 4 bits and adapted."""
    z = expected(name)
    model, _ = load(folder(name), quantize="nf4")
    model = ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(0))
    stacked = model.stacked()
    agree(logits_of(stacked, z)[z["valid"]], logits_of(model, z)[z["valid"]])
    back = stacked.unstacked()
    assert jax.tree.structure(back) == jax.tree.structure(model)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(model)))
    ids = z["greedy_prompt_ids"]
    tokens = [ql.lm.generate(each, ids, max_new_tokens=4) for each in (model, stacked)]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.slow
def test_no_module_is_written_out_to_name_it(monkeypatch):
    """JAX names a function that has no name by its `repr`, which for a module is one of all its arrays."""
    model, _ = load(folder("qwen2"))

    def written(self):
        raise AssertionError("a module was written out")

    monkeypatch.setattr(eqx.Module, "__repr__", written)
    jax.eval_shape(jax.grad(lambda model: jnp.sum(model(jnp.arange(5), jnp.ones(5, bool)))), model)


@pytest.mark.slow
def test_one_array_for_tied_layers():
    model, _ = load(folder("qwen2"))
    assert "lm_head.weight" not in named_arrays(model)
    apart = model.with_separate_head()
    assert apart.lm_head.weight is model.model.embed_tokens.weight
    ids, seen = jnp.arange(5), jnp.ones(5, bool)
    run = jax.jit(lambda model: model(ids, seen))
    agree(run(apart), run(model), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"where": ["lm_head"]}, {"where": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
def test_an_output_layer_that_is_tied_becomes_one_of_its_own(options):
    """If it is named and the embedding is not; the weight is stored once for both."""
    model, _ = load(folder("qwen2"))
    adapted = ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(0), **options)
    own = adapted.lm_head.weight
    assert adapted.embedding is model.embedding
    assert (own.w if isinstance(own, ql.LoraArray) else own.array) is model.embedding
    moved = own.replace(b=own.b + 1) if isinstance(own, ql.LoraArray) else type(own)(own.array + 1)
    moved = eqx.tree_at(lambda model: model.lm_head.weight, adapted, moved, is_leaf=ql.is_value)
    ids, seen = jnp.arange(5), jnp.ones(5, bool)
    wanted = model.hidden(ids, seen) @ ql.materialise(moved.lm_head.weight).T
    agree(ql.quaxify(moved)(ids, seen), wanted, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"where": ["embed_tokens", "lm_head"]},
        {"where": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"where": r".*weight"},
    ],
)
def test_tied_layers_have_one_adapter(options):
    model, _ = load(folder("qwen2"))
    adapted = ql.loraify(model, rank=2, key=jax.random.key(0), **options)
    assert adapted.lm_head is None
    assert ql.is_value(adapted.embedding)


@pytest.mark.slow
def test_bfloat16():
    model, _ = load(folder("qwen3"))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    z = expected("qwen3")
    out = logits_of(half, z)
    assert out.dtype == jnp.bfloat16
    assert np.abs(np.asarray(out, np.float32) - z["logits"])[z["valid"]].max() < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "no architecture of a decoder; supported are Llama",
        ),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type='dynamic'; LlamaConfig supports 'default' or"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 0.5}},
            "attn_factor=0.5; LlamaConfig supports `attention_factor` instead",
        ),
        ({"sliding_window": 5}, "sliding_window=5; LlamaConfig supports None"),
        ({"pretraining_tp": 2}, "pretraining_tp=2; LlamaConfig supports 1"),
        ({"head_dim": 1 << 30}, "LlamaConfig supports heads of 65,536 numbers at most"),
        (
            {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "relu"},
            "Gemma3Config supports 'gelu_p",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]},
            "MistralConfig supports full_attention or sliding_attention for each of 2 layers",
        ),
    ],
)
def test_options_that_are_not_supported(changes, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        DecoderConfig.from_json({"architectures": ["LlamaForCausalLM"], **SHARED, **changes})


@pytest.mark.parametrize(
    ("name", "entry", "other"),
    [
        ("LlamaForCausalLM", "hidden_act", "swish"),
        ("Gemma2ForCausalLM", "hidden_activation", "gelu_new"),
        ("GPT2LMHeadModel", "activation_function", "gelu_pytorch_tanh"),
    ],
)
def test_activations_have_several_names(name, entry, other):
    renamed = FAMILIES[name].renamed
    config = {"architectures": [name]} | {renamed.get(key, key): x for key, x in SHARED.items()}
    assert DecoderConfig.from_json(config | {entry: other}) == DecoderConfig.from_json(config)


@pytest.mark.parametrize("name", FAMILIES)
def test_entries_that_a_family_does_without_have_no_effect(name):
    """Such as a multiplier of Granite's in a file of Qwen3, which transformers does not read."""
    known = FAMILIES[name].renamed
    plain = {"architectures": [name], "num_experts_per_tok": 1, "num_local_experts": 2}
    plain |= {known.get(entry, entry): x for entry, x in SHARED.items()}
    plain |= {"sliding_window": 4 if FAMILIES[name].ends_global else None}
    wanted = DecoderConfig.from_json(plain)
    other = {x: True for x in OF_FEW if x.endswith(("bias", "prob"))} | {"mlp_only_layers": [0]}
    required = FAMILIES[name].required
    for entry in OF_FEW:
        if entry not in (*FAMILIES[name].entries, *required):
            found = DecoderConfig.from_json(plain | {entry: other.get(entry, 0.5)})
            assert found == wanted, entry
            assert entry not in found.known_entries()  # so that a warning names it


def test_windows_of_every_other_layer():
    """Of Qwen2-MoE, in transformers 5."""
    config = {"architectures": ["Qwen2MoeForCausalLM"], **SHARED, "num_hidden_layers": 6, "num_experts": 4}
    config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4}
    assert DecoderConfig.from_json(config).windows == (True, False, True, False, False, False)
    with pytest.raises(UnsupportedConfigError, match="mlp_only_layers=5"):
        DecoderConfig.from_json(config | {"mlp_only_layers": 5})


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "gpt2"])
def test_names_on_the_hub_are_not_downloaded(name, tmp_path, monkeypatch):
    """The message says so, and how to get them."""
    monkeypatch.chdir(tmp_path)
    folder = name.rpartition("/")[2]
    message = rf"nothing is downloaded.* `hf download {name} --local-dir {folder}` gets it: pass that folder"
    for read in (load, ql.lm.read, lambda path: ql.lm.peft.load_adapter(path, {})):
        with pytest.raises(FileNotFoundError, match=message):
            read(name)
    (tmp_path / folder).mkdir()
    for path in (f"./{name}", str(tmp_path / "x"), "a/b/c", "model.gguf", folder):
        with pytest.raises(FileNotFoundError) as error:
            load(path)
        assert "hf download" not in str(error.value)


def test_the_decoder_of_a_model_that_reads_images():
    """Gemma 3's files leave most of its sizes to the defaults."""
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "vision_config": {},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 12, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    }  # fmt: skip
    config = text_tower(whole)
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["eos_token_id"] == [1, 106]
    out = DecoderConfig.from_json(config)
    assert (out.num_attention_heads, out.num_key_value_heads, out.head_dim) == (8, 4, 256)
    assert (out.vocab_size, out.windows.count(False), out.tie_word_embeddings) == (262208, 2, True)
    full, sliding = out.ropes
    assert full.frequencies[0] == 1 / 8
    assert sliding.frequencies[0] == 1
    whole["text_config"]["model_type"] = "other"
    with pytest.raises(
        UnsupportedConfigError, match="Gemma3ForConditionalGeneration supports one with model_t"
    ):
        text_tower(whole)


@pytest.mark.parametrize(
    ("changes", "windows", "sliding"),
    [
        ({}, [3], 0),
        ({"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 3}, [1, 3], 3),
        ({"no_rope_layers": [0, 1, 1, 1]}, [0], 0),
    ],
)
def test_layers_without_rotation(changes, windows, sliding):
    config = DecoderConfig.from_json(
        {**SHARED, "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 4, **changes}
    )
    assert [i for i, kind in enumerate(config.windows) if kind] == windows
    assert config.sliding_window == sliding
    assert {*config.ropes[1].frequencies} == {0.0}
    with pytest.raises(UnsupportedConfigError, match=r"no_rope_layers=.1.; SmolLM3Config supports 0 or 1"):
        DecoderConfig.from_json({**SHARED, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]})


def test_windows_of_olmo_3_are_rotated_plainly():
    """In the configuration of its published files, too."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    base = {**SHARED, "architectures": ["Olmo3ForCausalLM"], "num_hidden_layers": 4, "head_dim": 8}
    old = DecoderConfig.from_json({**base, "rope_theta": 5e5, "rope_scaling": yarn})
    plain = {"rope_type": "default", "rope_theta": 5e5}
    parts = {"full_attention": {**yarn, "rope_theta": 5e5}, "sliding_attention": plain}
    assert old == DecoderConfig.from_json({**base, "rope_parameters": parts})
    assert old.windows == (True, True, True, False)
    full, sliding = old.ropes
    assert sliding.scale == 1
    np.testing.assert_allclose(sliding.frequencies[-1], 5e5**-0.75, rtol=1e-12)
    np.testing.assert_allclose(full.frequencies[-1], sliding.frequencies[-1] / 8, rtol=1e-12)


def test_missing_experts_are_named(tmp_path):
    (tmp_path / "config.json").write_text((folder("mixtral") / "config.json").read_text())
    tensors = dict(open_tensors(folder("mixtral")))
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    write_tensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"Missing: model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight"
    ):
        load(tmp_path)


def test_made_anew():
    more = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    config = DecoderConfig.from_json({**SHARED, **more, "head_dim": 8})
    make = lambda: Decoder(config, key=jax.random.key(0))(jnp.arange(3), jnp.ones(3, bool))
    assert jax.eval_shape(make).shape == (3, 11)


@pytest.mark.slow
@pytest.mark.parametrize("pooled", [False, True])
def test_an_untied_output_layer_may_be_missing_where_texts_are_embedded(pooled, tmp_path):
    """Its hidden states are those of the whole model; there are no logits."""
    base = tmp_path / "base"
    shutil.copytree(folder("qwen3"), base)
    whole, _ = load(base)
    tensors = {k: v for k, v in open_tensors(base / "model.safetensors").items() if k != "lm_head.weight"}
    write_tensors(base / "model.safetensors", tensors, {"format": "pt"})
    if not pooled:
        with pytest.raises(CheckpointError, match=r"Missing: lm_head\.weight"):
            load(base)
        return
    (base / "modules.json").write_text('[{"type": "sentence_transformers.models.Transformer", "path": ""}]')
    model, _ = load(base)
    ids, seen = jnp.arange(5), jnp.ones(5, bool)
    np.testing.assert_array_equal(model.hidden(ids, seen), whole.hidden(ids, seen))
    with pytest.raises(ValueError, match="has no output layer"):
        model(ids, seen)


_TINY = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "vocab_size": 11,
}  # fmt: skip
_QWEN3, _REWARD = (
    {**_TINY, "architectures": [f"Qwen3For{task}"]} for task in ("CausalLM", "SequenceClassification")
)
MODEL_CLASSES = {
    Decoder: lambda: DecoderConfig.from_json(_QWEN3),
    DecoderForSequenceClassification: lambda: DecoderConfig.from_json(_REWARD),
    Bert: lambda: BertConfig.from_json({**_TINY, "max_position_embeddings": 8}),
    ModernBertForSequenceClassification: lambda: ModernBertConfig.from_json(
        {**_TINY, "classifier_pooling": "mean"}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODEL_CLASSES, ids=lambda kind: kind.__name__)
def test_a_text_without_padding_needs_no_mask(kind):
    model, ids = kind(MODEL_CLASSES[kind](), key=jax.random.key(0)), jnp.arange(5)
    found, wanted = jax.jit(lambda model: (model(ids), model(ids, jnp.ones(5, bool))))(model)
    np.testing.assert_array_equal(found, wanted)


@wrong_types
@pytest.mark.parametrize("kind", MODEL_CLASSES, ids=lambda kind: kind.__name__)
def test_several_texts_are_for_vmap(kind):
    model = eqx.filter_eval_shape(kind, MODEL_CLASSES[kind](), key=jax.random.key(0))
    message = r"the tokens of one text, .* found \(2, 5\)\. For several, use `jax\.vmap"
    with pytest.raises(ValueError, match=message):
        eqx.filter_eval_shape(model, jax.ShapeDtypeStruct((2, 5), jnp.int32))


# In transformers 5.24: the epsilon, the base of rotations, and the experts for each token.
OF_FAMILIES = {
    "MixtralForCausalLM": (1e-5, 1e6, 2),
    "Phi3ForCausalLM": (1e-5, 1e4, 0),
    "Olmo2ForCausalLM": (1e-5, 1e4, 0),
    "Qwen2MoeForCausalLM": (1e-6, 1e4, 4),
    "Qwen3MoeForCausalLM": (1e-6, 1e4, 8),
    "GptOssForCausalLM": (1e-5, None, 4),
}


@pytest.mark.parametrize("name", OF_FAMILIES)
def test_entries_that_are_missing_have_the_values_of_the_family(name):
    sizes = {key: x for key, x in SHARED.items() if key not in ("rms_norm_eps", "rope_theta")}
    config = {"architectures": [name], "num_local_experts": 8, **sizes}
    epsilon, theta, chosen = OF_FAMILIES[name]
    found = DecoderConfig.from_json(config)
    assert (found.rms_norm_eps, found.num_experts_per_tok) == (epsilon, chosen)
    rope = {"rope_type": "default", "rope_theta": theta}
    if theta is None:
        rope = {
            "rope_type": "yarn", "factor": 32.0, "rope_theta": 150000.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        }  # fmt: skip
    assert found.ropes == DecoderConfig.from_json(config | {"rope_parameters": rope}).ropes


@pytest.mark.parametrize("chosen", [0, 9])
def test_each_token_needs_some_of_the_experts(chosen):
    config = {"architectures": ["MixtralForCausalLM"], **SHARED, "num_experts_per_tok": chosen}
    with pytest.raises(UnsupportedConfigError, match=f"num_experts_per_tok={chosen}; .* 1 to .* experts, 8"):
        DecoderConfig.from_json(config)
