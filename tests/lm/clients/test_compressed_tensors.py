"""compressed-tensors on the weights that quaxlike writes."""

import json

import jax.numpy as jnp
import pytest

import quaxlike as ql
from quaxlike import lm
from tests.lm.clients.suite import client
from tests.samples import normal

pytestmark = client("torch", "compressed_tensors")

_W = jnp.asarray(normal(64, 128))
_CODECS = {
    "int4_block": {"block_size": 64},
    "uint4_block": {"block_size": 32},
    "int8_block": {},
    "uint8_block": {"block_size": 64},
    "int3_block": {"block_size": 64},
    "fp8": {},
}


@pytest.mark.parametrize("codec", [*_CODECS, "Int8Array"])
def test_weights(codec, compare, tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from safetensors.torch import load_file

    w = (
        ql.Int8Array.quantize(_W)
        if codec == "Int8Array"
        else ql.BlockArray.quantize(_W, codec=codec, **_CODECS[codec])
    )
    lm.write(tmp_path, {"layer.weight": w}, format="compressed-tensors", config={"model_type": "llama"})
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    (group,) = settings["config_groups"].values()
    tensors = load_file(tmp_path / "model.safetensors")
    parts = {name.removeprefix("layer."): tensor for name, tensor in tensors.items()}
    reader = BaseCompressor.get_value_from_registry(group["format"])
    read = reader.decompress(parts, QuantizationScheme(**group))["weight"].float().numpy()
    form = f"compressed-tensors {group['format']}"
    compare("compressed-tensors", form, "single weights", "weights", read, ql.materialise(w), 1e-6)
