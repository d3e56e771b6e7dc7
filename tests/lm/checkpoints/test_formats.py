"""Every published format: values bit for bit as the reference libraries give them, round trips, errors."""

import json
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.arrays.quantized import CODECS
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import as_jax, write_tensors
from quaxlike.lm.formats import FORMATS
from quaxlike.lm.formats.format import Format, StoredWeight
from tests.fixtures import fixture
from tests.samples import normal

_FOLDERS = [
    "gptq",
    "awq",
    "compressed_tensors",
    "compressed_tensors_legacy",
    "fp8",
    "mxfp4",
    "hqq",
    "torchao",
    "bnb_int8",
    "mlx",
]
_GGUF = ("floats", "legacy", "kquants", "iq4_mxfp4")
#: Values below the least normal number may be flushed; those of LLM.int8 hold a factor 1/127.
_FLUSHED = 1.2e-38
_LOOSE = {"bnb_int8": 2e-7}
#: Where a compiler may fuse a product and a sum.
_FUSED = ("Q2_K", "Q4_1", "Q4_K", "Q5_1", "Q5_K", "mlx/affine")
#: Formats that share more than a row can say: masks become dense, scales along both axes are spread out.
_LARGER = ("compressed_tensors_legacy/sparse", "hqq/int4_g64_axis0", "compressed_tensors/nvfp4a16")


def _cases():
    for family in _FOLDERS:
        folder = fixture(f"formats/{family}")
        yield from (f"{family}/{case.name}" for case in sorted(folder.iterdir()) if case.is_dir())


def _check(name, weights, references, rtol=0.0):
    assert references
    for key, expected in references.items():
        found = np.asarray(ql.materialise(weights[key if key in weights else f"{key}.weight"]))
        fused = f"{name}/{key}".startswith(_FUSED) or key.startswith(_FUSED)
        largest = np.max(np.abs(expected), where=np.isfinite(expected), initial=0)
        atol = 3e-7 * largest if fused else _FLUSHED
        np.testing.assert_allclose(found.astype(np.float32), expected, rtol, atol, err_msg=f"{name}: {key}")


def _references(family, case):
    arrays = np.load(fixture(f"formats/{family}/io.npz"))
    return {
        key.split("/")[1]: arrays[key]
        for key in arrays
        if key.startswith(case + "/") and key.endswith("/dequant_f32")
    }


# One case of each family.
@pytest.mark.quick(
    *("gptq/w4_g32_act_asym", "awq/gemm_g32", "compressed_tensors/w4a16_group_asym", "mlx/affine_b3"),
    *("compressed_tensors_legacy/sparse24_bitmask", "fp8/small_block", "mxfp4/extreme"),
    *("hqq/int4_g64_axis1", "torchao/intx_int4_g32", "bnb_int8/threshold6"),
)
@pytest.mark.parametrize("name", [*_cases()])
def test_values_are_those_of_the_reference(name):
    family, case = name.split("/")
    folder = fixture(f"formats/{name}")
    weights = lm.read(folder)
    _check(name, weights, _references(family, case), _LOOSE.get(family, 0.0))
    if not name.startswith(_LARGER):
        stored = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
        assert stored <= 1.10 * (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "floats" else pytest.mark.slow) for n in _GGUF]
)
def test_values_of_gguf_are_those_of_the_reference(name):
    checkpoint = lm.open_checkpoint(fixture(f"formats/gguf_tensors/{name}.gguf"))
    assert checkpoint.format == "gguf"
    _check(name, checkpoint, _references("gguf_tensors", name))


def test_metadata_of_gguf():
    metadata = lm.open_checkpoint(fixture("formats/gguf_tensors/floats.gguf")).metadata
    assert metadata["fix.u64"] == 9223372036854775813
    assert metadata["fix.i8"] == -100
    assert metadata["fix.true"] is True
    assert metadata["general.alignment"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq/w4_g32_act_asym", "compressed_tensors_legacy/w4a16_actorder_group"])
def test_columns_out_of_order_multiply_and_slice(name):
    family, case = name.split("/")
    weights = lm.read(fixture(f"formats/{name}"))
    for layer, dense in _references(family, case).items():
        w = weights[layer + ".weight"]
        assert w.order is not None
        n, k = dense.shape
        with ql.on_materialise("error"):
            forward = ql.quaxify(lambda w, x: x @ w.T)(w, normal(3, k))
            backward = ql.quaxify(lambda w, x: x @ w)(w, normal(3, n))
            rows = ql.quaxify(lambda w: w[jnp.array([2, 0])])(w)
            both = ql.quaxify(lambda w: jnp.stack([w, w])[1] @ jnp.ones(k))(w)
        np.testing.assert_allclose(forward, normal(3, k) @ dense.T, atol=1e-4)
        np.testing.assert_allclose(backward, normal(3, n) @ dense, atol=1e-4)
        np.testing.assert_array_equal(rows, dense[[2, 0]])
        np.testing.assert_allclose(both, dense.sum(1), atol=1e-4)


_WRITTEN = {
    "gguf": ("q4_0", "q8_0"),
    "compressed-tensors": (*("int3_block", "uint4_block", "fp8"),),
    "mxfp4": ("mxfp4",),
    "safetensors": ("q3_k", "nvfp4"),
}


def _mapping(codecs):
    w = jnp.asarray(normal(8, 64))
    mapping = {
        f"model.layers.{i}.mlp.up_proj.weight": ql.BlockArray.quantize(w, codec=codec)
        for i, codec in enumerate(codecs)
    }
    return {**mapping, "model.norm.weight": w[0], "lm_head.weight": w.astype(jnp.bfloat16)}


@pytest.mark.quick("mxfp4-folder")
@pytest.mark.parametrize(
    ("format", "file"),
    [
        *(("gguf", "model.gguf"), ("safetensors", "own.safetensors"), ("mxfp4", "folder")),
        *(("compressed-tensors", "own.safetensors"), ("compressed-tensors", "folder")),
    ],
)
def test_what_is_written_is_read_again(tmp_path, format, file):
    path = tmp_path / file
    mapping = _mapping(_WRITTEN[format])
    lm.write(path, mapping, format=format)
    found = lm.read(path)
    assert set(found) == set(mapping)
    for name, value in mapping.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(ql.materialise(found[name]), ql.materialise(value))


def test_rows_of_q_and_k_are_permuted_for_llama_and_back(tmp_path):
    q = jnp.asarray(normal(8, 32))
    mapping = {"model.layers.0.self_attn.q_proj.weight": ql.BlockArray.quantize(q, codec="q8_0")}
    config = {
        **{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 16},
        **{"num_attention_heads": 2, "vocab_size": 10},
    }
    lm.write(tmp_path / "m.gguf", mapping, format="gguf", config=config)
    (name,) = mapping
    np.testing.assert_array_equal(
        ql.materialise(lm.read(tmp_path / "m.gguf")[name]), ql.materialise(mapping[name])
    )


def test_the_dtype_that_weights_stand_for():
    weights = lm.read(fixture("formats/gptq/w4_gm1_sym"), dtype=jnp.bfloat16)
    assert {w.dtype for w in weights.values() if ql.is_value(w)} == {jnp.dtype(jnp.bfloat16)}


def _edited(tmp_path, name, **settings):
    folder = tmp_path / "copy"
    shutil.copytree(fixture(f"formats/{name}"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gptq/w4_g128_sym", {"bits": 8}, "qweight': expected int32 of shape"),
        ("gptq/w4_g128_sym", {"bits": "four"}, "an integer|one of 2, 3, 4, 8; found 'four'"),
        ("gptq/w4_g128_sym", {"group_size": 64}, "qzeros': expected int32 of shape"),
        ("gptq/w4_g128_sym", {"group_size": 10**30}, r"must be positive, below 2\*\*31"),
        ("gptq/w4_g32_act_asym", {"desc_act": False}, "g_idx': the columns are not in order"),
        ("gptq/w4_g128_sym", {"checkpoint_format": "marlin"}, "gptq and gptq_v2 can be read; found 'marlin'"),
        ("gptq/w4_g128_sym", {"dynamic": {"-:.*q_proj": {}}}, "q_proj.qweight': is there, though `dynamic`"),
        ("awq/gemm_g64", {"version": "marlin"}, "gemm and gemv can be read; found 'marlin'"),
        ("awq/gemm_g64", {"group_size": 0}, "must be positive"),
        ("fp8/deepseek_block_f32", {"weight_block_size": [128, 0]}, "expected two positive sizes"),
        ("fp8/deepseek_block_f32", {"weight_block_size": [64, 64]}, "weight_scale_inv': expected"),
        ("compressed_tensors/w4a16_group_sym", {"format": "marlin-24"}, "must be one of pack-quantized"),
        ("hqq/int4_g64_axis1", {"quant_method": "aqlm"}, "can be read; found 'aqlm'"),
    ],
)
def test_inconsistent_configurations_are_refused(tmp_path, name, settings, message):
    with pytest.raises(CheckpointError, match=message):
        lm.read(_edited(tmp_path, name, **settings))


def test_tiles_that_reach_far_beyond_the_weight(tmp_path):
    ((name, expected),) = lm.read(fixture("formats/fp8/ue8m0_f32")).items()  # one tile of 128 rows
    start = time.thread_time()
    found = lm.read(_edited(tmp_path, "fp8/ue8m0_f32", weight_block_size=[2**40, 128]))[name]
    assert time.thread_time() - start < 5
    np.testing.assert_array_equal(ql.materialise(found), ql.materialise(expected))


@pytest.mark.quick("<lambda>-gguf-NF4Array has no place in the file: merge adapters")
@pytest.mark.parametrize(
    ("value", "format", "message"),
    [
        (lambda w: ql.NF4Array.quantize(w), "gguf", "NF4Array has no place in the file: merge adapters"),
        (lambda w: ql.BlockArray.quantize(w, codec="q4_k"), "compressed-tensors", "has no place in the file"),
        (lambda w: ql.BlockArray.quantize(w, codec="q4_k"), "mxfp4", "is not an array of the codec mxfp4"),
        (lambda w: w.astype(jnp.int32), "gguf", "bfloat16 can be written; found int32"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(tmp_path, value, format, message):
    with pytest.raises(CheckpointError, match=message):
        lm.write(tmp_path / "x", {"a.weight": value(jnp.asarray(normal(4, 64)))}, format=format)
    with pytest.raises(ValueError, match="that can be written are gguf, "):
        lm.write(tmp_path / "x", {}, format="onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.quick("legacy.gguf")
@pytest.mark.parametrize("name", ["legacy.gguf", "floats.gguf"])
def test_damaged_gguf_files_are_refused(tmp_path, name):
    raw = fixture(f"formats/gguf_tensors/{name}").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for i in range(60):
        damaged = bytearray(raw)
        at = int(rng.integers(len(raw) if i % 3 else 300))
        damaged[at] = int(rng.integers(256))
        path = tmp_path / "damaged.gguf"
        path.write_bytes(bytes(damaged) if i % 5 else bytes(damaged[:at]))
        try:
            lm.read(path)
        except CheckpointError:
            refused += 1
    assert refused > 8


def test_codecs_are_known():
    assert set(_WRITTEN["mxfp4"]) <= set(CODECS)


def _halved(tensors, settings):
    """The weights of a made-up format: a tensor `….half`, to be doubled."""
    return {
        name.replace(".half", ".weight"): StoredWeight((name,), lambda name=name: 2 * as_jax(tensors[name]))
        for name in tensors
        if name.endswith(".half")
    }


@pytest.fixture
def halved():
    record = Format(
        ("halved",), _halved, codes=(".double",), by_rows=True,
        write=lambda path, mapping: (
            {name.replace(".weight", ".half"): np.asarray(x) / 2 for name, x in mapping.items()},
            {"quant_method": "halved"},
        ),
    )  # fmt: skip
    FORMATS.append(record)
    yield
    FORMATS.remove(record)


@pytest.mark.usefixtures("halved")
def test_a_format_is_one_record(tmp_path):
    """It is read, whole and by rows, and written; a part of a weight is no weight."""
    w = jnp.arange(12.0).reshape(4, 3)
    lm.write(tmp_path, {"a.weight": w}, "halved")
    checkpoint = lm.open_checkpoint(tmp_path)
    assert checkpoint.format == "halved"
    np.testing.assert_array_equal(checkpoint["a.weight"], w)
    np.testing.assert_array_equal(checkpoint.rows("a.weight").read(1, 3), w[1:3])
    write_tensors(tmp_path / "model.safetensors", {"a.double": np.ones(2)}, {})
    with pytest.raises(CheckpointError, match="belongs to no weight of the format 'halved'"):
        lm.read(tmp_path)
