"""Checkpoints of every format with a tensor missing or reshaped: an error that names it, or the same."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.lm import UnsupportedConfigError, peft
from quaxlike.surgery.trees import named_arrays
from tests.fixtures import DATA, FIXTURES, fixture
from tests.fuzz import tensors as files
from tests.samples import some_of

_WEIGHTS = (
    *("formats/*/*", "models/*/base", "peft_*/base", "qlora_*/base4bit", "train_*/base*", "linear4bit/*"),
)
_MODELS = ("formats/whole/*", "formats/gguf_whole/*", "models/*/base")
_ADAPTERS = ("peft_*/adapters/*", "models/*/adapters/*")
# Two or three of each format are quick to go through; the rest takes minutes.
_QUICK = (
    *("gptq/w4_g32_act_asym", "gptq/w4_g32_asym_v2", "awq/gemm_g32", "w4a16_actorder_group"),
    *("w8a8_int_asym_tensor", "w4a16_group_asym", "w8_naive_channel", "sparse24_fp8_channel", "nvfp4a16"),
    *("fp8/small_block", "modelopt_nvfp4", "mlx/affine_b4", "mode_mxfp4", "hqq/int4_view_as_float"),
    *("mxfp4/one_expert", "torchao/int8_weight_only", "bnb_int8/threshold6", "nested_bias.safetensors"),
    "peft_llama/adapters/qv",
)
# Only whether the file has them says whether the model has them.
_TOLD_BY_PRESENCE = ("output.weight", "rope_freqs.weight")


def _all(patterns, quick=_QUICK):
    found = {
        str(path.relative_to(root))
        for root in (FIXTURES, DATA)
        for pattern in patterns
        for path in root.glob(pattern)
        if _is_checkpoint(path)
    }
    mark = lambda name: () if name.endswith(quick) else pytest.mark.slow
    return [pytest.param(name, marks=mark(name)) for name in sorted(found)]


def _is_checkpoint(path):
    if path.is_file():
        parts = re.search(r"-(\d{5})-of", path.name)
        return path.suffix in (".safetensors", ".gguf") and (parts is None or int(parts[1]) == 1)
    return any(path.glob("*.safetensors"))


def _copied(name, tmp_path):
    """A copy that can be changed: its path, and its files of tensors."""
    source, folder = fixture(name), tmp_path / "case"
    folder.mkdir()
    stem = source.name.rpartition("-00001-of-")[0] or source.name
    for path in source.parent.glob(f"{stem}*") if source.is_file() else source.iterdir():
        if path.suffix in (".json", ".safetensors", ".gguf") and path.name != "tokenizer.json":
            shutil.copyfile(path, folder / path.name)
    changed = sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))
    return (folder / source.name if source.is_file() else folder), changed


def _variants(path, *changes):
    """Writes the file once for each of its changes; yields the tensor, and what was done."""
    stored, index = files.read(path), path.parent / "model.safetensors.index.json"
    listed = json.loads(index.read_text()) if index.exists() else None
    for change in changes:
        for name, what, tensors in change(stored):
            files.write(path, tensors)
            if listed is not None:
                names = {k: x for k, x in listed["weight_map"].items() if k != name or k in tensors.tensors}
                index.write_text(json.dumps({**listed, "weight_map": names}))
            yield name, what
    files.write(path, stored)
    if listed is not None:
        index.write_text(json.dumps(listed))


def _removed(stored):
    """The file without each of its tensors."""
    for name in stored.tensors:
        yield name, "removed", stored._replace(tensors={k: x for k, x in stored.tensors.items() if k != name})


def _reshaped(stored):
    """The file with each of its tensors in each other shape."""
    for name, entry in stored.tensors.items():
        for what, other in files.other_shapes(entry).items():
            yield name, what, stored._replace(tensors={**stored.tensors, name: other})


def _once(change, seed="", n=1):
    """The first of the changes of each kind, whatever the numbers of layers, experts and parts. With `n`,
    about one kind in so many: others for another `seed`."""

    def changes(stored):
        first = {}
        for name, what, tensors in change(stored):
            first.setdefault(re.sub(r"\d+", "N", f"{name}, {what}"), (name, what, tensors))
        yield from some_of(first, seed, n).values()

    return changes


def _bytes_of(x):
    return [(leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(x)]


def _agree(found, expected):
    if _bytes_of(found) == _bytes_of(expected):
        return True
    return np.array_equal(*(np.asarray(ql.materialise(x)) for x in (found, expected)), equal_nan=True)


def _is_named(name, message):
    """Whether an error names a tensor: by its name, or by its layer's and its own."""
    name = name.replace("__fp4", "__nf4")  # either is missing then
    if name.endswith(".base_layer.bias"):  # PEFT's name for what the layer holds
        name = name.replace(".base_layer", "")
    layer, _, part = name.rpartition(".")
    return name in message or (layer in message and part in message)


def _outcome(load, *args):
    """What is loaded, or the text of the error."""
    try:
        return load(*args), ""
    except (CheckpointError, UnsupportedConfigError) as error:
        return None, str(error)


@pytest.mark.quick("formats/mlx/affine_b4", "formats/awq/gemm_g32")
@pytest.mark.parametrize("name", _all(_WEIGHTS))
def test_a_missing_tensor_is_named(name, tmp_path):
    """Or it was a whole weight by itself, which then is missing, and no other is different."""
    path, changed = _copied(name, tmp_path)
    whole, error = _outcome(lm.read, path)
    if whole is None:
        assert "can be read" in error  # a type of GGUF
        return
    plain = {key for key, x in whole.items() if not ql.is_value(x)}
    for file in changed:
        for tensor, _ in _variants(file, _removed):
            found, error = _outcome(lm.read, path)
            if found is None:
                assert _is_named(tensor, error) or "the parts hold" in error
                continue
            lost = whole.keys() - found.keys()
            assert found.keys() <= whole.keys(), tensor
            assert len(lost) <= 1, tensor
            assert not lost or file.suffix == ".gguf" or (lost == {tensor} and lost <= plain), tensor
            assert all(_agree(found[key], whole[key]) for key in found), tensor


@pytest.mark.quick("formats/awq/gemm_g32")
@pytest.mark.parametrize("name", _all(_WEIGHTS))
def test_another_shape_is_an_error_or_visible(name, tmp_path):
    """No other weight is different, and this one has another shape, or the same values."""
    path, changed = _copied(name, tmp_path)
    whole, error = _outcome(lm.read, path)
    if whole is None:
        assert "can be read" in error  # a type of GGUF
        return
    for file in changed:
        for tensor, what in _variants(file, _once(_reshaped, name, 4)):
            found, _ = _outcome(lm.read, path)
            if found is None:
                continue
            assert found.keys() == whole.keys(), (tensor, what)
            other = [key for key in whole if not _agree(found[key], whole[key])]
            assert len(other) <= 1, (tensor, what)
            assert all(found[key].shape != whole[key].shape for key in other), (tensor, what)


@pytest.mark.slow
@pytest.mark.parametrize("name", _all(_MODELS))
def test_models(name, tmp_path):
    """Of a model with another tensor, or without one, nothing but an error comes out, or the same model."""
    path, changed = _copied(name, tmp_path)
    whole, _ = ql.lm.load(path)
    for file in changed:
        for tensor, what in _variants(file, _once(_removed), _once(_reshaped, name, 4)):
            found, error = _outcome(ql.lm.load, path)
            if found is None:
                assert what != "removed" or _is_named(tensor, error) or file.suffix == ".gguf"
            elif what != "removed" or tensor not in _TOLD_BY_PRESENCE:
                assert _bytes_of(named_arrays(found[0])) == _bytes_of(named_arrays(whole)), (tensor, what)


@pytest.mark.slow
@pytest.mark.parametrize("name", _all(_ADAPTERS))
def test_adapters(name, tmp_path):
    path, changed = _copied(name, tmp_path)
    model, _ = ql.lm.load(fixture(f"{name.partition('/adapters')[0]}/base"))
    whole = _bytes_of(peft.load_adapter(path, model))
    for file in changed:
        for tensor, what in _variants(file, _once(_removed), _once(_reshaped)):
            found, error = _outcome(peft.load_adapter, path, model)
            if found is None:
                # Without the embedding, there is a change of the output layer that was tied to it.
                tied = tensor.replace("model.embed_tokens", "lm_head")
                assert what != "removed" or _is_named(tensor, error) or _is_named(tied, error)
            else:
                assert _bytes_of(found) == whole, (tensor, what)


def _settings(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    scheme = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    scheme |= entries
    (folder / "config.json").write_text(json.dumps(config))


def test_columns_out_of_order_of_plain_integers(tmp_path):
    """One byte per code, `actorder: group`: the same order as for packed ones."""
    folder, (file,) = _copied("formats/compressed_tensors/w8a16_int_group", tmp_path)
    stored = files.read(file)
    layer = next(name for name in stored.tensors if name.endswith(".weight_scale")).removesuffix("_scale")
    n, k = stored.tensors[layer].shape
    groups = stored.tensors[f"{layer}_scale"].shape[1]
    index = np.random.default_rng(0).permutation(np.arange(k) // (k // groups)).astype(np.int32)
    plain = lm.read(folder)[layer]
    codes = np.frombuffer(stored.tensors[layer].data, np.int8).reshape(n, k)
    scale = np.asarray(plain.scale.scale, np.float32)
    _settings(folder, actorder="group")
    with pytest.raises(CheckpointError, match="weight_g_idx': is missing, though the scheme says"):
        lm.read(folder)
    entry = files.Entry("I32", (k,), index.tobytes())
    files.write(file, stored._replace(tensors={**stored.tensors, f"{layer}_g_idx": entry}))
    expected = codes.astype(np.float32) * scale[:, index]
    np.testing.assert_array_equal(ql.materialise(lm.read(folder)[layer]), expected)


@pytest.mark.parametrize("suffix", ["weight", "down_proj"])
@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_codes_without_scales_whatever_their_name(suffix, kind, tmp_path):
    folder, (file,) = _copied("formats/gptq/w4_g128_sym", tmp_path)
    stored = files.read(file)
    name = f"model.layers.9.mlp.experts.{suffix}"
    files.write(file, stored._replace(tensors={**stored.tensors, name: files.Entry(kind, (2, 2), bytes(4))}))
    with pytest.raises(CheckpointError, match=f"'{name}': holds float8_.* whose scales are missing"):
        lm.read(folder)


_GGUF = "formats/gguf_whole"


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("base", "part", "entry", "message"),
    [
        ("formats/whole/mxfp4_gpt_oss", "experts.down_proj_scales", None, "down_proj_scales': is missing"),
        (
            "models/mixtral/base",
            "experts.0.w1.weight",
            "flat",
            r"w1\.weight must be of .* shape \(\d+, \d+\)",
        ),
        (f"{_GGUF}/qwen2_q4_0.gguf", "blk.0.ffn_up.weight", "empty", "'blk.0.ffn_up.weight': is not made of"),
        (f"{_GGUF}/llama_q4_k_m.gguf", "blk.0.attn_q.weight", "one more axis", "must be a matrix"),
        (f"{_GGUF}/qwen2_q4_0.gguf", "token_embd.weight", "a row less", r"has \d+ rows, for \d+ tokens"),
    ],
)
def test_errors_of_models_name_the_tensor(base, part, entry, message, tmp_path):
    path, (file, *_) = _copied(base, tmp_path)
    stored = files.read(file)
    name = next(name for name in stored.tensors if name.endswith(part))
    others = {k: x for k, x in stored.tensors.items() if k != name}
    if entry is not None:
        others[name] = files.other_shapes(stored.tensors[name])[entry]
    files.write(file, stored._replace(tensors=others))
    with pytest.raises(CheckpointError, match=message):
        ql.lm.load(path)


def test_experts_of_different_dtypes(tmp_path):
    path, (file, *_) = _copied("models/mixtral/base", tmp_path)
    stored = files.read(file)
    name = next(name for name in stored.tensors if name.endswith("experts.1.w1.weight"))
    half = np.frombuffer(stored.tensors[name].data, np.float32).astype(np.float16)
    entry = files.Entry("F16", stored.tensors[name].shape, half.tobytes())
    files.write(file, stored._replace(tensors={**stored.tensors, name: entry}))
    with pytest.raises(CheckpointError, match=r"1\.w1\.weight must be of float32 .* found float16"):
        ql.lm.load(path)
