"""Models written as checkpoints: the tensors of the file they were read from, under the same names."""

import json
import os

import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft, save
from quaxlike.surgery.trees import named_arrays
from tests.fixtures import fixture
from tests.lm.models.fixtures import MODELS, adapter, agree, expected, folder, of_peft

FEW = ["gemma3", "mixtral"]
MORE = [name for name in MODELS if name not in FEW]


@pytest.mark.quick("mixtral")
@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_what_was_read_is_written_again(name, tmp_path):
    model, config = load(folder(name))
    save(tmp_path, model, folder(name))
    found, wanted = open_tensors(tmp_path), open_tensors(folder(name))
    assert set(found) == set(wanted)
    assert all(found[key].dtype == wanted[key].dtype for key in wanted)
    assert all(found[key].tobytes() == wanted[key].tobytes() for key in wanted)
    if (whole := folder(name) / "model.safetensors").exists():  # and not in several files
        assert (tmp_path / "model.safetensors").read_bytes() == whole.read_bytes()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {"dtype": "float32", **config}
    assert (tmp_path / "generation_config.json").exists()


@pytest.mark.slow
def test_experts_of_4_bits_are_made_and_written(tmp_path):
    """As GPT-OSS is published, whoever quantised them."""
    model, _ = load(folder("gpt_oss"), quantize={"scheme": "mxfp4", "where": r".*experts\.\w+_proj"})
    save(tmp_path, model, folder("gpt_oss"))
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == {
        "quant_method": "mxfp4"
    }
    assert "model.layers.0.mlp.experts.down_proj_scales" in open_tensors(tmp_path)
    again = named_arrays(load(tmp_path)[0])
    for name, leaf in named_arrays(model).items():
        assert type(again[name]) is type(leaf)
        np.testing.assert_array_equal(*(ql.materialise(x) for x in (again[name], leaf)))


@pytest.mark.slow
def test_a_merged_adapter_gives_the_logits_of_peft(tmp_path):
    base, _ = load(folder("qwen3"))
    adapted = peft.load_adapter(adapter("qwen3/all_linear_rslora"), base)
    save(tmp_path, ql.merge(adapted.stacked()), folder("qwen3"))
    model, _ = load(tmp_path)
    z, wanted = expected("qwen3"), of_peft("qwen3/all_linear_rslora")["all_linear_rslora/logits_merged"]
    logits = jax.jit(jax.vmap(model))(z["input_ids"], z["attention_mask"].astype(bool))
    agree(logits[z["valid"]], wanted[z["valid"]])


@pytest.mark.slow
def test_an_output_layer_of_its_own(tmp_path):
    model, _ = load(folder("gemma3"))
    save(tmp_path, model.with_separate_head(), folder("gemma3"))
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    again, _ = load(tmp_path)
    np.testing.assert_array_equal(again.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "method"),
    [
        ("nf4", "bitsandbytes"),
        *(pytest.param(x, "compressed-tensors", marks=pytest.mark.slow) for x in ("int8", "fp8")),
    ],
)
def test_quantised_weights(scheme, method, tmp_path):
    options = {"double_quant": True} if scheme == "nf4" else {}
    model, _ = load(folder("qwen3"), quantize={"scheme": scheme, "where": ["q_proj", "down_proj"], **options})
    save(tmp_path, model, folder("qwen3"))
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == method
    if scheme == "nf4":
        assert settings["bnb_4bit_use_double_quant"] is True
        assert "model.layers.0.self_attn.k_proj" in settings["llm_int8_skip_modules"]
        assert "model.layers.0.self_attn.q_proj" not in settings["llm_int8_skip_modules"]
    again, _ = load(tmp_path)
    for name, leaf in named_arrays(model).items():
        found = named_arrays(again)[name]
        assert type(found) is type(leaf) or scheme == "int8"  # a BlockArray of the same codes
        np.testing.assert_array_equal(*(ql.materialise(x) for x in (found, leaf)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_names_of_a_decoder_without_its_output_layer(name, tmp_path):
    """As in Qwen3-Embedding and in OpenAI's GPT-2: they are written again without the prefix."""
    base = fixture("peft_gpt2/base") if name == "gpt2" else folder(name)
    for path in base.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    tensors = {key.partition(".")[2]: x for key, x in open_tensors(base).items() if key != "lm_head.weight"}
    write_tensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    model, _ = load(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, model, load(base)[0]))
    save(tmp_path / "again", model, tmp_path)
    assert {*open_tensors(tmp_path / "again")} == {*tensors}


def test_names_within_a_wrapper(tmp_path):
    """As `torch.compile` and `DistributedDataParallel` save them: they are written again with the prefix."""
    for path in fixture("peft_llama/base").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    tensors = {f"_orig_mod.{key}": x for key, x in open_tensors(fixture("peft_llama/base")).items()}
    write_tensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    save(tmp_path / "again", load(tmp_path)[0], tmp_path)
    assert {*open_tensors(tmp_path / "again")} == {*tensors}


@pytest.mark.slow
def test_a_tied_weight_under_the_name_of_the_output_layer(tmp_path):
    """As `safetensors.torch.save_model` writes it, which keeps the first of both names."""
    for path in folder("qwen2").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    tensors = {
        key.replace("model.embed_tokens", "lm_head"): x for key, x in open_tensors(folder("qwen2")).items()
    }
    write_tensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    model, _ = load(tmp_path)
    assert jax.tree.all(jax.tree.map(np.array_equal, model, load(folder("qwen2"))[0]))
    save(tmp_path / "again", model, tmp_path)
    assert {*open_tensors(tmp_path / "again")} == {*tensors}
    tensors.pop("lm_head.weight")
    write_tensors(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"Missing: model\.embed_tokens\.weight"):
        load(tmp_path)


def test_types_that_have_no_place(tmp_path):
    model, _ = load(folder("qwen3"))
    model = ql.loraify(model, rank=2, where=["q_proj"], key=jax.random.key(0))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is of type LoraArray; .* Merge adapters"):
        save(tmp_path / "out", model, folder("qwen3"))
    assert not (tmp_path / "out").exists()


@pytest.mark.quick("quaxlike")
@pytest.mark.parametrize("format", ["safetensors", "gguf", "quaxlike"])
def test_biases_that_have_no_place(format, tmp_path):
    model, _ = load(folder("qwen3"))
    model = ql.loraify(model, rank=2, where=["q_proj"], lora_bias=True, key=jax.random.key(0))
    with pytest.raises(CheckpointError, match=r"The model has .*q_proj\.bias.*, for which .* has no place"):
        save(tmp_path / "out", ql.merge(model), folder("qwen3"), format=format)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_in_several_files_is_not_written_over(tmp_path):
    """Readers would go on to prefer its index."""
    model, _ = load(fixture("peft_llama/base"))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is of a checkpoint in several files; write to another folder"):
        save(tmp_path, model, fixture("peft_llama/base"))
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_checkpoint_over_another_is_one_of_them(n, tmp_path, monkeypatch):
    """However many files were replaced before the process was killed."""
    base = fixture("peft_llama/base")
    dense, _ = load(base)
    save(tmp_path, dense, base)
    calls, replace = iter(range(n)), os.replace

    def stops(*args):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        replace(*args)

    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, ql.quantize(dense, "nf4"), base)
    monkeypatch.undo()
    model, config = load(tmp_path)
    quantised = any(ql.is_value(x) for x in jax.tree.leaves(model, is_leaf=ql.is_value))
    assert quantised == ("quantization_config" in config) == (n == 2)
    save(tmp_path, dense, base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
