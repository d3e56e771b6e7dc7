"""PEFT's adapters of today's models: experts, tied embeddings, trained tokens."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import load, peft
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.surgery.trees import named_arrays
from tests.lm.models.fixtures import adapter, agree, expected, folder, has_adapter, of_peft
from tests.samples import random_key, tree_equal

_ALL = [
    "qwen3_moe/all_linear", "qwen3_moe/experts", "qwen3_moe/experts_down_only_rslora", "mixtral/experts",
    "mixtral/legacy_per_expert", "gpt_oss/all_linear_and_experts_of_one_layer", "gpt_oss/experts_rslora",
    "qwen2/embed_lora", "qwen2/embed_lora_tied", "qwen2/modules_to_save_embed",
    "qwen2/modules_to_save_embed_tied", "qwen2/trainable_tokens", "gemma3/embed_lora",
    "gemma3/trainable_tokens", "llama_llama3/qv", "qwen3/all_linear_rslora", "phi3/fused",
]  # fmt: skip
#: Most travel with the repository; where the full collection is, the tests run on all of them.
CASES = [case for case in _ALL if has_adapter(case)]
QUICK = ["qwen3_moe/experts_down_only_rslora", "qwen2/embed_lora_tied"]
#: PEFT writes the embedding along, or every adapter of an expert on its own; we do not.
WRITTEN_OTHERWISE = ("embed_lora", "embed_lora_tied", "legacy_per_expert")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_logits_are_those_of_peft_and_survive_saving(case, tmp_path):
    name, _, which = case.partition("/")
    z, wanted = expected(name), of_peft(case)
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


@pytest.mark.quick("qwen3_moe/all_linear")
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith(WRITTEN_OTHERWISE)])
def test_files_are_those_of_peft(case, tmp_path):
    base, _ = load(folder(case.partition("/")[0]))
    peft.save_adapter(tmp_path, peft.load_adapter(adapter(case), base))
    file = "adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (adapter(case) / file).read_bytes()
    found, wanted = (
        json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path, adapter(case))
    )
    tokens = wanted.get("trainable_token_indices")
    assert found["trainable_token_indices"] == (
        tokens["embed_tokens"] if isinstance(tokens, dict) else tokens
    )
    # What is no layer of PyTorch is named as a parameter, in full: stacks of experts and routers.
    for entry in ("target_modules", "target_parameters"):
        short = {name.rpartition(".")[2] for name in wanted.get(entry) or ()}
        assert {name.rpartition(".")[2] for name in found.get(entry) or ()} == short


def test_adapters_of_single_experts(tmp_path):
    """As PEFT wrote them for transformers 4, and for some matrices alone."""
    base, _ = load(folder("mixtral"))
    stack = named_arrays(base)["model.layers.1.mlp.experts.gate_up_proj"]
    layer, size = "model.layers.1.block_sparse_moe.experts.{}.w3", stack.shape[1] // 2
    draw = np.random.default_rng(0).standard_normal
    a, b = (draw((stack.shape[0], *shape)).astype(np.float32) for shape in ((2, stack.shape[2]), (size, 2)))
    tensors = {}
    for i in range(stack.shape[0]):
        head = f"base_model.model.{layer.format(i)}"
        tensors |= {f"{head}.lora_A.weight": a[i], f"{head}.lora_B.weight": b[i]}
    write_tensors(tmp_path / "adapter_model.safetensors", tensors, {})
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 3,
        "target_modules": ["w3"],
        "layers_to_transform": 1,
    }
    write = lambda **more: (tmp_path / "adapter_config.json").write_text(json.dumps(config | more))
    for rslora, scale in ((False, 3 / 2), (True, 3 / 2**0.5)):
        write(use_rslora=rslora)
        lora = named_arrays(peft.load_adapter(tmp_path, base))["model.layers.1.mlp.experts.gate_up_proj"]
        change = np.asarray(ql.materialise(lora) - stack)
        np.testing.assert_allclose(change[:, :size], 0, atol=1e-6)
        np.testing.assert_allclose(change[:, size:], scale * b @ a, atol=1e-4)
    write(target_modules=["w3", "w2"])
    with pytest.raises(CheckpointError, match=r"experts\.0\.w2\.lora_A\.weight.* is missing"):
        peft.load_adapter(tmp_path, base)
    write(target_modules=["w2"])
    with pytest.raises(CheckpointError, match=r"w3\.lora_A\.weight.* target_modules does not name"):
        peft.load_adapter(tmp_path, base)
    write(alpha_pattern={"experts.0.w3": 9})
    with pytest.raises(CheckpointError, match="must have one rank and one alpha"):
        peft.load_adapter(tmp_path, base)


@pytest.mark.slow
def test_modules_do_not_name_stacks_of_experts(tmp_path):
    """PEFT's usual names for Qwen2-MoE: the layers of the shared experts alone, since experts are parameters;
    and with adapters of single experts, as for transformers 4."""
    base, _ = load(folder("qwen2_moe"))
    arrays, names = named_arrays(base), ["gate_proj", "up_proj", "down_proj"]
    draw = np.random.default_rng(0).standard_normal

    def written(layers):
        tensors = {}
        for layer, (out, into) in layers.items():
            tensors[f"base_model.model.{layer}.lora_A.weight"] = draw((2, into)).astype(np.float32)
            tensors[f"base_model.model.{layer}.lora_B.weight"] = draw((out, 2)).astype(np.float32)
        write_tensors(tmp_path / "adapter_model.safetensors", tensors, {})
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": names}
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        model = peft.load_adapter(tmp_path, base)
        return {name for name, leaf in named_arrays(model).items() if isinstance(leaf, ql.LoraArray)}

    layer, experts = "model.layers.{}.mlp.shared_expert.{}.weight", "model.layers.{}.mlp.experts.{}"
    shared = {layer.format(i, name) for i in range(len(base.layers)) for name in names}
    shapes = {name.removesuffix(".weight"): arrays[name].shape for name in shared}
    assert written(shapes) == shared
    for i in range(len(base.layers)):
        count, out, into = arrays[experts.format(i, "down_proj")].shape
        for j in range(count):
            one = experts.format(i, j)
            shapes |= {f"{one}.gate_proj": (into, out), f"{one}.up_proj": (into, out)}
            shapes |= {f"{one}.down_proj": (out, into)}
    stacks = {experts.format(i, x) for i in range(len(base.layers)) for x in ("gate_up_proj", "down_proj")}
    assert written(shapes) == shared | stacks


@pytest.mark.slow
def test_all_linear_layers_and_experts(tmp_path):
    base, _ = load(folder("gpt_oss"), quantize="nf4")
    model = ql.loraify(base, rank=2, init="gaussian", key=jax.random.key(0))
    adapted = {name for name, leaf in named_arrays(model).items() if isinstance(leaf, ql.LoraArray)}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.down_proj"} <= adapted
    peft.save_adapter(tmp_path, model)
    again = peft.load_adapter(tmp_path, base)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"where": ["lm_head"]}, {"where": ["q_proj"], "modules_to_save": ["lm_head"]}]
)
def test_an_adapter_of_a_tied_output_layer(options, tmp_path):
    """The embedding stays as it is, as in PEFT."""
    base, _ = load(folder("qwen2"))
    model = ql.loraify(base, rank=2, init="gaussian", key=jax.random.key(0), **options)
    peft.save_adapter(tmp_path, model)
    assert json.loads((tmp_path / "adapter_config.json").read_text()).get("ensure_weight_tying") is None
    again = peft.load_adapter(tmp_path, base)
    assert again.embedding is base.embedding
    assert jax.tree.structure(again) == jax.tree.structure(model)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


def test_experts_that_differ_in_shape(tmp_path):
    model, _ = load(folder("qwen3_moe"))
    where = lambda model: model.model.layers[0].mlp.experts.down_proj
    model = eqx.tree_at(where, model, jnp.zeros((8, 48, 20)))
    with pytest.raises(CheckpointError, match=r"expected shape \(24, 20\); found \(24, 24\)"):
        peft.load_adapter(adapter(QUICK[0]), model)


@pytest.mark.slow
def test_trained_tokens_of_a_table_that_is_no_layer(tmp_path):
    """Rows of any matrix, whatever its name says of it."""
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    base = {"table.weight": draw(0, 9, 4), "out.weight": draw(1, 3, 4), "up": {"kernel": draw(2, 4, 6)}}
    tokens = {"table": [1, 7], "kernel": [0]}
    where = ["out.weight"]
    model = ql.loraify(base, rank=2, where=where, trainable_token_indices=tokens, key=jax.random.key(3))
    peft.save_adapter(tmp_path, model)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["trainable_token_indices"] == {
        "table": [1, 7],
        "up": [0],
    }
    assert tree_equal(peft.load_adapter(tmp_path, base), model)


_SIZES = {"vocab_size": 20, "num_attention_heads": 2}
_BODIES = {
    "LlamaForCausalLM": ({"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}, "layers.0."),
    "GPT2LMHeadModel": ({"n_embd": 8, "n_layer": 1, "n_head": 2}, "h.0."),
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", _BODIES)
def test_names_of_embedding_models(architecture, tmp_path):
    """PEFT puts an adapter for feature extraction on `AutoModel`, whose names are those of the body alone."""
    sizes, start = _BODIES[architecture]
    config = DecoderConfig.from_json({**_SIZES, **sizes, "architectures": [architecture]})
    base = Decoder(config, key=jax.random.key(0))
    model = ql.loraify(base, rank=2, init="gaussian", key=jax.random.key(1))
    peft.save_adapter(tmp_path, model, task_type="FEATURE_EXTRACTION")
    names = open_tensors(tmp_path / "adapter_model.safetensors")
    assert all(name.startswith(f"base_model.model.{start}") for name in names)
    again = peft.load_adapter(tmp_path, base)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


@pytest.mark.slow
def test_names_of_a_model_of_ones_own(tmp_path):
    """Those that it has, as PEFT keeps the names of a module that it wraps."""
    base = {"model": eqx.nn.MLP(4, 4, 8, depth=1, key=jax.random.key(0))}
    model = ql.loraify(base, rank=2, init="gaussian", key=jax.random.key(1))
    peft.save_adapter(tmp_path, model, task_type="FEATURE_EXTRACTION")
    names = open_tensors(tmp_path / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    again = peft.load_adapter(tmp_path, base)
    assert all(map(np.array_equal, jax.tree.leaves(again), jax.tree.leaves(model)))


_BESIDE = [f"model.layers.1.mlp.shared_expert.{x}_proj" for x in ("down", "gate", "up")]
_DENSE = [f"model.layers.0.mlp.{x}_proj" for x in ("down", "gate", "up")]


_TAKEN = {
    "Qwen3NextForCausalLM": [*_BESIDE, *_DENSE], "Qwen3MoeForCausalLM": _DENSE, "Qwen2MoeForCausalLM": [],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("architecture", _TAKEN)
def test_layers_that_peft_takes_for_experts(architecture, tmp_path):
    """They are parameters in the file: those beside experts, and those of layers without any."""
    sizes = {
        **_SIZES, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4,
        "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4, "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 4, "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    config = DecoderConfig.from_json({**sizes, "architectures": [architecture]})
    base = Decoder(config, key=jax.random.key(0))
    options = {"where": r".*\.mlp\..*", "rank": 2, "key": jax.random.key(1)}
    model = ql.loraify(base, init="gaussian", **options)
    peft.save_adapter(tmp_path, model)
    assert tree_equal(peft.load_adapter(tmp_path, base), model)
    written, layers = json.loads((tmp_path / "adapter_config.json").read_text()), _TAKEN[architecture]
    named = {f"model.layers.1.mlp.experts.{x}_proj" for x in ("down", "gate_up")}
    routers = {"model.layers.1.mlp.gate.weight"}
    assert {*written["target_parameters"]} == named | routers | {f"{x}.weight" for x in layers}
    assert not {*(written["target_modules"] or ())} & {*layers}
    if layers:
        with pytest.raises(
            ValueError, match=r"PEFT has no DoRA for .*mlp\.gate_proj\.weight, which it adapts"
        ):
            peft.save_adapter(tmp_path, ql.loraify(base, dora=True, **options | {"where": _DENSE}))


@pytest.mark.slow
def test_dropout_beside_experts(tmp_path):
    """PEFT has none for parameters, and would not load a file that asks for it."""
    base, _ = load(folder("qwen3_moe"))
    save = lambda where: peft.save_adapter(
        tmp_path, ql.loraify(base, rank=2, dropout=0.1, where=where, key=jax.random.key(0))
    )
    dropout = lambda: json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"]
    with pytest.warns(UserWarning, match=r"no dropout for parameters such as .*experts\.\w+: .*=0"):
        save("all-linear")
    assert dropout() == 0
    save(["q_proj"])
    assert dropout() == 0.1


@pytest.mark.slow
def test_patterns_of_weights_that_are_parameters(tmp_path):
    """PEFT compares them with the name of the weight: `gate.weight` names a router, and `gate` nothing."""
    sizes = {
        **_SIZES, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 2, "head_dim": 4,
        "num_local_experts": 2, "architectures": ["MixtralForCausalLM"],
    }  # fmt: skip
    base = Decoder(DecoderConfig.from_json(sizes), key=jax.random.key(0))
    options = {"rank": 4, "where": ["q_proj", "v_proj", "mlp.gate"], "key": jax.random.key(1)}
    file = tmp_path / "adapter_config.json"
    for layers, written in (("mlp.gate", "gate.weight"), ("0.mlp.gate", "^model.layers.0.mlp.gate.weight")):
        model = ql.loraify(base, **options, alpha_pattern={layers: 64}, rank_pattern={layers: 2})
        peft.save_adapter(tmp_path, model)
        config = json.loads(file.read_text())
        assert config["alpha_pattern"] == {written: 64}
        assert config["rank_pattern"] == {written: 2}
        assert tree_equal(peft.load_adapter(tmp_path, base), model)
    peft.save_adapter(tmp_path, ql.loraify(base, **options, alpha=8))
    for pattern, alpha in (("gate", 8), ("gate.weight", 64), ("weight", 64), ("q_proj.weight", 8)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": {pattern: 64}}))
        found = named_arrays(peft.load_adapter(tmp_path, base))
        assert found["model.layers.1.mlp.gate.weight"].alpha == alpha
        assert found["model.layers.1.self_attn.q_proj.weight"].alpha == 8


class _Block(eqx.Module):
    proj: eqx.nn.Linear


class _Model(eqx.Module):
    block: _Block
    proj: eqx.nn.Linear


def _model_of_two():
    linear = eqx.nn.Linear(8, 8, key=random_key(0))
    return _Model(_Block(linear), linear)


def test_layers_whose_names_end_as_that_of_an_adapted_one(tmp_path):
    """PEFT compares the ends of names, so that the others are excluded."""
    model = _model_of_two()
    adapted = ql.loraify(model.proj, rank=2, where=["weight"], init="gaussian", key=jax.random.key(1))
    one = eqx.tree_at(lambda m: m.proj, model, adapted)
    peft.save_adapter(tmp_path, one)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["target_modules"], config["exclude_modules"]) == (["proj"], ["block.proj"])
    assert tree_equal(peft.load_adapter(tmp_path, model), one)


def test_layers_that_are_excluded_from_all_linear(tmp_path):
    model = _model_of_two()
    adapted = ql.loraify(model, rank=2, where=["block.proj"], key=jax.random.key(1))
    peft.save_adapter(tmp_path, adapted)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text()) | {"target_modules": "all-linear", "exclude_modules": "proj"}
    file.write_text(json.dumps(config))
    assert tree_equal(peft.load_adapter(tmp_path, model), adapted)
