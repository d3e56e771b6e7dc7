"""Whole models of GGUF: logits, configurations, tokenisers and texts as llama.cpp has them."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import kernels, lm
from quaxlike.files import CheckpointError
from quaxlike.kernels.native.library import Library
from quaxlike.lm import UnsupportedConfigError, loading
from quaxlike.lm.gguf import config as gguf_config
from quaxlike.lm.models import DecoderConfig
from quaxlike.surgery.trees import named_arrays
from tests.fixtures import fixture, has_fixture
from tests.lm.models.fixtures import agree, folder
from tests.samples import normal

_MODELS = json.loads(fixture("formats/gguf_whole/index.json").read_text())["models"]
_IO = fixture("formats/gguf_whole/io.npz")


def _file(name):
    return fixture(f"formats/gguf_whole/{_MODELS[name]['files'][0]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", _MODELS)
def test_logits(name):
    """K-quants, two parts, factors of frequencies, tied embeddings; padding behind the second text."""
    z = np.load(_IO)
    ids, seen = z[f"{name}/input_ids"], z[f"{name}/attention_mask"].astype(bool)
    model, config = ql.lm.load(_file(name))
    assert config["num_hidden_layers"] == _MODELS[name]["dims"].get("layers", len(model.model.layers))
    with ql.on_materialise("error"):
        logits = jax.jit(jax.vmap(ql.quaxify(model)))(ids, seen)
    agree(logits[seen], z[f"{name}/logits_f32"][seen])


@pytest.mark.slow
def test_texts_go_on_as_the_logits_say():
    z, name = np.load(_IO), "qwen2_f32"
    ids = z[f"{name}/input_ids"][:1]
    model, config = ql.lm.load(_file(name))
    first = ql.lm.generate(model, ids, max_new_tokens=3, eos=config["eos_token_id"])[0, 0]
    assert first == np.argmax(z[f"{name}/logits_f32"][0, -1])


@pytest.mark.parametrize("name", _MODELS)
def test_tokens(name):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(lm.read_tokenizer(_file(name)))
    for text, ids in _MODELS[name]["tokenize_llamacpp"].items():
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == text


_EXPRESSIBLE = {
    "llama_llama3": {},
    "llama_yarn": {},
    "mistral": {"architectures": ["LlamaForCausalLM"], "sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "olmo2": {},
    "phi3": {"sliding_window": None},
    "phi3_longrope": {},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", _EXPRESSIBLE)
def test_architectures_are_written_and_read(name, tmp_path):
    if not has_fixture(f"models/{name}"):
        pytest.skip("the full collection of models is not here")
    config = json.loads((folder(name) / "config.json").read_text()) | _EXPRESSIBLE[name]
    weights = dict(lm.open_checkpoint(folder(name)))
    lm.write(tmp_path / "m.gguf", weights, format="gguf", config=config)
    model, found = ql.lm.load(tmp_path / "m.gguf")
    wanted = DecoderConfig.from_json(config)
    own = DecoderConfig.from_json(found)
    ropes = [list(map(np.asarray, (r.frequencies, r.scale))) for c in (own, wanted) for r in c.ropes]
    for a, b in zip(ropes[: len(own.ropes)], ropes[len(own.ropes) :], strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), a, b)
    skip = ("ropes", "architecture", "pad_token_id", "original_max_position_embeddings", "sliding_window")
    assert {k: v for k, v in vars(own).items() if k not in skip} == {
        k: v for k, v in vars(wanted).items() if k not in skip
    }
    for key, leaf in named_arrays(model).items():
        np.testing.assert_allclose(leaf, weights[key], atol=2e-7, err_msg=key)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_factor": 0.7, "beta_fast": 32.0, "beta_slow": 1.0},
        {"mscale": 0.7, "mscale_all_dim": 1.2},
        {},
    ],
)
def test_factors_of_yarn_are_written_and_read(options, tmp_path):
    """llama.cpp multiplies its `attn_factor` by what YaRN prescribes, 1 + 0.1 log(factor)."""
    config = json.loads((folder("llama_yarn") / "config.json").read_text())
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config["rope_parameters"] = rope | options
    weights = dict(lm.open_checkpoint(folder("llama_yarn")))
    lm.write(tmp_path / "m.gguf", weights, format="gguf", config=config)
    opened = lm.open_checkpoint(tmp_path / "m.gguf")
    ((own,), (wanted,)) = (DecoderConfig.from_json(c).ropes for c in (opened.config, config))
    np.testing.assert_allclose(own.scale, wanted.scale, rtol=1e-6)
    np.testing.assert_allclose(own.frequencies, wanted.frequencies, rtol=1e-6)
    written = opened.metadata.get("llama.rope.scaling.attn_factor", 1.0)
    np.testing.assert_allclose(written * (1 + 0.1 * np.log(4)), wanted.scale, rtol=1e-6)
    metadata = {**opened.metadata, "llama.rope.scaling.yarn_ext_factor": 0.5}
    lm.write(tmp_path / "other.gguf", weights, format="gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"yarn_ext_factor': expected 1; found 0\.5"):
        ql.lm.load(tmp_path / "other.gguf")


def test_yarn_as_llama_cpp_writes_it_for_ministral():
    """Its converter says `mscale_all_dim`, from which llama.cpp derives the factor of cosines and sines."""
    keys = {
        "embedding_length": 64, "block_count": 1, "attention.head_count": 4, "attention.key_length": 16,
        "attention.temperature_scale": 0.1, "rope.freq_base": 1e6,
        "rope.scaling.type": "yarn", "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 32, "rope.scaling.yarn_log_multiplier": 1.0,
    }  # fmt: skip
    metadata = {"general.architecture": "mistral3"} | {f"mistral3.{key}": x for key, x in keys.items()}
    config = gguf_config.config_of(Path("m.gguf"), metadata, {"token_embd.weight": (8, 64)}, dict)
    (rope,) = DecoderConfig.from_json(config).ropes
    assert (rope.scale, rope.growth, rope.step) == (1.0, 0.1, 32)
    wrong = metadata | {"mistral3.rope.scaling.yarn_log_multiplier": -1.0}
    with pytest.raises(CheckpointError, match=r"yarn_log_multiplier': expected a positive number; found -1"):
        gguf_config.config_of(Path("m.gguf"), wrong, {}, dict)
    metadata = {key: x for key, x in metadata.items() if ".scaling." not in key}
    config = gguf_config.config_of(Path("m.gguf"), metadata, {"token_embd.weight": (8, 64)}, dict)
    (rope,) = DecoderConfig.from_json(config).ropes  # none is the default of llama.cpp, not of transformers
    assert (rope.scale, rope.frequencies[-1]) == (1.0, 1e6 ** -(14 / 16))


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (None, [1, 0, 1, 0]),
        (4, [1, 1, 1, 0]),
        ([True, True, False, True], [1, 1, 0, 1]),
        ([0, 1, 1, 0], [0, 1, 1, 0]),
    ],
)
def test_layers_with_windows(pattern, windows):
    keys = {
        "embedding_length": 64, "block_count": 4, "attention.head_count": 4, "attention.sliding_window": 5,
        "expert_count": 2, "expert_used_count": 1, "attention.sliding_window_pattern": pattern,
    }  # fmt: skip
    metadata = {"general.architecture": "gpt-oss"} | {f"gpt-oss.{key}": x for key, x in keys.items()}
    config = gguf_config.config_of(Path("m.gguf"), metadata, {"token_embd.weight": (8, 64)}, dict)
    assert DecoderConfig.from_json(config).windows == tuple(map(bool, windows))
    damaged = metadata | {"gpt-oss.block_count": 1 << 40, "gpt-oss.attention.sliding_window_pattern": 2}
    with pytest.raises(CheckpointError, match=r"expected the number of layers; found 1099511627776"):
        gguf_config.config_of(Path("m.gguf"), damaged, {}, dict)
    metadata["gpt-oss.attention.sliding_window_pattern"] = "all"
    with pytest.raises(CheckpointError, match=r"expected a number, or a list of booleans; found 'all'"):
        gguf_config.config_of(Path("m.gguf"), metadata, {}, dict)


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        ({"eos": 2, "eot": 1, "eom": 5}, [2, 1, 5]),
        ({"eos": 2, "eom": 5}, [2, 5]),
        ({"eos": 2, "eot": 2}, 2),
        ({"eos": 2, "eot": [1]}, [2, [1]]),  # which readers of tokens refuse
    ],
)
def test_tokens_that_end_a_text(tokens, ends):
    metadata = {f"tokenizer.ggml.{name}_token_id": token for name, token in tokens.items()}
    metadata |= {"general.architecture": "llama", "llama.embedding_length": 64}
    config = gguf_config.config_of(Path("m.gguf"), metadata, {}, dict)
    assert config["eos_token_id"] == ends


def test_a_stack_of_gpt_oss_that_is_none(tmp_path):
    tensors = {"blk.0.ffn_down_exps.weight": normal(64, 32)}
    keys = {"general.architecture": "gpt-oss"}
    lm.write(tmp_path / "m.gguf", tensors, format="gguf", metadata=keys)
    opened = lm.open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"must be a stack of matrices; found the shape \(64, 32\)"):
        opened["model.layers.0.mlp.experts.down_proj"]


@pytest.mark.slow
def test_stacks_of_experts(tmp_path):
    """Two tensors of the file are one of the model, and stay quantised."""
    quantised = lambda *shape: ql.BlockArray.quantize(jnp.asarray(normal(*shape)), codec="q8_0")
    parts = {f"blk.0.ffn_{part}_exps.weight": quantised(3, 64, 32) for part in ("gate", "up")}
    metadata = {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 3}
    lm.write(tmp_path / "m.gguf", parts, format="gguf", metadata=metadata)
    found = lm.read(tmp_path / "m.gguf")
    (both,) = found.values()
    assert isinstance(both, ql.BlockArray)
    assert list(found) == ["model.layers.0.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(
        ql.materialise(both), np.concatenate([ql.materialise(part) for part in parts.values()], axis=1)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; of GGUF, llama, qwen2, .* supported"),
        ({"llama.block_count": "two"}, "'llama.block_count': expected one number; found 'two'"),
        ({}, "config.json has no hidden_size"),
    ],
)
def test_metadata_that_makes_no_model_is_refused(settings, message, tmp_path):
    weights = {"blk.0.ffn_up.weight": normal(8, 32).astype(np.float32)}
    lm.write(tmp_path / "m.gguf", weights, format="gguf", metadata=settings)
    with pytest.raises((CheckpointError, UnsupportedConfigError), match=message):
        ql.lm.load(tmp_path / "m.gguf")


def test_types_that_cannot_be_read_are_named():
    with pytest.raises(CheckpointError, match=r"is of type (IQ|TQ).*can be read\. `llama-quantize "):
        lm.read(fixture("formats/gguf_tensors/extra.gguf"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "bert"}, "'tokenizer.ggml.model': gpt2, llama, gemma4 can be read; found 'bert'"),
        ({"pre": "viking"}, "'tokenizer.ggml.pre': gpt-2, .* can be read; found 'viking'"),
        ({"merges": ["a b c"]}, "'tokenizer.ggml.merges': expected pairs of tokens"),
        ({"merges": ["t q"]}, "are not two tokens that form a third"),
        ({"add_bos_token": True, "bos_token_id": 9999}, "expected one of 265 tokens; found 9999"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "two of them have the same text"),
    ],
)
def test_vocabularies_that_are_not_consistent_are_refused(settings, message, tmp_path):
    metadata = dict(lm.open_checkpoint(_file("qwen2_f32")).metadata)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in settings.items()}
    lm.write(tmp_path / "m.gguf", {}, format="gguf", metadata=metadata)
    with pytest.raises(CheckpointError, match=message):
        lm.read_tokenizer(tmp_path / "m.gguf")


def test_there_is_no_tokeniser(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"There is no .*tokenizer\.json"):
        lm.read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert lm.read_tokenizer(tmp_path) == "{}"


@pytest.mark.slow
def test_the_command_reads_gguf(tmp_path, capsys):
    from quaxlike.lm.generate.__main__ import main

    shutil.copy(_file("qwen2_f32"), tmp_path / "model.gguf")
    options = ["--prompt", "the in", "--max-new-tokens", "2"]
    assert main(["--model", str(tmp_path / "model.gguf"), *options]) == 0
    assert main(["--model", str(tmp_path), *options]) == 0
    assert capsys.readouterr().out


def test_inputs_in_eight_bits_are_of_quantised_weights():
    with pytest.raises(ValueError, match="only affects products with quantised weights"):
        ql.lm.load(_file("qwen2_f32"), compute="int8")


@pytest.mark.slow
def test_products_are_in_bfloat16_where_the_processor_multiplies_it(monkeypatch):
    name = next(name for name in _MODELS if "q4" in name)

    def loaded(multiplies_bfloat16, **options):
        found = Library(Path("product.so"), "avx512", "VNNI", multiplies_bfloat16)
        monkeypatch.setattr(loading, "library", lambda: found)
        model = ql.lm.load(_file(name), **options)[0]
        assert model.model.norm.weight.dtype == options.get("dtype", "float32")
        return {leaf.compute for leaf in jax.tree.leaves(model, is_leaf=ql.is_value) if ql.is_value(leaf)}

    assert loaded(True) == {"bfloat16"}
    assert loaded(True, compute="int8") == {"int8"}
    assert loaded(True, dtype="float32") == loaded(True, dtype="bfloat16") == loaded(False) == {None}
    monkeypatch.setattr(loading, "library", lambda: "the native products are not compiled")
    assert ql.lm.load(_file(name))[0].model.layers[0].mlp.up_proj.weight.compute is None


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"compute": "int8"}, {}], ids=["beside", "within"])
def test_inputs_in_eight_bits_go_with_recipes(given):
    """As in `quantize`; a rule may say otherwise."""
    recipe = {("q_proj",): ("q8_0", {"compute": None}), "all-linear": "q4_0"}
    quantize = {"scheme": recipe} | ({} if given else {"compute": "int8"})
    layer = ql.lm.load(_file("qwen2_f32"), quantize=quantize, **given)[0].model.layers[0]
    assert layer.self_attn.q_proj.weight.compute is None
    assert layer.mlp.down_proj.weight.compute == "int8"


@pytest.mark.slow
def test_inputs_in_eight_bits():
    z, name = np.load(_IO), next(name for name in _MODELS if "q4" in name)
    ids = z[f"{name}/input_ids"][:1]
    seen = np.ones_like(ids, bool)
    with kernels.backend("reference"):
        exact, rounded = (
            jax.jit(jax.vmap(ql.quaxify(ql.lm.load(_file(name), compute=compute)[0])))(ids, seen)
            for compute in (None, "int8")
        )
    error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 3e-2
