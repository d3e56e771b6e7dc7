"""The packages that others read checkpoints with read what is written here: `pytest -m references`."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import interop
from quaxlike.interop import bitsandbytes
from tests.samples import normal

pytestmark = pytest.mark.references

_W = jnp.asarray(normal(64, 128))
_CODECS = {
    "int4_block": {"block_size": 64},
    "uint4_block": {"block_size": 32},
    "int8_block": {},
    "uint8_block": {"block_size": 64},
    "int3_block": {"block_size": 64},
    "fp8": {},
}


def _block(codec, **options):
    return ql.BlockArray.quantize(_W, codec=codec, **options)


@pytest.mark.parametrize("codec", [*_CODECS, "Int8Array"])
def test_compressed_tensors(codec, tmp_path):
    pytest.importorskip("torch")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    w = ql.Int8Array.quantize(_W) if codec == "Int8Array" else _block(codec, **_CODECS[codec])
    interop.save(tmp_path, {"layer.weight": w}, format="compressed-tensors", config={"model_type": "llama"})
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
    reader = BaseCompressor.get_value_from_registry(group["format"])
    read = reader.decompress(parts, QuantizationScheme(**group))["weight"]
    np.testing.assert_allclose(read.float().numpy(), ql.materialise(w), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("codec", ["q8_0", "q4_0"])
def test_gguf(codec, tmp_path):
    gguf = pytest.importorskip("gguf")
    weights = {
        "model.layers.0.mlp.up_proj.weight": _block(codec),
        "model.norm.weight": _W[0],
        "lm_head.weight": _W.astype(jnp.float16),
    }
    config = {
        **{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 64},
        **{"num_attention_heads": 2, "vocab_size": 64},
    }
    interop.save(tmp_path / "model.gguf", weights, format="gguf", config=config)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["llama.block_count"].contents() == 1
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    read = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, w in weights.items():
        stem = names.get_name(name.removesuffix(".weight"))
        np.testing.assert_array_equal(read[f"{stem}.weight"], np.asarray(ql.materialise(w), np.float32))


def test_safetensors(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    w = ql.NF4Array.quantize(_W)
    bitsandbytes.save(tmp_path / "x.safetensors", {"x": w, "y": _W})
    read = numpy.load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(read["y"], _W)
    np.testing.assert_array_equal(read["x"].reshape(-1), np.asarray(w.codes).reshape(-1))
