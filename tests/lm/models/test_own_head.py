"""Checkpoints whose configuration ties the output layer to the embedding, and that hold one of its own."""

import json
import shutil

import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, loading, save
from quaxlike.surgery.trees import named_arrays, replace
from tests.lm.models.fixtures import MODELS, folder
from tests.lm.models.made import checkpoint
from tests.samples import array

_IDS, _SEEN = array(np.arange(5, 15)), array(np.ones(10, bool))
_WARNING = r"config\.json ties the output layer .* Its lm_head\.weight is the output layer, untied"


def _with_head(base, change, explicit=False, embedding="model.embed_tokens.weight"):
    """Adds an output layer to a tied checkpoint: its embedding, changed."""
    tensors = {key: np.asarray(x) for key, x in open_tensors(base).items()}
    tensors["lm_head.weight"] = np.ascontiguousarray(change(tensors[embedding]))
    write_tensors(base / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config |= {"tie_word_embeddings": True} if explicit else {}
    (base / "config.json").write_text(json.dumps(config))
    return tensors["lm_head.weight"]


def _one_row_differs(w):
    out = w.copy()
    out[-1, -1] += 1
    return out


@pytest.mark.quick("gemma3-True-flipud")
@pytest.mark.parametrize(
    ("name", "explicit", "change"),
    [
        ("gemma3", False, _one_row_differs),
        ("gemma3", True, np.flipud),
        *(pytest.param(x, False, np.flipud, marks=pytest.mark.slow) for x in MODELS if x == "gpt2"),
    ],
)
def test_the_output_layer_of_the_file_wins(name, explicit, change, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "_ROWS_AT_ONCE", 7)
    base = tmp_path / "base"
    shutil.copytree(folder(name), base)
    tied, _ = load(base)
    embedding = next(key for key in named_arrays(tied) if key.endswith(("embed_tokens.weight", "wte.weight")))
    head = _with_head(base, change, explicit, embedding)
    with pytest.warns(UserWarning, match=_WARNING):
        model, config = load(base)
    assert config["tie_word_embeddings"] is model.config.tie_word_embeddings is False
    np.testing.assert_array_equal(model.lm_head.weight, head)
    hidden = jax.jit(lambda tied: tied.hidden(_IDS, _SEEN))(tied)
    found = jax.jit(lambda model: model.logits(hidden))(model)
    np.testing.assert_allclose(found, np.asarray(hidden) @ head.T, atol=1e-4)
    save(tmp_path / "out", model, base)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    again, _ = load(tmp_path / "out")  # without a warning
    np.testing.assert_array_equal(again.lm_head.weight, head)


def test_an_equal_output_layer_stays_tied(tmp_path):
    base = tmp_path / "base"
    shutil.copytree(folder("gemma3"), base)
    _with_head(base, np.copy)
    model, config = load(base)
    assert model.lm_head is None
    assert "tie_word_embeddings" not in config


#: The names in files of tied checkpoints.
_NAMES = {
    "of the output layer": lambda name: name.replace("model.embed_tokens", "lm_head"),
    "of the body": lambda name: name.removeprefix("model."),
    "within a wrapper": lambda name: f"_orig_mod.{name}",
}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "gguf"])
@pytest.mark.parametrize("names", _NAMES)
def test_an_output_layer_that_the_checkpoint_ties(names, format, tmp_path):
    """As after an adapter of one of the two. Both are written, by names that go with the others."""
    base = tmp_path / "base"
    checkpoint(base, "qwen2", tie_word_embeddings=True)
    tensors = {_NAMES[names](key): np.asarray(x) for key, x in open_tensors(base).items()}
    write_tensors(base / "model.safetensors", tensors, {"format": "pt"})
    model = load(base)[0].with_separate_head()
    model = replace(model, {"lm_head.weight": model.lm_head.weight[::-1]})
    save(tmp_path / "out", model, base, format=format)
    again, _ = load(tmp_path / "out")
    for name, x in named_arrays(model).items():
        np.testing.assert_array_equal(named_arrays(again)[name], x)
    if format == "safetensors":
        assert {*open_tensors(tmp_path / "out")} == {*named_arrays(model)}


@pytest.mark.slow
def test_it_is_kept_in_gguf_and_from_there(tmp_path):
    """A file of llama.cpp beside a configuration that knows nothing of its output layer."""
    base, mixed = tmp_path / "base", tmp_path / "mixed"
    checkpoint(base, "qwen3", tie_word_embeddings=True)
    head = _with_head(base, np.flipud, explicit=True)
    mixed.mkdir()
    with pytest.warns(UserWarning, match=_WARNING):
        save(mixed / "model.gguf", load(base)[0], base, format="gguf", quantize="f32")
    np.testing.assert_array_equal(load(mixed / "model.gguf")[0].lm_head.weight, head)
    shutil.copy(base / "config.json", mixed)
    with pytest.warns(UserWarning, match=_WARNING):
        model, _ = load(mixed)
    np.testing.assert_array_equal(model.lm_head.weight, head)


@pytest.mark.slow
def test_a_quantised_one_is_compared_by_its_numbers(tmp_path):
    base = tmp_path / "base"
    checkpoint(base, "qwen3", tie_word_embeddings=False)
    model, _ = load(base, quantize={"scheme": "int8_block", "where": ["lm_head"]}, head=True)
    assert ql.is_value(model.lm_head.weight)
    save(tmp_path / "out", model, base)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.warns(UserWarning, match=_WARNING):
        again, _ = load(tmp_path / "out")
    np.testing.assert_array_equal(*(ql.materialise(x.lm_head.weight) for x in (model, again)))
