"""GGUF files of decoders in which layers with and without a window differ in size, as in Gemma 4."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.lm import load, peft, save
from quaxlike.lm.gguf import window_layers
from quaxlike.lm.gguf.config import config_of, metadata_of
from quaxlike.lm.gguf.container import open_gguf
from quaxlike.lm.gguf.writer import write
from quaxlike.lm.models import DecoderConfig
from quaxlike.surgery.trees import named_arrays
from tests.lm.models.made import TEXTS, sentencepiece
from tests.lm.models.test_to_gguf import _adapted, _checkpoint, _in_file  # noqa: F401 (a fixture)

_KEYS_ARE_VALUES = {
    "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
_EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_BY_LAYER = {
    "num_kv_shared_layers": 0, "layer_types": None, "global_head_dim": None,
    "per_layer_config": {"4": {"head_dim": 16, "num_key_value_heads": 2}},
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, _KEYS_ARE_VALUES, _BY_LAYER, _EXPERTS, {"final_logit_softcapping": 5.0}]
)
def test_a_file_is_the_model(changes, checkpoint, tmp_path):
    source, model = checkpoint("gemma4_text", **changes)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    again, config = load(tmp_path / "m.gguf")
    for key, leaf in named_arrays(again).items():
        np.testing.assert_array_equal(leaf, named_arrays(model)[key], err_msg=key)
    assert len(named_arrays(again)) == len(named_arrays(model))
    for ours, theirs in zip(model.config.ropes, again.config.ropes, strict=True):
        np.testing.assert_allclose(theirs.frequencies, ours.frequencies, rtol=1e-6)
    save(tmp_path / "again.gguf", again, tmp_path / "m.gguf", format="gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    # As a folder, too: the entries are those that transformers reads.
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert DecoderConfig.from_json(json.loads((tmp_path / "config.json").read_text())) == again.config


@pytest.mark.slow
def test_adapters_and_quantised_weights(checkpoint, tmp_path):
    source, model = checkpoint("gemma4_text")
    adapted = _adapted(model, where=["q_proj", "per_layer_input_gate"])
    peft.save_gguf_adapter(tmp_path / "lora.gguf", adapted, source)
    save(tmp_path / "base.gguf", model, source, format="gguf")
    save(tmp_path / "merged.gguf", ql.merge(adapted), source, format="gguf")
    file = open_gguf(tmp_path / "lora.gguf")
    for name in ("blk.4.attn_q.weight", "blk.0.inp_gate.weight"):
        a, b = (np.asarray(file[f"{name}.lora_{side}"]) for side in "ab")
        merged, base = (_in_file(tmp_path / path, name) for path in ("merged.gguf", "base.gguf"))
        np.testing.assert_allclose(b @ a, merged - base, atol=1e-5, err_msg=name)
    ignored = _adapted(model, where=["per_layer_model_projection"])
    with pytest.raises(
        ValueError, match=r"to per_layer_model_proj\.weight\. Merge them .* or `exclude` this layer"
    ):
        peft.save_gguf_adapter(tmp_path / "ignored.gguf", ignored, source)
    save(tmp_path / "q.gguf", model, source, format="gguf", quantize="q4_0")
    kinds = {name: tensor.kind for name, tensor in open_gguf(tmp_path / "q.gguf")._tensors.items()}
    names = ("per_layer_token_embd", "per_layer_model_proj", "blk.0.proj", "blk.0.layer_output_scale")
    assert [kinds[f"{name}.weight"] for name in names] == [8, 0, 2, 0]
    load(tmp_path / "q.gguf")


def test_adapters_of_experts_contain_their_scales(checkpoint, tmp_path):
    """llama.cpp scales the outputs of experts before it adds those of adapters."""
    source, model = checkpoint("gemma4_text", **_EXPERTS)
    assert not any("router" in name for name in ql.select(model))
    adapted = _adapted(model, where=["model.layers.0.experts.down_proj"])
    peft.save_gguf_adapter(tmp_path / "lora.gguf", adapted, source)
    file, layer = open_gguf(tmp_path / "lora.gguf"), adapted.model.layers[0]
    a, b = (np.asarray(file[f"model.layers.0.experts.down_proj.lora_{side}"]) for side in "ab")
    wanted = layer.router.per_expert_scale[:, None, None] * layer.experts.down_proj.delta()
    np.testing.assert_allclose(b @ a, wanted, rtol=1e-4, atol=1e-6)


def _file(checkpoint, tmp_path, **changes):
    source, model = checkpoint("gemma4_text", **changes)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    file = open_gguf(tmp_path / "m.gguf")
    return {name: file[name] for name in file}, file.metadata


@pytest.mark.slow
def test_keys_of_each_kind_of_layer(checkpoint, tmp_path):
    arrays, metadata = _file(checkpoint, tmp_path, attention_k_eq_v=True, num_global_key_value_heads=2)
    found = {key.removeprefix("gemma4."): x for key, x in metadata.items() if key.startswith("gemma4.")}
    assert list(found["attention.head_count_kv"]) == [1, 2, 1, 2, 2]
    assert list(found["feed_forward_length"]) == [96, 96, 192, 192, 192]
    assert [found[f"attention.key_length{x}"] for x in ("", "_swa")] == [32, 8]
    assert [found[f"rope.dimension_count{x}"] for x in ("", "_swa")] == [32, 8]
    assert found["final_logit_softcapping"] == 0  # llama.cpp takes 30 if the key is missing
    np.testing.assert_array_equal(arrays["rope_freqs.weight"], np.float32([1] * 4 + [1e30] * 12))
    del metadata["gemma4.final_logit_softcapping"]
    write(tmp_path / "capped.gguf", arrays, metadata)
    assert load(tmp_path / "capped.gguf")[0].config.final_logit_softcapping == 30


@pytest.mark.slow
def test_factors_of_frequencies(checkpoint, tmp_path):
    """Of any kind. Those of published models are said as transformers does, for any size of heads."""
    for count in range(1, 49):
        factors = [3.0] * count + [1e30] * (48 - count)
        rope = window_layers._scaled(factors, {})
        assert rope["rope_type"] == "proportional"
        np.testing.assert_array_equal(window_layers.factors_of(96, rope), np.float32(factors))
    arrays, metadata = _file(checkpoint, tmp_path)
    arrays["rope_freqs.weight"] = jnp.arange(1.0, 17)
    write(tmp_path / "other.gguf", arrays, metadata)
    plain, scaled = (load(tmp_path / x)[0].config.ropes[0].frequencies for x in ("m.gguf", "other.gguf"))
    np.testing.assert_allclose(scaled[:4], np.divide(plain[:4], [1, 2, 3, 4]), rtol=1e-6)
    assert scaled[15] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.sliding_window_pattern": [1, 0]}, "expected a boolean for each of 5 layers"),
        (
            {"attention.sliding_window_pattern": [0] * 5},
            "needs layers with a window, and a last layer without",
        ),
        ({"attention.shared_kv_layers": 5}, "expected fewer than 5 layers; found 5"),
        ({"attention.head_count_kv": [1, 2, 2, 2, 2]}, "expected a number for each kind of layer"),
        ({"attention.head_count_kv": [1, 2]}, "one for each of 5 layers"),
        ({"feed_forward_length": [96, 96, 192, 192, 96]}, "twice the size in the last 3 layers"),
        ({"rope.dimension_count": 16}, "expected 32; found 16"),
        ({"rope.dimension_count_swa": 4}, "expected 8; found 4"),
        ({"attention.key_length_swa": None}, "key_length_swa': expected a size"),
        ({"rope.scaling.type": "yarn"}, "expected rope_freqs.weight instead; found 'yarn'"),
    ],
)
def test_files_that_are_damaged(changes, message, tmp_path):
    config = {
        "model_type": "gemma4_text", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 5,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "global_head_dim": 32,
        "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "sliding_window": 4,
        "layer_types": [f"{kind}_attention" for kind in 2 * ["sliding", "full"] + ["full"]],
    }  # fmt: skip
    metadata = metadata_of(config) | {f"gemma4.{key}": x for key, x in changes.items()}
    metadata = {key: x for key, x in metadata.items() if x is not None}
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, metadata, {}, lambda name: None)
    del config["layer_types"]
    with pytest.raises(ValueError, match="has no layer_types, which GGUF needs"):
        metadata_of(config)


_BREAKS = ["a\nb\n\nc \n\n\n", "\n" * 9]


def test_vocabularies_with_merges(checkpoint, tmp_path):
    """llama.cpp has a kind of its own for Gemma 4, which merges what the tokeniser does, and nothing else."""
    described = json.loads(sentencepiece(340).to_str())
    vocab, merges = described["model"]["vocab"], described["model"]["merges"]
    kept = [text for text in vocab if not text.strip("\n") or "\n" not in text]
    described["model"]["vocab"] = {text: i for i, text in enumerate(dict.fromkeys([*kept, "\n", "\n\n"]))}
    merges = [pair for pair in merges if "\n" not in "".join(pair)][:-1]
    described["model"]["merges"] = [["\n", "\n"], *merges]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    rows = tokenizer.get_vocab_size() + 3
    source, model = checkpoint("gemma4_text", tokenizer, vocab_size_per_layer_input=rows)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    metadata = lm.open_checkpoint(tmp_path / "m.gguf").metadata
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    found = Tokenizer.from_str(lm.read_tokenizer(tmp_path / "m.gguf"))
    for text in [*TEXTS, *_BREAKS, "漢字 🦙", "   x"]:
        assert found.encode(text).ids == tokenizer.encode(text).ids
        assert found.decode(found.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)
    # The other kind, where a token of line breaks would be split, or texts have no beginning.
    described["model"]["merges"] = described["model"]["merges"][1:]
    path = source / "tokenizer.json"
    for changes in ({}, {"post_processor": None}):
        path.write_text(json.dumps(described | changes))
        with pytest.raises(CheckpointError, match=r"are not merged, and llama\.cpp would merge them"):
            save(tmp_path / "m.gguf", model, source, format="gguf")
    arrays = {name: x for name, x in named_arrays(model).items() if "embed" in name}
    merges = [x for x in metadata["tokenizer.ggml.merges"] if x != "\n \n"]
    write(tmp_path / "bad.gguf", arrays, metadata | {"tokenizer.ggml.merges": merges})
    with pytest.raises(
        CheckpointError, match=r"do not form the token '\\n\\n', which llama.cpp never splits"
    ):
        lm.read_tokenizer(tmp_path / "bad.gguf")
