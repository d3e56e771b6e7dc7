"""transformers on merged and on quantised models, and quaxlike on the models of transformers."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files.tensors import open_tensors, write_tensors
from quaxlike.lm import generate, load, save
from quaxlike.surgery.trees import named_arrays
from tests.lm.clients.suite import client, logits_of_transformers
from tests.lm.models.fixtures import MODELS, expected, family, folder

pytestmark = client("torch", "transformers")

_SIZES = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_DELTA_NET = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}  # fmt: skip
_GEMMA4 = {
    "num_hidden_layers": 7, "global_head_dim": 32, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "sliding_window": 4,
    "layer_types": [
        *(2 * ["sliding_attention", "full_attention"]), *(2 * ["sliding_attention"]), "full_attention"
    ],
    "final_logit_softcapping": 5.0, "tie_word_embeddings": True,
}  # fmt: skip
CASES = {
    "olmo3": ("Olmo3", {"sliding_window": 4, "rope_scaling": _YARN, "rope_theta": 5e5}),
    "olmo3, all layers alike": ("Olmo3", {"layer_types": ["full_attention"] * 5}),
    "granite": ("Granite", {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625,
        "logits_scaling": 8.0, "rope_theta": 1e4,
    }),
    "granite, tied": ("Granite", {"tie_word_embeddings": True, "attention_bias": True}),
    "smollm3": ("SmolLM3", {"tie_word_embeddings": True}),
    "smollm3, windows": ("SmolLM3", {
        "use_sliding_window": True, "sliding_window": 3, "no_rope_layer_interval": 2,
    }),
    "smollm3, listed": ("SmolLM3", {"no_rope_layers": [1, 0, 0, 1, 1]}),
    "ministral3": ("Ministral3", {"rope_parameters": {
        **_YARN, "rope_theta": 1e6, "original_max_position_embeddings": 5, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
    }}),
    "ministral3, windows": ("Ministral3", {"sliding_window": 4}),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4, experts": ("Gemma4", {
        **_GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16,
    }),
    "gemma4, keys are values": ("Gemma4", {
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "sliding_window": 4, "global_head_dim": 32, "num_hidden_layers": 8,
    }),
    "qwen3_next": ("Qwen3Next", {**_DELTA_NET, **_EXPERTS}),
    "qwen3_next, dense": ("Qwen3Next", {**_DELTA_NET, "num_experts": 0, "full_attention_interval": 2}),
    "qwen3_5": ("Qwen3_5", {**_DELTA_NET, "linear_num_value_heads": 2}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_DELTA_NET, **_EXPERTS}),
}  # fmt: skip


def made(kind, options, folder):
    import torch
    import transformers

    torch.manual_seed(0)
    text = f"{kind}Text" if kind.startswith(("Qwen3_5", "Gemma4")) else kind
    config = getattr(transformers, f"{text}Config")(**{**_SIZES, **options})
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "scale")):
                weight += 0.1 * torch.randn(weight.shape)
            elif name.endswith("A_log"):
                weight -= 3  # so that states last
            else:
                weight *= 3  # so that tokens differ
        for name, number in model.named_buffers():
            if name.endswith("layer_scalar"):
                number += torch.rand(1) - 0.5
    model.save_pretrained(folder)
    return model


def _merged(model):
    """The model with an adapter that is not zero, merged."""
    adapted = ql.loraify(model, rank=2, init="gaussian", key=jax.random.key(0))
    move = lambda x: x.replace(b=x.b + 0.05) if isinstance(x, ql.LoraArray) else x
    return ql.merge(jax.tree.map(move, adapted, is_leaf=ql.is_value))


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens(name, compare, tmp_path):
    """Of models with random weights, that it wrote; and of those that are written back."""
    import torch

    compare = partial(compare, "transformers", "safetensors", name.partition(",")[0])
    kind, options = CASES[name]
    theirs = made(kind, options, tmp_path / "base")
    ids = np.random.default_rng(0).integers(3, 97, (2, 11)).astype(np.int32)
    seen = np.ones((2, 11), bool)
    seen[1, :4] = False
    wanted = logits_of_transformers(theirs, ids, seen)[seen]
    model, _ = load(tmp_path / "base")
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))
    compare("logits", run(model)[seen], wanted, 2e-4)
    if len({*model.config.mixers}) == 1:
        compare("logits", run(model.stacked())[seen], wanted, 2e-4)

    with torch.no_grad():
        tokens = theirs.generate(
            torch.tensor(ids), attention_mask=torch.tensor(seen).long(), max_new_tokens=12, do_sample=False,
            eos_token_id=None,
        )[:, 11:]  # fmt: skip
    compare("greedy tokens", generate(model, ids, mask=seen, max_new_tokens=12), tokens.numpy())

    merged = _merged(model)
    save(tmp_path / "merged", merged, tmp_path / "base")
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == json.loads(
        (tmp_path / "base" / "config.json").read_text()
    )
    again = type(theirs).from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    ours = np.asarray(run(merged)[seen])
    assert np.abs(ours - wanted).max() > 0.01
    compare("logits of merged models", logits_of_transformers(again, ids, seen)[seen], ours, 5e-4)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "gemma4", "gemma4, experts"])
def test_gradients_through_states(name, compare, tmp_path):
    """Of all weights, in texts of several chunks, one of them padded on the left."""
    import torch

    kind, options = CASES[name]
    theirs = made(kind, options, tmp_path)
    ids, seen = np.random.default_rng(0).integers(3, 97, (2, 75)).astype(np.int32), np.ones((2, 75), bool)
    seen[1, :6] = False
    ids[~seen] = 0
    mask = torch.tensor(seen)
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    out = theirs(input_ids=torch.tensor(ids), attention_mask=mask.long(), position_ids=positions).logits
    torch.log_softmax(out, -1)[..., 5][mask].mean().backward()
    model, _ = load(tmp_path)

    def loss(model):
        return jax.nn.log_softmax(jax.vmap(model)(ids, seen))[..., 5].mean(where=seen)

    found = jax.jit(jax.grad(loss))(model)
    wanted = {name: weight.grad.numpy() for name, weight in theirs.named_parameters()}
    for part, gradient in named_arrays(found).items():
        if part.endswith("layer_scalar"):  # not trained
            assert not np.any(gradient)
            continue
        scale = np.abs(wanted[part]).max()
        compare(
            "transformers",
            "safetensors",
            name.partition(",")[0],
            "gradients",
            gradient / scale,
            wanted[part] / scale,
            1e-3,
        )


_ENCODERS = {
    "windows": {"local_attention": 6, "global_attn_every_n_layers": 3},
    "biases": {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "global_attn_every_n_layers": 1},
    "thetas": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 3e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }, "local_attention": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", _ENCODERS)
def test_modern_bert(name, compare, tmp_path):
    """Of texts with padding behind them, and in front; with an adapter, too."""
    import torch
    from transformers import ModernBertConfig, ModernBertModel

    compare = partial(compare, "transformers", "safetensors", "modernbert")
    torch.manual_seed(0)
    sizes = {k: v for k, v in _SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
    theirs = ModernBertModel(ModernBertConfig(**{**sizes, **_ENCODERS[name]})).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    theirs.save_pretrained(tmp_path / "base")
    ids, seen = np.random.default_rng(0).integers(3, 97, (2, 13)).astype(np.int32), np.ones((2, 13), bool)
    seen[0, 10:] = seen[1, :4] = False
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))

    def vectors(model):
        with torch.no_grad():
            mask = torch.tensor(seen).long()
            return model(input_ids=torch.tensor(ids), attention_mask=mask).last_hidden_state.numpy()[seen]

    model, _ = load(tmp_path / "base")
    compare("vectors", run(model)[seen], vectors(theirs), 2e-4)
    merged = _merged(model)
    save(tmp_path / "merged", merged, tmp_path / "base")
    again = ModernBertModel.from_pretrained(tmp_path / "merged").eval()
    compare("vectors of merged models", vectors(again), run(merged)[seen], 5e-4)


TOWERS = {
    "gemma3": ("Gemma3", "SiglipVision", {"query_pre_attn_scalar": 16, "sliding_window": 4}),
    "mistral3": ("Mistral3", "PixtralVision", {"model_type": "mistral", "sliding_window": None}),
    "ministral3": ("Mistral3", "PixtralVision", {"model_type": "ministral3", **CASES["ministral3"][1]}),
    "gemma4": ("Gemma4", "Gemma4Vision", _GEMMA4),
    "qwen3_5": ("Qwen3_5", "Qwen3_5Vision", _DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeVision", {**_DELTA_NET, **_EXPERTS}),
}


def tower_of(name):
    """A random model that reads images as well, and the tokens of texts."""
    import torch
    import transformers

    kind, vision, options = TOWERS[name]
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size = {} if name == "gemma4" else {"image_size": 28}
    seen = getattr(transformers, f"{vision}Config")(**small, **size, patch_size=14)
    kinds = {"mistral": "Mistral", "ministral3": "Ministral3"}
    text = kinds[options["model_type"]] if kind == "Mistral3" else f"{kind}Text"
    sizes = {k: v for k, v in {**_SIZES, **options}.items() if k != "model_type"}
    tied = {"tie_word_embeddings": name.startswith("gemma")}
    config = getattr(transformers, f"{kind}Config")(
        text_config=getattr(transformers, f"{text}Config")(**{**sizes, **tied}), vision_config=seen, **tied
    )
    theirs = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    ids = np.random.default_rng(0).integers(3, 97, (2, 11)).astype(np.int32)
    return theirs, ids, np.ones((2, 11), bool)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", TOWERS)
def test_decoders_of_models_that_read_images(name, legacy, compare, tmp_path):
    """In the names of transformers 5, and in those of published files; written as decoders alone."""
    import torch
    import transformers

    compare = partial(compare, "transformers", "safetensors", name, "logits")
    theirs, ids, seen = tower_of(name)
    theirs.save_pretrained(tmp_path / "base")
    tensors = dict(open_tensors(tmp_path / "base"))
    own, others = "model.language_model.", "language_model.model."
    if legacy:
        own, others = others, own
        tensors = {f"language_model.{n}" if n == "lm_head.weight" else n: x for n, x in tensors.items()}
    else:
        tensors = {n.replace("language_model.lm_head", "lm_head"): x for n, x in tensors.items()}
    tensors = {n.replace(others, own): x for n, x in tensors.items()}
    assert any(n.startswith(own) for n in tensors)
    write_tensors(tmp_path / "base" / "model.safetensors", tensors, {"format": "pt"})
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    model, config = load(tmp_path / "base")
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))
    compare(run(model), wanted, 2e-4)
    save(tmp_path / "text", model, tmp_path / "base")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    assert type(again).__name__ == config["architectures"][0]
    compare(logits_of_transformers(again, ids, seen), wanted, 2e-4)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_towers_tie_by_default(name, compare, tmp_path):
    """What a text's configuration says of its output layer has no effect, as in transformers."""
    import torch
    import transformers

    theirs, ids, seen = tower_of(name)
    theirs.save_pretrained(tmp_path / "base")
    tensors = {n: x for n, x in open_tensors(tmp_path / "base").items() if "lm_head" not in n}
    write_tensors(tmp_path / "base" / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config.pop("tie_word_embeddings", None)
    config["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    theirs = type(theirs).from_pretrained(tmp_path / "base", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = theirs(input_ids=torch.tensor(ids)).logits.numpy()
    model, config = load(tmp_path / "base")
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))
    compare("transformers", "safetensors", name, "logits, tied by default", run(model), wanted, 2e-4)
    assert config["tie_word_embeddings"] is model.config.tie_word_embeddings is True
    save(tmp_path / "text", model, tmp_path / "base")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text", dtype=torch.float32).eval()
    found = logits_of_transformers(again, ids, seen)
    compare("transformers", "safetensors", name, "logits, tied by default", found, wanted, 2e-4)


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma3"])
def test_an_output_layer_beside_a_tied_embedding(kind, compare, tmp_path):
    """transformers does not tie them if their numbers differ, whatever the configuration says."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    text = "Gemma3Text" if kind == "Gemma3" else kind
    torch.manual_seed(0)
    config = getattr(transformers, f"{text}Config")(**{**_SIZES, "tie_word_embeddings": True})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(base)
    tensors = {key: np.asarray(x) for key, x in open_tensors(base).items()}
    tensors["lm_head.weight"] = np.ascontiguousarray(tensors["model.embed_tokens.weight"][::-1])
    write_tensors(base / "model.safetensors", tensors, {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids, seen = np.random.default_rng(0).integers(3, 97, (2, 11)).astype(np.int32), np.ones((2, 11), bool)
    wanted = logits_of_transformers(theirs, ids, seen)
    model, _ = load(base)
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(ids, seen))
    check = partial(compare, "transformers", "safetensors", kind.lower(), "logits")
    check(run(model), wanted, 2e-4)
    save(tmp_path / "out", model, base)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    check(logits_of_transformers(again, ids, seen), wanted, 2e-4)


def _read(folder, **options):
    """The model in float32, as transformers reads it."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": "eager", **options}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


def _run(model, z):
    run = jax.jit(lambda model: jax.vmap(ql.quaxify(model))(z["input_ids"], z["attention_mask"].astype(bool)))
    return np.asarray(run(model))[z["valid"]]


@pytest.mark.parametrize("name", [name for name in MODELS if "mxfp4" not in name])
def test_merged_models(name, compare, tmp_path):
    z = expected(name)
    base, _ = load(folder(name))
    merged = _merged(base)
    save(tmp_path, merged, folder(name))
    ours = _run(merged, z)
    assert np.abs(ours - z["logits"][z["valid"]]).max() > 0.01
    theirs = logits_of_transformers(_read(tmp_path), z["input_ids"], z["attention_mask"])[z["valid"]]
    compare("transformers", "safetensors", family(name), "logits of merged models", theirs, ours, 5e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes(dtype, compare, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    model, _ = load(folder("qwen3"))
    save(tmp_path, jax.tree.map(lambda x: x.astype(dtype), model), folder("qwen3"))
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    weight = read.model.layers[0].mlp.up_proj.weight
    assert weight.dtype == getattr(torch, dtype)
    wanted = model.model.layers[0].mlp.up_proj.weight.astype(dtype).astype(jnp.float32)
    what = "weights in bfloat16 and float16"
    compare("transformers", "safetensors", "qwen3", what, weight.detach().float().numpy(), wanted)


_SCHEMES = {
    "nf4": ("bitsandbytes NF4", {}),
    "nf4, double": ("bitsandbytes NF4", {"double_quant": True}),
    "fp4": ("bitsandbytes FP4", {}),
    "int8": ("compressed-tensors int8", {}),
    "int8_block": ("compressed-tensors packed", {}),
    "int4_block": ("compressed-tensors packed", {}),
    "fp8": ("compressed-tensors FP8", {}),
}
# The CPU kernels of bitsandbytes 0.50 decode only rows that are whole blocks of 64.
_WHOLE_BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
_LINEAR = ["Llama", "Qwen2", "Qwen3"]
_IDS = {
    "input_ids": np.random.default_rng(0).integers(3, 97, (2, 11)).astype(np.int32),
    "attention_mask": np.ones((2, 11), np.int32),
    "valid": np.ones((2, 11), bool),
}


@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("kind", _LINEAR)
def test_quantised_models(kind, scheme, compare, tmp_path):
    """Without asymmetric integers: transformers 5.24 expects their zero points in other shapes than those
    in which compressed-tensors writes them."""
    form, options = _SCHEMES[scheme]
    for package in ("bitsandbytes", "compressed_tensors"):
        pytest.importorskip(package, reason=f"not installed: {package}")
    made(kind, _WHOLE_BLOCKS, tmp_path / "base")
    model, _ = load(tmp_path / "base", quantize={"scheme": scheme.partition(",")[0], **options})
    save(tmp_path / "small", model, tmp_path / "base")
    # In evaluation, bitsandbytes computes in bfloat16 on CPUs that can.
    theirs = _read(tmp_path / "small").train("bitsandbytes" in form)
    logits = logits_of_transformers(theirs, _IDS["input_ids"], _IDS["attention_mask"])[_IDS["valid"]]
    compare("transformers", form, kind.lower(), "logits", logits, _run(model, _IDS), 5e-4)


_SPARSE = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
}


@pytest.mark.parametrize("scheme", ["fp8", "int8_block", "int4_block"])
@pytest.mark.parametrize("name", _SPARSE)
def test_quantised_experts(name, scheme, compare, tmp_path):
    """In the formats of which transformers 5.24 reads experts: no int8, and none of bitsandbytes."""
    pytest.importorskip("compressed_tensors", reason="not installed: compressed_tensors")
    kind, options = _SPARSE[name]
    made(kind, _WHOLE_BLOCKS | options, tmp_path / "base")
    model, _ = load(tmp_path / "base", quantize=scheme)
    save(tmp_path / "small", model, tmp_path / "base")
    theirs = _read(tmp_path / "small")
    logits = logits_of_transformers(theirs, _IDS["input_ids"], _IDS["attention_mask"])[_IDS["valid"]]
    compare("transformers", _SCHEMES[scheme][0], name, "logits", logits, _run(model, _IDS), 5e-4)


_OPTIONS = {
    "nf4": ("bitsandbytes NF4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4, double": (
        "bitsandbytes NF4",
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    ),
    "fp4": ("bitsandbytes FP4", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    "int8": ("bitsandbytes LLM.int8", {"load_in_8bit": True}),
}


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.parametrize("kind", _LINEAR)
def test_models_that_it_quantises(kind, name, compare, tmp_path):
    """LLM.int8 rounds activations, too, where they are not outliers; a threshold of zero has it keep all."""
    import torch

    pytest.importorskip("bitsandbytes", reason="not installed: bitsandbytes")
    from transformers import BitsAndBytesConfig

    form, options = _OPTIONS[name]
    made(kind, _WHOLE_BLOCKS, tmp_path / "base")
    settings = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)
    theirs = _read(tmp_path / "base", quantization_config=settings).train()
    theirs.save_pretrained(tmp_path / "small")
    model, _ = load(tmp_path / "small")
    logits = logits_of_transformers(theirs, _IDS["input_ids"], _IDS["attention_mask"])[_IDS["valid"]]
    compare("transformers", form, kind.lower(), "logits", _run(model, _IDS), logits, 5e-4)


@pytest.mark.skipif("gpt_oss_mxfp4" not in MODELS, reason="of the full collection of reference models")
def test_experts_in_mxfp4(compare, tmp_path):
    import torch
    from transformers import Mxfp4Config

    z, name = expected("gpt_oss_mxfp4"), "gpt_oss_mxfp4"
    model, _ = load(folder(name))
    save(tmp_path, model, folder(name))
    theirs = _read(tmp_path, quantization_config=Mxfp4Config(dequantize=True)).to(torch.float32)
    logits = logits_of_transformers(theirs, z["input_ids"], z["attention_mask"])[z["valid"]]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), model, is_leaf=ql.is_value)
    compare("transformers", "MXFP4", "gpt_oss", "logits", logits, _run(wide, z), 5e-4)
