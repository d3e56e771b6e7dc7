"""Whole checkpoints of every published format: the logits of transformers, and the dtypes of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from tests.fixtures import fixture
from tests.lm.models.fixtures import agree

_CASES = [
    "gptq_llama", "gptq_v2_qwen2", "awq_qwen2", "fp8_block_llama", "fp8_block_ragged_qwen2",
    "ct_w4a16_asym_llama", "ct_w4a16_sym_qwen2", "ct_fp8_channel_llama", "ct_nvfp4a16_llama",
    "bnb_int8_llama", "mxfp4_gpt_oss", "mlx_llama",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "gptq_v2_qwen2" else pytest.param(n, marks=pytest.mark.slow) for n in _CASES]
)
def test_logits(name):
    """In float32, and close to them in the dtype of the weights."""
    z = np.load(fixture("formats/whole/io.npz"))
    ids, seen = z[f"{name}/input_ids"], z[f"{name}/attention_mask"].astype(bool)
    model, config = ql.lm.load(fixture(f"formats/whole/{name}"))
    dtype = config.get("dtype") or config.get("torch_dtype")
    assert {str(x.dtype) for x in jax.tree.leaves(model, is_leaf=ql.is_value)} <= {dtype, "float32"}
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), model, is_leaf=ql.is_value)
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))
    with ql.on_materialise("error"):
        agree(run(wide)[seen], z[f"{name}/logits_f32"][seen])
        agree(run(model).astype(jnp.float32)[seen], z[f"{name}/logits_f32"][seen], 0.25)
