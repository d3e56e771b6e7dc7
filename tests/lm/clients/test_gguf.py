"""The package gguf on the files that quaxlike writes."""

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from tests.lm.clients.suite import client
from tests.samples import normal

pytestmark = client("gguf")

_W = jnp.asarray(normal(64, 128))


@pytest.mark.parametrize("codec", ["q8_0", "q4_0"])
def test_names_and_weights(codec, compare, tmp_path):
    import gguf

    weights = {
        "model.layers.0.mlp.up_proj.weight": ql.BlockArray.quantize(_W, codec=codec),
        "model.norm.weight": _W[0],
        "lm_head.weight": _W.astype(jnp.float16),
    }
    config = {
        **{"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 64},
        **{"num_attention_heads": 2, "vocab_size": 64},
    }
    lm.write(tmp_path / "model.gguf", weights, format="gguf", config=config)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert reader.fields["llama.block_count"].contents() == 1
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    read = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, w in weights.items():
        found = read[names.get_name(name.removesuffix(".weight")) + ".weight"]
        wanted = np.asarray(ql.materialise(w), np.float32)
        compare("gguf", f"GGUF {codec}", "llama", "names and weights", found, wanted)
