"""4-bit checkpoints: what bitsandbytes wrote is read exactly and written back byte for byte."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import quaxlike as ql
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import bitsandbytes
from tests.fixtures import fixture
from tests.samples import tree_equal

_INDEX = json.loads(fixture("linear4bit/index.json").read_text())["layers"]
_IO = dict(np.load(fixture("linear4bit/io.npz")))
_TOLERANCE = {"float32": 2e-7, "float16": 2e-4, "bfloat16": 2e-3}
_NESTED = fixture("linear4bit/nested_bias.safetensors")


def _io(name, key):
    bits = _IO.get(f"{name}/{key}__bf16bits")
    return _IO[f"{name}/{key}"] if bits is None else bits.view(ml_dtypes.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", _INDEX)
def test_linear_layers(name):
    about = _INDEX[name]
    weights = bitsandbytes.load(fixture(f"linear4bit/{name}.safetensors"))
    w = weights["weight"]
    assert type(w) is {"nf4": ql.NF4Array, "fp4": ql.FP4Array}[about["quant_type"]]
    assert w.shape == tuple(about["quant_state_json"]["shape"])
    expected = _io(name, "weight_dequant")
    dense = np.asarray(w.materialise())
    assert dense.dtype == expected.dtype
    np.testing.assert_array_equal(dense.view(np.uint8), expected.view(np.uint8))
    bias = np.asarray(weights.get("bias", np.zeros(w.shape[0])), np.float64)
    for batch in (1, 5):
        x = jnp.asarray(_io(name, f"x{batch}"))
        with ql.on_materialise("error"):
            y = np.asarray(ql.quaxify(lambda w, x: x @ w.T)(w, x), np.float64) + bias
        reference = _io(name, f"y_ref{batch}")
        error = np.linalg.norm(y - reference) / np.linalg.norm(reference)
        assert error < _TOLERANCE[about["weight_dtype"]]


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", _INDEX)
def test_round_trip_is_byte_identical(name, tmp_path):
    source = fixture(f"linear4bit/{name}.safetensors")
    bitsandbytes.save(tmp_path / "copy.safetensors", bitsandbytes.load(source))
    assert (tmp_path / "copy.safetensors").read_bytes() == source.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["copy.safetensors"]


@pytest.mark.slow
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("cls", [ql.NF4Array, ql.FP4Array])
@pytest.mark.parametrize("shape", [(8, 64), (7, 33), (2, 3, 64)])
def test_what_we_quantise_is_saved_and_loaded(tmp_path, shape, cls, double_quant):
    x = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
    w = cls.quantize(x, double_quant=double_quant)
    path = tmp_path / "w.safetensors"
    bitsandbytes.save(path, {"w": w, "b": np.arange(3)})
    loaded = bitsandbytes.load(path)
    assert tree_equal(loaded["w"], w)
    np.testing.assert_array_equal(loaded["b"], np.arange(3))
    # Another reader of the container agrees.
    stored = safetensors.numpy.load_file(path)
    assert stored["w"].shape == ((x.size + 1) // 2, 1)
    kind = "nf4" if cls is ql.NF4Array else "fp4"
    state = json.loads(bytes(stored[f"w.quant_state.bitsandbytes__{kind}"]))
    assert (state["quant_type"], state["shape"], state["dtype"]) == (kind, list(shape), "bfloat16")


def test_codes_viewed_as_another_dtype(tmp_path):
    w = ql.NF4Array.quantize(jnp.ones((8, 64)))
    path = tmp_path / "w.safetensors"
    bitsandbytes.save(path, {"w": w}, quant_storage=jnp.bfloat16)
    assert open_tensors(path).info["w"].dtype == jnp.bfloat16
    assert tree_equal(bitsandbytes.load(path)["w"], w)
    odd = ql.NF4Array.quantize(jnp.ones((1, 3)))
    with pytest.raises(CheckpointError, match="2 bytes of codes cannot be viewed as float32"):
        bitsandbytes.save(path, {"w": odd}, quant_storage=jnp.float32)


def test_sharded_checkpoints_are_read_one_weight_at_a_time(tmp_path):
    for i, name in enumerate(["plain_nobias", "rowcross_40x24"]):
        tensors = open_tensors(fixture(f"linear4bit/{name}.safetensors"))
        renamed = {f"layers.{i}.{key}": np.array(tensors[key]) for key in tensors}
        write_tensors(tmp_path / f"model-{i}.safetensors", renamed, {"format": "pt"})
    weight_map = {
        key: f"model-{i}.safetensors"
        for i in range(2)
        for key in open_tensors(tmp_path / f"model-{i}.safetensors")
    }
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    weights = bitsandbytes.load(tmp_path)
    assert list(weights) == ["layers.0.weight", "layers.1.bias", "layers.1.weight"]
    single = bitsandbytes.load(fixture("linear4bit/rowcross_40x24.safetensors"))
    assert tree_equal(weights["layers.1.weight"], single["weight"])

    lazy = bitsandbytes.open_checkpoint(index)
    shard = tmp_path / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert lazy["layers.0.weight"].shape == (32, 128)  # is not touched by the other file
    with pytest.raises(CheckpointError, match=r"layers.1.weight.quant_state.* cut short"):
        lazy["layers.1.weight"]


def test_an_index_without_the_companions_of_a_weight(tmp_path):
    shutil.copy(fixture("linear4bit/plain_nobias.safetensors"), tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors"}}))
    with pytest.raises(
        CheckpointError, match=r"'weight\.quant_state.*': is in the files, and the index leaves it out"
    ):
        bitsandbytes.load(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..", "a\\b", "", 3, None])
def test_shards_stay_beside_their_index(tmp_path, file):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="'w': the file must be a plain name beside the index"):
        bitsandbytes.load(tmp_path)


def test_missing_shards(tmp_path):
    shutil.copy(_NESTED, tmp_path / "a.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, message in [
        ({"w": "b.safetensors"}, r"'w': the file 'b.safetensors' is missing"),
        ({"w": "a.safetensors"}, r"'w': is not in the file 'a.safetensors'"),
        ([], r"'weight_map': must map the names of tensors to files"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            bitsandbytes.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="No checkpoint at"):
        bitsandbytes.load(tmp_path / "nowhere.safetensors")
    index.unlink()
    shutil.copy(_NESTED, tmp_path / "b.safetensors")
    with pytest.raises(
        FileNotFoundError, match=r"several \.safetensors .*: a\.safetensors, b\.safetensors\."
    ):
        bitsandbytes.load(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file; found nothing\."):
        bitsandbytes.load(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(FileNotFoundError, match=r"holds no \.safetensors file; found pytorch_model\.bin\."):
        bitsandbytes.load(tmp_path)


def _state(**changes):
    def change(tensors):
        key = "weight.quant_state.bitsandbytes__nf4"
        state = json.loads(tensors[key].tobytes()) | changes
        state = {name: value for name, value in state.items() if value is not None}
        tensors[key] = np.frombuffer(json.dumps(state).encode(), np.uint8)

    return change


def _without(key):
    return lambda tensors: tensors.pop(key)


def _put(key, array):
    return lambda tensors: tensors.update({key: array})


@pytest.mark.quick(17)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("weight"), r"'weight': is missing beside 'weight.quant_state"),
        (_without("weight.absmax"), r"'weight.absmax': is missing beside"),
        (_without("weight.quant_map"), r"'weight.quant_map': is missing beside"),
        (_without("weight.nested_absmax"), r"'weight.nested_absmax': is missing beside"),
        (_without("weight.nested_quant_map"), r"'weight.nested_quant_map': is missing beside"),
        (_without("weight.quant_state.bitsandbytes__nf4"), r"bitsandbytes__nf4': is missing \(or __fp4\)"),
        (_put("weight", np.zeros((3071, 1), np.uint8)), r"expected 3,072 bytes .* found 3,071"),
        (_put("weight", np.zeros((64, 48), np.uint8)), r"in a row or a column .* shape \(64, 48\)"),
        (_put("weight.absmax", np.zeros(96, np.float32)), r"expected uint8 of shape \(96,\).* found float32"),
        (_put("weight.absmax", np.zeros(95, np.uint8)), r"expected uint8 of shape \(96,\).* found .*\(95,\)"),
        (_put("weight.quant_map", np.zeros(16, np.float32)), r"is not the table of nf4"),
        (_put("weight.quant_state.bitsandbytes__nf4", np.zeros(3, np.uint8)), r"is not JSON"),
        (_put("weight.quant_state.bitsandbytes__nf4", np.zeros(3, np.int8)), r"must be bytes, found int8"),
        (
            _put("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b"[]", np.uint8)),
            r"must be a JSON object",
        ),
        (_put("weight.quant_state.bitsandbytes__int2", np.zeros(3, np.uint8)), r"unknown type 'int2'"),
        (_put("weight.quant_state.bitsandbytes__fp4", np.zeros(3, np.uint8)), r"the weight has another one"),
        (_state(blocksize=10**12), r"power of two from 32 to 4096, got 1000000000000"),
        (_state(blocksize=48), r"power of two from 32 to 4096, got 48"),
        (_state(blocksize=True), r"blocksize must be an integer"),
        (_state(blocksize=128), r"'weight.absmax': expected uint8 of shape \(48,\)"),
        (_state(quant_type="fp4"), r"quant_type must be 'nf4', found 'fp4'"),
        (_state(dtype="int7"), r"dtype must be one of float32, float16, bfloat16, found 'int7'"),
        (_state(shape=[96, -64]), r"shape must be a list of positive sizes"),
        (_state(shape=[96, 10**30]), r"shape must be a list of positive sizes"),
        (_state(shape=[96, 65]), r"expected 3,120 bytes"),
        (_state(nested_offset=float("nan")), r"nested_offset must be a finite number"),
        (_state(nested_offset="1"), r"nested_offset must be a finite number"),
        (_state(nested_offset=True), r"nested_offset must be a finite number"),
        (_state(nested_offset=10**400), r"nested_offset must be a finite number"),
        (_state(shape=[1] * 65), r"shape must be a list of positive sizes"),
        (_state(nested_blocksize=128), r"nested in blocks of 256 float32 are supported, found 128"),
        (_state(nested_dtype=None), r"missing or unknown: nested_dtype"),
        (_state(version=2), r"missing or unknown: version"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, message):
    source = open_tensors(_NESTED)
    tensors = {key: np.array(source[key]) for key in source}
    change(tensors)
    path = tmp_path / "bad.safetensors"
    write_tensors(path, tensors, {})
    with pytest.raises(CheckpointError, match=message) as error:
        bitsandbytes.load(path)
    assert str(path) in str(error.value)


def test_what_cannot_be_saved_leaves_no_file(tmp_path):
    path = tmp_path / "w.safetensors"
    w = ql.NF4Array.quantize(jnp.ones((8, 64)))
    stack = jax.vmap(lambda x: ql.NF4Array.quantize(x, double_quant=True))(jnp.ones((2, 8, 64)))
    for values, message in [
        ({"w": ql.quaxify(lambda w: w.T)(w)}, r"'w': the format stores one row-major matrix"),
        ({"w": stack}, r"'w': the format stores one row-major matrix"),
        ({"w": ql.Int8Array.quantize(jnp.ones((8, 64)))}, r"'w': the format has no place for Int8Array"),
        ({"w": w, "w.absmax": jnp.ones(3)}, r"'w.absmax': two entries would have this name"),
        ({"w": np.array(["text"])}, r"'w': the format has no dtype <U4"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            bitsandbytes.save(path, values)
        assert list(tmp_path.iterdir()) == []
