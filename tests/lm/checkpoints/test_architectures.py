"""Checkpoints under the names that bodies of decoders and pretrained encoders have."""

import json

import jax
import numpy as np
import pytest

from quaxlike import loraify, quaxify
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft, save
from quaxlike.lm.families import FAMILIES, bodies
from quaxlike.lm.models import (
    Bert,
    BertConfig,
    Decoder,
    DecoderConfig,
    ModernBert,
    ModernBertConfig,
    with_classifier,
)
from quaxlike.surgery.trees import named_arrays
from tests.samples import array

IDS = array([5, 1, 9, 3], "int32")
SIZES = {
    "vocab_size": 14, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 20,
}  # fmt: skip
OF_GPT2 = {"vocab_size": 14, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: np.asarray(x) for name, x in tensors.items()}
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})


def test_each_family_has_a_body():
    assert {*bodies().values()} == {*FAMILIES}
    assert bodies()["Gemma3TextModel"] == "Gemma3ForCausalLM"
    assert bodies()["GPT2Model"] == "GPT2LMHeadModel"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["LlamaModel", "GPT2Model", "Gemma3TextModel", "MixtralModel"])
def test_bodies_of_decoders(name, tied, tmp_path):
    """Their tensors have no common prefix, and there is no output layer, whatever `config.json` ties."""
    sizes = OF_GPT2 if name == "GPT2Model" else {**SIZES, "head_dim": 8, "num_key_value_heads": 2}
    config = {**sizes, "architectures": [bodies()[name]], "tie_word_embeddings": tied}
    whole = Decoder(DecoderConfig.from_json(config), key=jax.random.key(0))
    body = "transformer" if name == "GPT2Model" else "model"
    stored = {key.partition(".")[2]: x for key, x in named_arrays(whole).items() if key.startswith(body)}
    assert any("experts" in key for key in stored) == (name == "MixtralModel")
    write(tmp_path / "base", {**config, "architectures": [name]}, stored)
    model, read = load(tmp_path / "base")
    assert np.array_equal(model.hidden(IDS), whole.hidden(IDS))
    assert read["architectures"] == [name]
    with pytest.raises(ValueError, match="This decoder has no output layer, and so no logits"):
        model(IDS)
    save(tmp_path / "again", model, tmp_path / "base")
    again = dict(open_tensors(tmp_path / "again"))
    assert again.keys() == stored.keys()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"] == tied
    assert np.array_equal(load(tmp_path / "again")[0].hidden(IDS), whole.hidden(IDS))
    with pytest.raises(CheckpointError, match=f"{name} has no output layer"):
        save(tmp_path / "model.gguf", model, tmp_path / "base", format="gguf")


ENCODERS = {
    "BertForMaskedLM": (Bert, BertConfig, "bert", False, ["cls.predictions.bias"]),
    "BertForPreTraining": (
        Bert, BertConfig, "bert", True, ["cls.predictions.bias", "cls.seq_relationship.weight"],
    ),
    "ModernBertForMaskedLM": (
        ModernBert, ModernBertConfig, "model", None,
        ["decoder.bias", "head.dense.weight", "head.norm.weight"],
    ),
    "BertModel": (Bert, BertConfig, "", False, []),
}  # fmt: skip


def encoder(folder, name):
    """Writes a random encoder with its pretraining head."""
    make, read, prefix, pooled, head = ENCODERS[name]
    options = {} if pooled is None else {"pooled": pooled}
    made = make(read.from_json(SIZES), key=jax.random.key(0), **options)
    body = {f"{prefix}.{key}".lstrip("."): x for key, x in named_arrays(made).items()}
    write(folder, {**SIZES, "architectures": [name]}, {**body, **dict.fromkeys(head, np.ones(14, "f4"))})
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_with_the_head_of_pretraining(name, tmp_path, recwarn):
    made, head = encoder(tmp_path / "base", name), ENCODERS[name][-1]
    model, config = load(tmp_path / "base")
    messages = [str(warning.message) for warning in recwarn if "pretrained" in str(warning.message)]
    assert len(messages) == bool(head)
    assert all(message.endswith(f"which is left out: {', '.join(head)}.") for message in messages)
    assert named_arrays(model).keys() == named_arrays(made).keys()
    assert np.array_equal(model(IDS), made(IDS))
    architecture = "ModernBertModel" if name.startswith("Modern") else "BertModel"
    assert config["architectures"] == [architecture]
    save(tmp_path / "again", model, tmp_path / "base")
    assert not {*head} & {*open_tensors(tmp_path / "again")}
    assert np.array_equal(load(tmp_path / "again")[0](IDS), made(IDS))


@pytest.mark.quick("BertForPreTraining-False", "ModernBertForMaskedLM-True")
@pytest.mark.filterwarnings("ignore:.*pretrained with, which is left out")
@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_classifiers_on_pretrained_encoders(name, of_tokens, tmp_path):
    """A pooler that the checkpoint lacks is new, like the head."""
    encoder(tmp_path / "base", name)
    model = load(tmp_path / "base")[0]
    made = with_classifier(model, ["a", "b", "c"], key=jax.random.key(1), of_tokens=of_tokens)
    assert made(IDS).shape == ((4, 3) if of_tokens else (3,))
    has_new_pooler = ENCODERS[name][3] is False and not of_tokens
    assert ("pooler" in made.head_parts) == has_new_pooler
    if has_new_pooler:  # which the file of an adapter holds, for a base without one
        options = {"rank": 2, "where": ["query"], "modules_to_save": made.head_parts}
        peft.save_adapter(tmp_path / "adapter", loraify(made, **options, key=jax.random.key(2)))
        other = with_classifier(model, ["a", "b", "c"], key=jax.random.key(3))
        again = quaxify(peft.load_adapter(tmp_path / "adapter", other))
        assert np.array_equal(again(IDS), made(IDS))
    save(tmp_path / "out", made, tmp_path / "base")
    assert np.array_equal(load(tmp_path / "out")[0](IDS), made(IDS))


def test_the_names_of_the_first_checkpoints(tmp_path):
    """bert-base-uncased has those of TensorFlow."""
    made = encoder(tmp_path, "BertModel")
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    stored = dict(open_tensors(tmp_path))
    for new, old in names.items():
        stored = {name.replace(new, old): x for name, x in stored.items()}
    write(tmp_path, json.loads((tmp_path / "config.json").read_text()), stored)
    assert np.array_equal(load(tmp_path)[0](IDS), made(IDS))


def test_a_part_of_a_pooler(tmp_path):
    encoder(tmp_path, "BertModel")
    stored = dict(open_tensors(tmp_path)) | {"pooler.dense.bias": np.zeros(16, "f4")}
    write(tmp_path, {**SIZES, "architectures": ["BertModel"]}, stored)
    with pytest.raises(CheckpointError, match=r"Missing: pooler\.dense\.weight"):
        load(tmp_path)
