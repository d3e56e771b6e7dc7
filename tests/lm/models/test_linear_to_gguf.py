"""GGUF files of decoders with linear attention: the order of heads, and the parts of projections."""

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.files import CheckpointError
from quaxlike.lm import load, peft, save
from quaxlike.lm.gguf import layouts
from quaxlike.lm.gguf.container import open_gguf
from quaxlike.lm.gguf.writer import write
from quaxlike.surgery.trees import named_arrays
from tests.lm.models.test_to_gguf import _adapted, _checkpoint, _in_file  # noqa: F401 (a fixture)

_HYBRIDS = ["qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"]


def _written(checkpoint, tmp_path):
    """A file of Qwen3.5, opened."""
    source, model = checkpoint("qwen3_5_text")
    save(tmp_path / "m.gguf", model, source, format="gguf")
    return open_gguf(tmp_path / "m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("name", _HYBRIDS)
def test_linear_attention(name, checkpoint, tmp_path):
    """The order of heads, and the parts of projections: of weights, and of adapters."""
    source, model = checkpoint(name)
    save(tmp_path / "m.gguf", model, source, format="gguf", quantize="f32")
    again, _ = load(tmp_path / "m.gguf")
    for key, leaf in named_arrays(again).items():
        np.testing.assert_allclose(leaf, named_arrays(model)[key], atol=1e-6, err_msg=key)
    conv = open_gguf(tmp_path / "m.gguf")._tensors["blk.0.ssm_conv1d.weight"]
    assert conv.shape == (160, 3)
    adapted = _adapted(model, where=r".*\.linear_attn\.(in_proj_\w+|out_proj)\..*")
    save(tmp_path / "merged.gguf", ql.merge(adapted), source, format="gguf")
    peft.save_gguf_adapter(tmp_path / "lora.gguf", adapted, source)
    file = open_gguf(tmp_path / "lora.gguf")
    names = {x.removesuffix(".lora_a") for x in file if x.startswith("blk.0.") and x.endswith("_a")}
    others = {"ssm_ba"} if name == "qwen3_next" else {"ssm_alpha", "ssm_beta"}
    assert names == {f"blk.0.{x}.weight" for x in {"attn_qkv", "attn_gate", "ssm_out", *others}}
    for x in names:
        a, b = (np.asarray(file[f"{x}.lora_{side}"]) for side in "ab")
        merged, base = (_in_file(tmp_path / path, x) for path in ("merged.gguf", "m.gguf"))
        np.testing.assert_allclose(b @ a, merged - base, atol=1e-5, err_msg=x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "size", "is_ordered"),
    [("q8_0", 64, False), ("q8_0", 16, True), ("q4_k", 64, True)],
)
def test_columns_of_blocks_move_with_their_heads(quantize, size, is_ordered, checkpoint, tmp_path):
    """Whole blocks move as they are. Heads that share a block keep their codes in the order of the file."""
    sizes = {"linear_key_head_dim": size, "linear_value_head_dim": size, "linear_num_value_heads": 8}
    source, model = checkpoint("qwen3_5_text", **sizes)
    save(tmp_path / "m.gguf", model, source, format="gguf", quantize=quantize)
    again, _ = load(tmp_path / "m.gguf")
    w = again.model.layers[0].linear_attn.out_proj.weight
    assert (w.order is not None) == is_ordered
    dense = model.model.layers[0].linear_attn.out_proj.weight
    error = lambda w: np.std(w.materialise() - dense) / np.std(dense)
    assert error(w) < 1.1 * error(ql.BlockArray.quantize(dense, codec=quantize))
    save(tmp_path / "again.gguf", again, tmp_path / "m.gguf", format="gguf")
    raw = [_bytes_of(tmp_path / x, "blk.0.ssm_out.weight") for x in ("m.gguf", "again.gguf")]
    assert raw[0] == raw[1]
    ours = ql.quantize(model, quantize)  # in the order of the model: moved if blocks are whole
    if is_ordered:
        with pytest.raises(CheckpointError, match="BlockArray has no place"):
            save(tmp_path / "ours.gguf", ours, source, format="gguf")
    save(tmp_path / "ours.gguf", ours, source, format="gguf", quantize=quantize)
    found = load(tmp_path / "ours.gguf")[0].model.layers[0].linear_attn.out_proj.weight
    assert error(found) < 1.5 * error(w)


def _bytes_of(path, name):
    tensor = open_gguf(path)._tensors[name]
    return tensor.file.read(tensor.start, tensor.nbytes, name)


@pytest.mark.slow
def test_rows_of_tensors_of_two_types_become_dense(checkpoint, tmp_path):
    """Where a file gives the two parts of Qwen3-Next's projection other types."""
    source, model = checkpoint("qwen3_next", hidden_size=64)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    file = open_gguf(tmp_path / "m.gguf")
    arrays = {name: file[name] for name in file}
    whole = arrays.pop("model.layers.0.linear_attn.in_proj_qkvz.weight")
    for name, codec in (("attn_qkv", "q8_0"), ("attn_gate", "q4_0")):
        part = jnp.asarray(_in_file(tmp_path / "m.gguf", f"blk.0.{name}.weight"))
        arrays[f"blk.0.{name}.weight"] = ql.BlockArray.quantize(part, codec=codec)
    write(tmp_path / "two.gguf", arrays, file.metadata)
    with pytest.warns(UserWarning, match="in_proj_qkvz.weight is stored as tensors of several types"):
        again, _ = load(tmp_path / "two.gguf")
    found = again.model.layers[0].linear_attn.in_proj_qkvz.weight
    assert not ql.is_value(found)
    assert np.std(found - whole) < 0.1 * np.std(whole)


@pytest.mark.slow
def test_the_gate_of_a_shared_expert_may_be_a_vector(checkpoint, tmp_path):
    """Files of llama.cpp's converter have it without the axis of one row."""
    source, model = checkpoint("qwen3_next")
    save(tmp_path / "m.gguf", model, source, format="gguf")
    file = open_gguf(tmp_path / "m.gguf")
    gates = [name for name in file if name.endswith("shared_expert_gate.weight")]
    assert len(gates) == 3
    arrays = {name: file[name][0] if name in gates else file[name] for name in file}
    write(tmp_path / "vectors.gguf", arrays, file.metadata)
    again, _ = load(tmp_path / "vectors.gguf")
    for name in gates:
        np.testing.assert_array_equal(named_arrays(again)[name], named_arrays(model)[name])


@pytest.mark.slow
def test_whole_heads_are_rotated_unless_the_file_says_how_much(checkpoint, tmp_path):
    """As in llama.cpp. transformers has another default for these models."""
    file = _written(checkpoint, tmp_path)
    metadata = {x: y for x, y in file.metadata.items() if x != "qwen35.rope.dimension_count"}
    write(tmp_path / "none.gguf", {name: file[name] for name in file}, metadata)
    assert open_gguf(tmp_path / "none.gguf").config["partial_rotary_factor"] == 1


@pytest.mark.slow
def test_decays_that_are_no_decays_are_refused(checkpoint, tmp_path, monkeypatch):
    file = _written(checkpoint, tmp_path)
    arrays = {name: file[name] for name in file}
    monkeypatch.setitem(layouts.FUNCTIONS, "negative_exponential", layouts.FUNCTIONS[""]._replace(read=None))
    name = next(name for name in file if name.endswith("A_log"))
    write(tmp_path / "bad.gguf", arrays | {name: jnp.ones_like(arrays[name])}, file.metadata)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"blk.0.ssm_a': must not have positive numbers"):
        load(tmp_path / "bad.gguf")


def test_functions_are_of_floats(checkpoint, tmp_path):
    file = _written(checkpoint, tmp_path)
    name = "blk.0.attn_norm.weight"
    file._tensors[name] = file._tensors[name]._replace(kind=8)
    with pytest.raises(CheckpointError, match=rf"{name}': must be made of floats; found quantised blocks"):
        file["model.layers.0.input_layernorm.weight"]


def test_layers_that_predict_more_tokens_are_left_out(checkpoint, tmp_path):
    """llama.cpp's converter appends them; a file that we write of such a file is without."""
    file = _written(checkpoint, tmp_path)
    arrays = {name: file[name] for name in file}
    metadata = file.metadata | {"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1}
    metadata["qwen35.attention.recurrent_layers"] = [True, False, True, False]
    more = {"blk.3.nextn.eh_proj.weight": jnp.ones((4, 8)), "blk.3.attn_norm.weight": jnp.ones(4)}
    write(tmp_path / "more.gguf", arrays | more, metadata)
    again, config = load(tmp_path / "more.gguf")
    assert config["num_hidden_layers"] == 3
    save(tmp_path / "again.gguf", again, tmp_path / "more.gguf", format="gguf")
    found = open_gguf(tmp_path / "again.gguf")
    assert "qwen35.nextn_predict_layers" not in found.metadata
    assert list(found.metadata["qwen35.attention.recurrent_layers"]) == [True, False, True]
    assert not any(name.startswith("blk.3.") for name in found._tensors)
    load(tmp_path / "again.gguf")
    write(tmp_path / "bad.gguf", arrays, metadata | {"qwen35.nextn_predict_layers": 9})
    with pytest.raises(CheckpointError, match=r"nextn_predict_layers.*fewer than 4 layers; found 9"):
        load(tmp_path / "bad.gguf")


def test_layers_that_a_file_lists(checkpoint, tmp_path):
    """Each layer may be told, where they are not at regular intervals."""
    file = _written(checkpoint, tmp_path)
    arrays, key = {name: file[name] for name in file}, "qwen35.attention.recurrent_layers"
    write(tmp_path / "l.gguf", arrays, file.metadata | {"qwen35.full_attention_interval": 3, key: [1, 0, 1]})
    config = load(tmp_path / "l.gguf")[0].config
    assert config.mixers == ("gated_delta_net", "attention", "gated_delta_net")
    write(tmp_path / "bad.gguf", arrays, file.metadata | {key: [0.5]})
    with pytest.raises(CheckpointError, match=r"recurrent_layers.*expected a list of booleans"):
        load(tmp_path / "bad.gguf")


@pytest.mark.quick(
    "changes2-expected a size as qwen35.ssm.state_size; found 1073741824",
    "changes0-97 is no multiple of linear_num_value_heads, which is 6",
    "changes3-6 heads do not divide",
    "changes1-4 heads of keys do not divide 6 heads of values",
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 97}, "97 is no multiple of linear_num_value_heads, which is 6"),
        ({"ssm.group_count": 4}, "4 heads of keys do not divide 6 heads of values"),
        ({"ssm.state_size": 1 << 30}, "expected a size as qwen35.ssm.state_size; found 1073741824"),
        ({"ssm.state_size": 100}, "6 heads do not divide"),
    ],
)
def test_heads_that_do_not_fit(changes, message, checkpoint, tmp_path):
    source, model = checkpoint("qwen3_5_text")
    save(tmp_path / "m.gguf", model, source, format="gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    for key, value in changes.items():
        at = raw.index(f"qwen35.{key}".encode()) + len(f"qwen35.{key}") + 4
        raw = raw[:at] + value.to_bytes(4, "little") + raw[at + 4 :]
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        dict(lm.open_checkpoint(tmp_path / "m.gguf"))
