"""PEFT's adapters of today's models: experts, tied embeddings, trained tokens."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.interop import CheckpointError, peft
from quaxlike.interop.tensors import open_tensors
from quaxlike.models import load
from quaxlike.surgery.trees import named_arrays
from tests.fixtures import fixture
from tests.models.fixtures import agree, expected, folder

EXPERTS = ["qwen3_moe/all_linear", "qwen3_moe/experts_down_only_rslora", "gpt_oss/experts_rslora"]
EMBEDDINGS = [
    "qwen2/embed_lora", "qwen2/embed_lora_tied", "qwen2/modules_to_save_embed",
    "qwen2/modules_to_save_embed_tied", "qwen2/trainable_tokens", "gemma3/embed_lora",
]  # fmt: skip
QUICK = [EXPERTS[1], EMBEDDINGS[1]]


def adapter(case):
    name, _, adapter = case.partition("/")
    return fixture(f"models/{name}/adapters/{adapter}")


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in EXPERTS + EMBEDDINGS],
)
def test_logits_are_those_of_peft_and_survive_saving(case, tmp_path):
    name, _, which = case.partition("/")
    z, wanted = expected(name), expected(name, "peft.npz")
    base, _ = load(folder(name))
    model = peft.load_adapter(adapter(case), base)
    run = jax.jit(lambda model, ids, seen: jax.vmap(ql.quaxify(model))(ids, seen))
    with ql.on_materialise("error"):
        out = run(model, z["input_ids"], z["attention_mask"].astype(bool))
    agree(out[z["valid"]], wanted[f"{which}/logits"][z["valid"]])

    merged, before = named_arrays(ql.merge(model)), named_arrays(base)
    for key in wanted:
        if key.startswith(f"{which}/merged_weight::"):
            weight = key.partition("::")[2]
            agree(merged[weight], wanted[key], 1e-6)
            assert not np.array_equal(merged[weight], before[weight])

    peft.save_adapter(tmp_path, model, base_model="base", task_type="CAUSAL_LM")
    again = peft.load_adapter(tmp_path, base)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


@pytest.mark.parametrize("case", [*EXPERTS[1:], "qwen2/trainable_tokens"])
def test_files_are_those_of_peft(case, tmp_path):
    base, _ = load(folder(case.partition("/")[0]))
    peft.save_adapter(tmp_path, peft.load_adapter(adapter(case), base))
    file = "adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (adapter(case) / file).read_bytes()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    if case == "qwen2/trainable_tokens":
        assert config["trainable_token_indices"] == [5, 17, 40]
        return
    assert config["target_modules"] is None
    assert all(".mlp.experts." in name for name in config["target_parameters"])


def test_all_linear_layers_and_experts(tmp_path):
    base, _ = load(folder("gpt_oss"), quantize="nf4")
    model = ql.loraify(base, rank=2, init="gaussian", key=jax.random.key(0))
    adapted = {name for name, leaf in named_arrays(model).items() if isinstance(leaf, ql.LoraArray)}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj"} <= adapted
    peft.save_adapter(tmp_path, model)
    again = peft.load_adapter(tmp_path, base)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


def test_a_tied_head_is_in_the_file_too(tmp_path):
    base, _ = load(folder("qwen2"))
    model = ql.loraify(base, rank=2, where=["embed_tokens"], init="gaussian", key=jax.random.key(0))
    peft.save_adapter(tmp_path, model)
    stored = open_tensors(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model."
    np.testing.assert_array_equal(
        stored[f"{prefix}lm_head.lora_B.weight"], stored[f"{prefix}model.embed_tokens.lora_embedding_A"].T
    )
    assert json.loads((tmp_path / "adapter_config.json").read_text())["ensure_weight_tying"] is True


def test_experts_that_differ_in_shape(tmp_path):
    model, _ = load(folder("qwen3_moe"))
    where = lambda model: model.model.layers[0].mlp.experts.down_proj
    model = eqx.tree_at(where, model, jnp.zeros((8, 48, 20)))
    with pytest.raises(CheckpointError, match=r"expected shape \(24, 20\); found \(24, 24\)"):
        peft.load_adapter(adapter(EXPERTS[1]), model)
