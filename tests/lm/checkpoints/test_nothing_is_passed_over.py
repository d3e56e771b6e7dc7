"""Entries and tensors that nothing reads: an error or a warning that names each, in every reader."""

import json
import shutil
import warnings

import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.adapters import METHODS
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft
from quaxlike.lm.formats import FORMATS
from quaxlike.lm.gguf import writer
from quaxlike.lm.peft.config import read_config
from tests.fixtures import DATA, FIXTURES, fixture
from tests.lm.models.fixtures import MODELS, folder

_EXTRA = np.ones((2, 2), np.float32)


def _folders(*patterns):
    roots = (DATA, FIXTURES)
    found = {str(x.relative_to(root)) for root in roots for p in patterns for x in root.glob(p) if x.is_dir()}
    return sorted(found)


def _edited(source, out, file="config.json", **entries):
    """A copy of a folder, with entries added to an object within one of its files: `a__b` is `b` of `a`."""
    shutil.copytree(source, out)
    (out / file).chmod(0o644)
    described = json.loads((out / file).read_text())
    for name, value in entries.items():
        *above, last = name.split("__")
        inner = described
        for part in above:
            inner = inner[part]
        inner[last] = value
    (out / file).write_text(json.dumps(described))
    return out


def _with_tensor(source, out, name, file="model.safetensors"):
    shutil.copytree(source, out)
    (out / file).chmod(0o644)
    found = open_tensors(source / file)
    tensors = {key: np.asarray(x) for key, x in found.items()}
    write_tensors(out / file, {**tensors, name: _EXTRA}, dict(found.metadata) or {"format": "pt"})
    return out


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MODELS)
def test_an_entry_of_a_model(name, tmp_path):
    made_up = {"made_up": 3}
    config = json.loads((folder(name) / "config.json").read_text())
    if config.get("rope_parameters"):
        made_up["rope_parameters__made_up_too"] = 2
    edited = _edited(folder(name), tmp_path / "m", **made_up)
    with pytest.warns(UserWarning, match="made_up") as told:
        lm.loading.open_model(edited)
    found = " ".join(str(x.message) for x in told)
    assert all(entry.rpartition("__")[2] in found for entry in made_up)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tensor", ["made_up.weight", "model.layers.0.self_attn.bias"])
def test_a_tensor_of_a_model(name, tensor, tmp_path):
    if not (folder(name) / "model.safetensors").exists():
        pytest.skip("its tensors are in several files")
    with pytest.raises(CheckpointError, match=rf"Unknown: {tensor}"):
        load(_with_tensor(folder(name), tmp_path / "m", tensor))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "text_config__"])
def test_an_entry_of_a_model_that_reads_images(where, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(folder("gemma3"), base)
    text = json.loads((base / "config.json").read_text())
    whole = {
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {"a": 1},
        "boi_token_index": 3, "mm_tokens_per_image": 4, "initializer_range": 0.02, "image_token_index": 5,
    }  # fmt: skip
    (base / "config.json").write_text(json.dumps(whole))
    load(base)
    with pytest.warns(UserWarning, match=r"config\.json has made_up=3, which nothing here reads"):
        load(_edited(base, tmp_path / "m", **{f"{where}made_up": 3}))


def test_entries_that_are_off_or_known_to_be_without_effect(tmp_path):
    off = {"made_up": None, "made_up_too": False, "made_up_list": [], "made_up_object": {}}
    known = {"unsloth_fixed": True, "_attn_implementation_autoset": True, "temperature": 0.5, "n_ctx": 3}
    lm.loading.open_model(_edited(folder("qwen3"), tmp_path / "known", **off, **known))
    for i, entry in enumerate(("made_up", "x_loss_" * 10**5 + "-")):  # the latter in no time
        edited = _edited(folder("qwen3"), tmp_path / str(i), **{entry: 0})
        with pytest.warns(UserWarning, match=rf"config\.json has {entry[:50]}.*, which nothing here reads"):
            lm.loading.open_model(edited)


# Where the settings of a format are: the file, and the entry in it.
_PLACES = (
    ("config.json", "quantization_config"),
    ("quantize_config.json", ""),
    ("hf_quant_config.json", "quantization"),
    ("config.json", "quantization"),
)


def _place_of(name):
    """The first of these places that a checkpoint has; None if there is none."""
    for file, entry in _PLACES:
        path = fixture(name) / file
        described = json.loads(path.read_text()) if path.is_file() else {}
        if described and (not entry or described.get(entry)):
            return file, entry
    return None


_WITH_SETTINGS = [(name, *place) for name in _folders("formats/*/*") if (place := _place_of(name))]


@pytest.mark.quick(9)
@pytest.mark.parametrize(("name", "file", "at"), _WITH_SETTINGS)
def test_a_setting_of_a_format(name, file, at, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lm.open_checkpoint(fixture(name))
    edited = _edited(fixture(name), tmp_path / "m", file, **{f"{at}__made_up".removeprefix("__"): 3})
    with pytest.warns(
        UserWarning, match=r"quantisation config of .* has made_up=3, which nothing here reads"
    ):
        lm.open_checkpoint(edited)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("compressed_tensors/w4a16_group_sym", "config_groups__group_0__made_up"),
        ("compressed_tensors/w4a16_group_sym", "config_groups__group_0__weights__made_up"),
        ("gptq/dynamic_mixed", "dynamic"),
    ],
)
def test_a_setting_within_settings(name, entry, tmp_path):
    value = {".*": {"made_up": 3}} if entry == "dynamic" else 3
    edited = _edited(fixture(f"formats/{name}"), tmp_path / "m", **{f"quantization_config__{entry}": value})
    with pytest.warns(
        UserWarning, match=r"quantisation config of .* has made_up=3, which nothing here reads"
    ):
        lm.open_checkpoint(edited)


def test_settings_are_known_once():
    for format in FORMATS:
        assert not {*format.used} & {*format.without_effect}


def test_the_version_of_gptq_may_be_called_its_format(tmp_path):
    """As newer releases of GPTQModel write it."""
    source = fixture("formats/gptq/w4_g32_asym_v2")
    edited = _edited(source, tmp_path / "m", quantization_config__format="gptq_v2")
    described = json.loads((edited / "config.json").read_text())
    del described["quantization_config"]["checkpoint_format"]
    (edited / "config.json").write_text(json.dumps(described))
    found, wanted = lm.read(edited), lm.read(source)
    for name, x in wanted.items():
        np.testing.assert_array_equal(ql.materialise(found[name]), ql.materialise(x))


@pytest.mark.slow
def test_a_key_and_a_tensor_of_gguf(tmp_path):
    source = lm.open_checkpoint(fixture("formats/gguf_whole/qwen2_f32.gguf"))
    arrays, metadata = dict(source), dict(source.metadata)
    writer.write(tmp_path / "key.gguf", arrays, {**metadata, "qwen2.made_up": 3})
    with pytest.warns(UserWarning, match=r"key\.gguf has qwen2\.made_up=3, which nothing here reads"):
        load(tmp_path / "key.gguf")
    for name in ("blk.0.made_up.weight", "made_up.weight"):
        writer.write(tmp_path / "tensor.gguf", {**arrays, name: _EXTRA}, metadata)
        with pytest.raises(CheckpointError, match=rf"Unknown: {name}"):
            load(tmp_path / "tensor.gguf")


def test_a_setting_of_a_pooling(tmp_path):
    modules = [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    settings = {"word_embedding_dimension": 4, "pooling_mode_cls_token": True, "pooling_mode_made_up": False}
    path = tmp_path / "1_Pooling" / "config.json"
    path.write_text(json.dumps(settings))
    assert lm.models.Pooling.of(tmp_path).modes == ("cls",)
    path.write_text(json.dumps(settings | {"pooling_mode_made_up": True}))
    with pytest.warns(UserWarning, match="pooling_mode_made_up=True"):
        lm.models.Pooling.of(tmp_path)


_ADAPTERS = _folders("models/*/adapters/*", "peft_*/adapters/*", "methods/*/*")
_OF_METHODS = ("init_weights", "init_ia3_weights", "init_lora_weights", "d_initial", "tinit", "megatron_core")


def _config_of(name):
    path = fixture(name) / "adapter_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_entry_of_an_adapter(method, tmp_path):
    """Entries of other methods are unknown, too."""
    path = tmp_path / "adapter_config.json"
    plain = {"peft_type": method.peft_type, "target_modules": ["q_proj"]}
    known = {*method.options, *method.informative}
    assert len({"init_weights", "init_ia3_weights", "init_lora_weights"} & known) == 1
    for entry in known & {*_OF_METHODS}:
        path.write_text(json.dumps(plain | {entry: True}))
        read_config(path)
    for entry, value in [*((x, True) for x in _OF_METHODS if x not in known), ("made_up", 3), ("made_up", 0)]:
        path.write_text(json.dumps(plain | {entry: value}))
        with pytest.raises(CheckpointError, match=rf"'{entry}': {value} is not supported"):
            read_config(path)


@pytest.mark.quick("made_up.modules_to_save.weight-models/qwen2/adapters/embed_lora_tied")
@pytest.mark.parametrize(
    "name", [name for name in _ADAPTERS if name.startswith("models/") and _config_of(name)]
)
@pytest.mark.parametrize(
    "tensor", ["made_up.weight", "made_up.modules_to_save.weight", "made_up.original_module.bias"]
)
def test_a_tensor_of_an_adapter(name, tensor, tmp_path):
    base, _ = load(folder(name.split("/")[1]))
    key = f"base_model.model.{tensor}"
    edited = _with_tensor(fixture(name), tmp_path / "a", key, "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=rf"'{key}': is not expected"):
        peft.load_adapter(edited, base)
