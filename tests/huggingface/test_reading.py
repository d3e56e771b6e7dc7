"""Checkpoints and adapters that quaxlike writes, read by transformers and PEFT."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.interop import peft
from quaxlike.models import load, save
from tests.models.fixtures import MODELS, adapter, agree, expected, folder, has_adapter, of_peft

pytestmark = [pytest.mark.huggingface, pytest.mark.filterwarnings("ignore")]
ADAPTERS = [
    *(
        "qwen3_moe/all_linear",
        "gpt_oss/experts_rslora",
        "mixtral/legacy_per_expert",
        "qwen2/trainable_tokens",
    ),
    *("gemma3/embed_lora", "qwen3/all_linear_rslora", "phi3/fused"),
]


def theirs(directory, z, adapter=None):
    """The logits of transformers, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
    mask = torch.tensor(z["attention_mask"])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        ids = torch.tensor(z["input_ids"])
        return model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.numpy()[z["valid"]]


@pytest.mark.parametrize("name", [name for name in MODELS if "mxfp4" not in name])
def test_a_merged_model_has_the_logits_of_transformers(name, tmp_path):
    z = expected(name)
    base, _ = load(folder(name))
    adapted = ql.loraify(base, rank=2, key=jax.random.key(0))
    move = lambda x: x.replace(b=x.b + 0.05) if isinstance(x, ql.LoraArray) else x
    merged = ql.merge(jax.tree.map(move, adapted, is_leaf=ql.is_value))
    save(tmp_path, merged, folder(name))
    run = jax.jit(lambda model: jax.vmap(model)(z["input_ids"], z["attention_mask"].astype(bool)))
    ours = np.asarray(run(merged))[z["valid"]]
    assert np.abs(ours - z["logits"][z["valid"]]).max() > 0.01
    agree(theirs(tmp_path, z), ours, 5e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model, _ = load(folder("qwen3"))
    save(tmp_path, jax.tree.map(lambda x: x.astype(dtype), model), folder("qwen3"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    weight = read.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == getattr(torch, dtype)
    wanted = model.model.layers[0].mlp.up_proj.weight.astype(dtype).astype(jnp.float32)
    np.testing.assert_array_equal(weight.detach().float().numpy(), wanted)


@pytest.mark.parametrize("case", [case for case in ADAPTERS if has_adapter(case)])
def test_adapters_have_the_logits_of_peft(case, tmp_path):
    """Routers, stacks of experts and trained tokens among them, in the files that we write."""
    name, _, which = case.partition("/")
    base, _ = load(folder(name))
    model = peft.load_adapter(adapter(case), base)
    peft.save_adapter(tmp_path, model, base_model="base", task_type="CAUSAL_LM")
    z = expected(name)
    wanted = of_peft(case)[f"{which}/logits"][z["valid"]]
    agree(theirs(folder(name), z, adapter=tmp_path), wanted, 2e-4)
