"""Layers of bitsandbytes: those that it saves are read, and those that are written it loads."""

import json
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.lm import bitsandbytes
from tests.lm.clients.suite import client
from tests.samples import normal

pytestmark = client("torch", "bitsandbytes")

# Rows are whole blocks of 64. Others, the CPU kernels of bitsandbytes 0.50 decode with wrong scales.
_W, _X = normal(96, 128), normal(5, 128, seed=1)
_ARRAYS = {"nf4": ql.NF4Array, "fp4": ql.FP4Array}


def _forward(w, x):
    with ql.on_materialise("error"):
        return np.asarray(ql.quaxify(lambda w, x: x @ w.T)(w, x), np.float32)


def _theirs(layer, x):
    import torch

    with torch.no_grad():
        return layer(torch.tensor(np.asarray(x))).float().numpy()


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", _ARRAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_4_bit_layers_that_it_saves(dtype, kind, double, compare, tmp_path):
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit
    from safetensors.torch import save_file

    check = partial(compare, "bitsandbytes", f"bitsandbytes {kind.upper()}", "single layers")
    options = {"compute_dtype": torch.float32, "quant_type": kind, "compress_statistics": double}
    layer = Linear4bit(128, 96, bias=False, **options).to(getattr(torch, dtype))
    layer = layer.to("cpu")  # which quantises it
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    w = bitsandbytes.load(tmp_path / "layer.safetensors")["weight"]
    dense = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert str(w.dtype) == dtype
    check("weights", np.asarray(ql.materialise(w), np.float32), dense.float().numpy())
    if dtype == "float32":
        check("products", _forward(w, _X), _theirs(layer.train(), _X), 1e-5)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", _ARRAYS)
def test_4_bit_layers_that_are_written(kind, double, compare, tmp_path):
    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from safetensors.torch import load_file

    check = partial(compare, "bitsandbytes", f"bitsandbytes {kind.upper()}", "single layers")
    w = _ARRAYS[kind].quantize(_W, double_quant=double)
    bitsandbytes.save(tmp_path / "layer.safetensors", {"weight": w})
    tensors = load_file(tmp_path / "layer.safetensors")
    layer = Linear4bit(128, 96, bias=False, compute_dtype=torch.float32, quant_type=kind, device="meta")
    codes = tensors.pop("weight")
    layer.weight = Params4bit.from_prequantized(codes, tensors, device="cpu")
    assert layer.weight.quant_state.nested is double
    check("products", _theirs(layer.train(), _X), _forward(w, _X), 1e-4)  # which are as large as 40
    # In evaluation, it computes in bfloat16 on CPUs that can.
    rounded = np.abs(_theirs(layer.eval(), _X) - _forward(w, _X)).max()
    assert rounded < 2**-7 * np.abs(_X).max() * np.abs(_W).sum(1).max()


def test_layers_of_llm_int8(compare, tmp_path):
    import torch
    from bitsandbytes.functional import int8_vectorwise_dequant
    from bitsandbytes.nn import Int8Params, Linear8bitLt
    from safetensors.torch import save_file

    layer = Linear8bitLt(128, 96, bias=False, has_fp16_weights=False)
    layer.weight = Int8Params(torch.tensor(np.array(_W)), requires_grad=False, has_fp16_weights=False)
    layer = layer.to("cpu")  # which quantises it
    save_file({f"layer.{k}": x for k, x in layer.state_dict().items()}, tmp_path / "model.safetensors")
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    w = lm.read(tmp_path)["layer.weight"]
    assert isinstance(w, ql.Int8Array)
    dense = int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB).numpy()
    form = "bitsandbytes LLM.int8"
    compare("bitsandbytes", form, "single layers", "weights", ql.materialise(w), dense, 1e-6)
    # It rounds activations to 8 bits, too.
    found, wanted = _theirs(layer, _X), _forward(w, jnp.asarray(_X))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)
