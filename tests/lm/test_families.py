"""An architecture is one entry of a table."""

import copy
import subprocess
import sys

import equinox as eqx
import jax
import pytest

from quaxlike.lm.families import FAMILIES, Family
from quaxlike.lm.models import MIXERS, AbstractMixer, Decoder, DecoderConfig, with_classifier
from quaxlike.surgery.balance import LLAMA_FOLDS
from quaxlike.surgery.trees import named_arrays
from tests.lm.models.made import byte_level

_NEW_ARCHITECTURE = """
import json, sys
from pathlib import Path

import quaxlike.lm.finetune
from quaxlike.lm.families import FAMILIES, Family, Gguf

FAMILIES["ToyForCausalLM"] = Family(
    qk_norm="heads", norms=("norm_1", "", "norm_2", ""), tied=True,
    parts={"self_attn": "mixer", "q_proj": "to_q", "o_proj": "to_x", "embed_tokens": "tokens"},
    gguf=Gguf("toy", "toy", permuted=True),
)

import jax
import jax.numpy as jnp
import numpy as np

import quaxlike as ql
from quaxlike.lm import peft
from quaxlike.lm.models import Decoder, DecoderConfig, with_classifier
from quaxlike.lm import tensor_parallel
from quaxlike.surgery.trees import named_arrays

config = {
    "architectures": ["ToyForCausalLM"], "model_type": "toy", "vocab_size": 304, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
}
folder = Path(sys.argv[1])
(folder / "config.json").write_text(json.dumps(config))
model = Decoder(DecoderConfig.from_json(config), key=jax.random.key(0))
ql.lm.write(folder / "model.safetensors", named_arrays(model))
ids = jnp.arange(7)
run = lambda model: model(ids, jnp.ones(7, bool))

# a checkpoint, and a file for llama.cpp
read, _ = ql.lm.load(folder)
np.testing.assert_array_equal(run(read), run(model))
ql.lm.save(folder / "toy.gguf", read, folder, format="gguf", quantize="f32")
assert "blk.1.attn_q.weight" in (folder / "toy.gguf").read_bytes().decode(errors="ignore")
again, said = ql.lm.load(folder / "toy.gguf")
assert said["architectures"] == ["ToyForCausalLM"]
np.testing.assert_allclose(run(again), run(model), rtol=1e-5, atol=1e-5)

# its layers split over devices, and folded into each other
rule = tensor_parallel(model, jax.make_mesh((len(jax.devices()),), ("model",)))
specs = {name: rule(name, leaf) for name, leaf in named_arrays(model).items()}
assert specs["model.layers.0.mixer.to_q.weight"] == jax.P("model", None)
assert specs["model.layers.0.mixer.to_x.weight"] == jax.P(None, "model")
assert specs["model.tokens.weight"] == jax.P("model", None)
moments = {name: np.eye(x.shape[1]) for name, x in named_arrays(model).items() if x.ndim == 2}
balanced = ql.balance(model, moments, "int4_block", block_size=16)
np.testing.assert_allclose(run(balanced), run(model), rtol=1e-4, atol=1e-4)

# another vocabulary, and a head that classifies
resized = ql.lm.resize_vocabulary(read, 310)
ql.lm.save(folder / "resized", resized, folder)
np.testing.assert_array_equal(run(ql.lm.load(folder / "resized")[0]), run(resized))
classifier = with_classifier(read, ["a", "b"], key=jax.random.key(2))
ql.lm.save(folder / "classifier", classifier, folder)
assert "ToyForSequenceClassification" in (folder / "classifier" / "config.json").read_text()
np.testing.assert_array_equal(run(ql.lm.load(folder / "classifier")[0]), run(classifier))

# an adapter of its embedding
adapted = ql.loraify(model, rank=2, where=["to_q", "tokens"], key=jax.random.key(1))
peft.save_adapter(folder / "adapter", adapted)
loaded = peft.load_adapter(folder / "adapter", model)
np.testing.assert_allclose(run(loaded), run(adapted), rtol=1e-5, atol=1e-5)
"""


@pytest.mark.slow
def test_an_architecture_is_one_entry(tmp_path):
    """In a process of its own, which has imported everything before."""
    (tmp_path / "tokenizer.json").write_text(byte_level(290).to_str(), encoding="utf-8")
    run = [sys.executable, "-c", _NEW_ARCHITECTURE, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class _Sums(AbstractMixer):
    role = "ssm"
    scale: jax.Array

    def __init__(self, config, key):
        self.scale = jax.numpy.ones(config.hidden_size)

    def __call__(self, x, context, memory, start):
        return self.scale * jax.numpy.cumsum(x, axis=0), memory

    @classmethod
    def memory(cls, config, room, dtype, cache):
        raise NotImplementedError


def _shapes(architecture):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"architectures": [architecture], "vocab_size": 9, "max_position_embeddings": 8, **sizes}
    return eqx.filter_eval_shape(Decoder, DecoderConfig.from_json(config), key=jax.random.key(0))


def test_a_family_joins_after_models_were_made(monkeypatch):
    """With names and a mixer that no other family has; models of other families stay what they were."""
    llama = _shapes("LlamaForCausalLM")
    parts = {"embed_tokens": "tokens", "self_attn": "mixing", "down_proj": "to_x", "sinks": "drains"}
    norms = ("norm_1", "", "norm_2", "")
    monkeypatch.setitem(MIXERS, "sums", _Sums)
    monkeypatch.setitem(FAMILIES, "ToyForCausalLM", Family(parts=parts, norms=norms))
    family = Family(parts=parts, norms=norms, mixers={"sums": "sums"}, attends=2)
    monkeypatch.setitem(FAMILIES, "SumsForCausalLM", family)
    toy, sums = _shapes("ToyForCausalLM"), _shapes("SumsForCausalLM")
    theirs = {**parts, "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2"}

    def renamed(name):
        return ".".join(theirs.get(part, part) for part in name.split("."))

    assert {*named_arrays(toy)} == {renamed(name) for name in named_arrays(llama)}
    assert "model.layers.0.ssm.scale" in named_arrays(sums)
    assert "model.layers.1.mixing.q_proj.weight" in named_arrays(sums)
    assert jax.tree.structure(copy.deepcopy(toy)) == jax.tree.structure(toy)
    assert isinstance(toy, Decoder)
    assert type(_shapes("LlamaForCausalLM").model) is type(llama.model)
    classifier = with_classifier(toy, ["a", "b"], key=jax.random.key(0))
    assert classifier.architecture == "ToyForSequenceClassification"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Olmo2ForCausalLM", "Gemma2ForCausalLM"])
def test_what_is_folded(name):
    """Norms that add to their weights, or stand after the layers, are not."""
    folds = FAMILIES[name].folds()
    above_mlp = {r"(.*)\.mlp\.up_proj": [r"\1.mlp.down_proj"]}
    assert folds == (LLAMA_FOLDS if name == "LlamaForCausalLM" else above_mlp)
