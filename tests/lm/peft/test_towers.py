"""Adapters of models of which the decoder is a part, which reads images as well."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files.errors import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft, save
from quaxlike.surgery.trees import named_arrays, replace
from tests.lm.models.fixtures import MODELS, folder

_PREFIX = "base_model.model."
_VISION = f"{_PREFIX}model.vision_tower.encoder.layers.0.self_attn.q_proj.lora_"


_WHOLE = ["gemma3", *(pytest.param(x, marks=pytest.mark.slow) for x in MODELS if x == "mistral")]


@pytest.fixture(scope="module", params=_WHOLE)
def whole(request, tmp_path_factory):
    """A checkpoint of a whole model, with names of transformers 4."""
    base = tmp_path_factory.mktemp("towers") / request.param
    shutil.copytree(folder(request.param), base)
    text = json.loads((base / "config.json").read_text())
    name = "Gemma3" if request.param == "gemma3" else "Mistral3"
    config = {"architectures": [f"{name}ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    config |= {"tie_word_embeddings": request.param == "gemma3"}
    (base / "config.json").write_text(json.dumps(config))
    tensors = {f"language_model.{key}": np.asarray(x) for key, x in open_tensors(base).items()}
    tensors["vision_tower.embeddings.patch_embedding.bias"] = np.zeros(3, np.float32)
    write_tensors(base / "model.safetensors", tensors, {"format": "pt"})
    return base


def _adapted(model, **options):
    out = ql.loraify(model, rank=2, key=jax.random.key(0), **options)
    moved = {name: x.replace(b=x.b + 0.5) for name, x in named_arrays(out).items() if hasattr(x, "b")}
    return replace(out, moved)


def _same(a, b):
    a, b = named_arrays(a), named_arrays(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        jax.tree.map(np.testing.assert_array_equal, x, b[name])


def _renamed(adapter, out, change, **more):
    """A copy of an adapter with other names, in the configuration too."""
    shutil.copytree(adapter, out)
    tensors = {
        change(key): np.asarray(x) for key, x in open_tensors(adapter / "adapter_model.safetensors").items()
    }
    write_tensors(out / "adapter_model.safetensors", {**tensors, **more}, {"format": "pt"})
    config = json.loads((adapter / "adapter_config.json").read_text())
    for entry in ("target_modules", "modules_to_save"):
        config[entry] = [change(name) for name in config[entry] or ()]
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


@pytest.mark.slow
def test_names_are_those_of_the_whole_model(whole, tmp_path):
    model, _ = load(whole)
    adapted = _adapted(model, where=["q_proj", "down_proj"]).stacked()
    peft.save_adapter(tmp_path / "a", adapted, task_type="CAUSAL_LM")
    names = open_tensors(tmp_path / "a" / "adapter_model.safetensors")
    assert all(key.startswith(f"{_PREFIX}model.language_model.layers.") for key in names)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    # Whole names: layers of the other parts may end with the same.
    assert all(name.startswith("model.language_model.layers.") for name in config["target_modules"])
    _same(peft.load_adapter(tmp_path / "a", model), adapted.unstacked())
    text = tmp_path / "text"
    save(text, model, whole)
    plain, _ = load(text)  # of the decoder alone: other names, which are read as well
    _same(peft.load_adapter(tmp_path / "a", plain), adapted.unstacked())
    peft.save_adapter(tmp_path / "plain", peft.load_adapter(tmp_path / "a", plain))
    assert f"{_PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight" in open_tensors(
        tmp_path / "plain" / "adapter_model.safetensors"
    )
    _same(peft.load_adapter(tmp_path / "plain", model), adapted.unstacked())


@pytest.mark.slow
def test_the_names_of_transformers_4_and_of_models_without_head_are_read(whole, tmp_path):
    model, _ = load(whole)
    adapted = _adapted(model, where=["q_proj"], modules_to_save=["norm"])
    peft.save_adapter(tmp_path / "a", adapted)
    old = lambda name: name.replace("model.language_model.", "language_model.model.")
    _same(peft.load_adapter(_renamed(tmp_path / "a", tmp_path / "old", old), model), adapted)
    peft.save_adapter(tmp_path / "bare", adapted, task_type="FEATURE_EXTRACTION")
    names = open_tensors(tmp_path / "bare" / "adapter_model.safetensors")
    assert all(key.startswith(f"{_PREFIX}language_model.") for key in names)
    _same(peft.load_adapter(tmp_path / "bare", model), adapted)


@pytest.mark.slow
def test_the_output_layer_has_its_name(whole, tmp_path):
    model, _ = load(whole)
    adapted = _adapted(model.with_separate_head(), where=["lm_head", "q_proj"])
    peft.save_adapter(tmp_path / "a", adapted)
    assert f"{_PREFIX}lm_head.lora_A.weight" in open_tensors(tmp_path / "a" / "adapter_model.safetensors")
    _same(peft.load_adapter(tmp_path / "a", model), adapted)


def test_adapters_of_other_parts_are_left_out_and_told(whole, tmp_path):
    model, _ = load(whole)
    adapted = _adapted(model, where=["q_proj"])
    peft.save_adapter(tmp_path / "a", adapted)
    more = {f"{_VISION}{part}.weight": np.ones((2, 2), np.float32) for part in "AB"}
    more[f"{_PREFIX}model.multi_modal_projector.mm_input_projection_weight"] = np.ones((2, 2), np.float32)
    both = _renamed(tmp_path / "a", tmp_path / "both", str, **more)
    with pytest.warns(
        UserWarning, match=r"3 tensors of vision_tower, multi_modal_projector are left out, since"
    ):
        found = peft.load_adapter(both, model)
    _same(found, adapted)
    write_tensors(both / "adapter_model.safetensors", more, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"multi_modal_projector': is all that this adapter"):
        peft.load_adapter(both, model)
    other = {f"{_PREFIX}model.speech_tower.q_proj.lora_A.weight": jnp.ones((2, 2))}
    unknown = _renamed(tmp_path / "a", tmp_path / "unknown", str, **other)
    with pytest.raises(CheckpointError, match=r"has no layer 'model\.speech_tower\.q_proj'"):
        peft.load_adapter(unknown, model)
