"""Every boolean and number of each family's `config.json`, set to another value: quaxlike computes what
transformers does, and llama.cpp too on the file that is written; or the value is refused, and nothing is
written."""

import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import quaxlike as ql
from quaxlike.files import CheckpointError
from quaxlike.lm import load, save
from quaxlike.lm.folders.model_config import UnsupportedConfigError
from quaxlike.lm.models import DecoderConfig
from tests.lm.clients.suite import client, logits_of_llama_cpp, logits_of_transformers
from tests.lm.models.made import byte_level

pytestmark = [*client("torch", "transformers", "llama_cpp"), pytest.mark.timeout(3600)]

_SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "full_attention_interval": 2,
}  # fmt: skip
_UPPER = {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 2}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
#: What a family has beside, and in place of, what transformers writes by default.
FAMILIES = {
    "llama": {"rope_parameters": _LLAMA3},
    "mistral": {
        "sliding_window": None,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
    "qwen2": {**_UPPER, "rope_parameters": _YARN},
    "qwen3": _UPPER,
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "gemma4_text": {
        "num_kv_shared_layers": 2, "layer_types": 2 * ["sliding_attention", "full_attention"],
        "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 4,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320, "tie_word_embeddings": True,
        "use_double_wide_mlp": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "phi3": {"original_max_position_embeddings": 64, "sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {**_EXPERTS, **_UPPER, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True, "use_sliding_window": False, "sliding_window": 4},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
        "rope_parameters": {**_YARN, "truncate": True},
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "granite": {},
    "qwen3_next": {**_EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    "qwen3_5_text": _DELTA_NET,
    "smollm3": {"use_sliding_window": False, "sliding_window": 4},
    "ministral3": {
        "sliding_window": None,
        "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    },
}  # fmt: skip
# Derived from others where they are absent, as in files of transformers 4.
_DERIVED = ("layer_types", "no_rope_layers", "per_layer_config")
#: Entries that files of some families have, and those of others might.
MORE = {
    "attention_bias": True, "mlp_bias": True, "qkv_bias": False, "partial_rotary_factor": 0.5,
    "use_sliding_window": True, "sliding_window": 3, "use_qk_norm": True, "attn_logit_softcapping": 0.7,
    "final_logit_softcapping": 0.7, "residual_multiplier": 0.5, "norm_topk_prob": False,
    "sliding_window_pattern": 3,
}  # fmt: skip
_OTHERS = {
    "num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 3, "rms_norm_eps": 0.1,
    "num_experts_per_tok": 1, "rope_theta": 100.0, "vocab_size": 352, "sliding_window": 3,
    "num_kv_shared_layers": 0, "num_global_key_value_heads": 4,
}  # fmt: skip


def _other(name, value):
    if isinstance(value, bool):
        return not value
    if name in _OTHERS:
        return _OTHERS[name]
    if name.endswith("token_id"):
        return 5
    return value / 2 if isinstance(value, float) and value else 2 * value or 1


def _variants(config):
    """Configurations that differ from this one in an entry, by its name."""
    numbers = {name: x for name, x in config.items() if isinstance(x, bool | int | float)}
    changed = {name: {name: _other(name, x)} for name, x in numbers.items()}
    changed |= {f"{name} null": {name: None} for name in numbers if name.endswith("softcapping")}
    changed |= {name: {name: x} for name, x in MORE.items() if name not in changed}
    if "global_head_dim" in config:  # newer files say this by layer, with or without the kinds of layers
        last = {"per_layer_config": {"3": {"head_dim": 32, "num_key_value_heads": 4}}, "layer_types": None}
        sizes = {"head_dim": 64, "num_key_value_heads": 4}
        both = {"per_layer_config": {"1": sizes, "3": sizes}}
        changed |= {"per_layer_config": both, "per_layer_config alone": {**last, "num_kv_shared_layers": 0}}
    rope = config["rope_parameters"]
    for entry in [*rope, "partial_rotary_factor"]:
        if isinstance(rope.get(entry, 1.0), dict):
            for inner, x in rope[entry].items():
                if isinstance(x, bool | int | float):
                    part = {**rope[entry], inner: _other(inner, x)}
                    changed[f"{entry}, {inner}"] = {"rope_parameters": {**rope, entry: part}}
        elif isinstance(rope.get(entry, 1.0), bool | int | float):
            part = {**rope, entry: _other(entry, rope.get(entry, 1.0))}
            changed[f"rope_parameters, {entry}"] = {"rope_parameters": part}
    return {"as it is": config} | {name: config | change for name, change in changed.items()}


def _config(name):
    """The entries that transformers writes of a small model of this family."""
    from transformers import AutoConfig

    written = AutoConfig.for_model(name, **{**_SIZES, **FAMILIES[name]}).to_dict()
    wanted = {key: x for key, x in written.items() if isinstance(x, bool | int | float | dict)}
    dropped = ("id2label", "label2id", *_DERIVED)
    config = {key: x for key, x in wanted.items() if key not in dropped}
    named = {
        "model_type": name,
        "architectures": _ARCHITECTURES[name],
        "hidden_act": written.get("hidden_act"),
    }
    named |= {"hidden_activation": written["hidden_activation"]} if "hidden_activation" in written else {}
    return config | FAMILIES[name] | {key: x for key, x in named.items() if x is not None}


_ARCHITECTURES = {
    name: [f"{kind}ForCausalLM"]
    for name, kind in {
        "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2",
        "gemma3_text": "Gemma3", "gemma4_text": "Gemma4", "phi3": "Phi3", "mixtral": "Mixtral",
        "qwen2_moe": "Qwen2Moe",
        "qwen3_moe": "Qwen3Moe", "gpt_oss": "GptOss", "olmo2": "Olmo2", "olmo3": "Olmo3",
        "granite": "Granite", "qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5",
        "smollm3": "SmolLM3", "ministral3": "Ministral3",
    }.items()
}  # fmt: skip
_IDS = np.random.default_rng(0).integers(3, 290, (1, 24)).astype(np.int32)


def _by_transformers(folder):
    """A random model of a configuration, whose weights are written beside it, and its logits; an error if
    transformers has no such model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    large = 0.3 if "Gemma" in type(model).__name__ else 1.0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape)
            if weight.ndim == 1 or "bias" in name or "sinks" in name:
                weight += 0.2 * noise
            else:
                inner = (
                    weight.shape[-2]
                    if "experts" in name and "GptOss" in type(model).__name__
                    else weight.shape[-1]
                )
                weight.copy_(noise * (large if "embed" in name else 1.5 * inner**-0.5))
    model.save_pretrained(folder / "written")
    (folder / "written" / "model.safetensors").rename(folder / "model.safetensors")
    return logits_of_transformers(model, _IDS, np.ones_like(_IDS, bool))[0]


@eqx.filter_jit
def _run(model):
    return ql.quaxify(model)(jnp.asarray(_IDS[0]), jnp.ones(_IDS.shape[1], bool))


def _apart(found, wanted, atol):
    return "" if np.allclose(found, wanted, atol=atol, rtol=1e-3) else f"{np.abs(found - wanted).max():.2g}"


@pytest.mark.parametrize("name", FAMILIES)
def test_every_value_is_computed_or_refused(name, compare, tmp_path):
    atol, plain, problems, refusals = (2e-2 if name.startswith("gemma") else 2e-3), None, [], []
    variants = _variants(_config(name))
    for number, (what, config) in enumerate(variants.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        byte_level(290).save(str(folder / "tokenizer.json"))
        try:
            wanted = _by_transformers(folder)
        except Exception as error:  # of many kinds
            refusals.append(f"{what}: not of transformers, {type(error).__name__}: {error}")
            continue
        try:
            model, _ = load(folder)
        except (CheckpointError, UnsupportedConfigError) as error:
            refusals.append(f"{what}: {error}")
            continue
        plain = plain or (model.config, wanted)
        if number and model.config == plain[0] and np.array_equal(wanted, plain[1]):
            continue  # without effect in both
        if apart := _apart(np.asarray(_run(model)), wanted, 1e-3):
            problems.append(f"{what}: apart from transformers by {apart}")
            continue
        try:
            save(folder / "m.gguf", model, folder, format="gguf")
        except CheckpointError as error:
            refusals.append(f"{what}: {error}")
            assert not (folder / "m.gguf").exists()
            continue
        try:
            found = logits_of_llama_cpp(folder / "m.gguf", _IDS[0])
        except ValueError as error:
            problems.append(f"{what}: llama.cpp does not read it: {error}")
            continue
        if apart := _apart(found, wanted, atol):
            problems.append(f"{what}: llama.cpp is apart from transformers by {apart}")
    print(*refusals, sep="\n")
    assert not any(x.startswith("as it is") for x in refusals), refusals[0]
    assert not problems, "\n".join(problems)
    for program, form in (("transformers", "safetensors"), ("llama.cpp", "GGUF f32")):
        compare(program, form, name, "every value of config.json", 0, 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_entries_have_the_value_that_transformers_gives_them(name):
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": 4, "vocab_size": 320, "pad_token_id": 0}
    written = AutoConfig.for_model(name, **sizes).to_dict() | {"architectures": _ARCHITECTURES[name]}
    whole = DecoderConfig.from_json(written)
    for entry in ("rms_norm_eps", "rope_parameters", "num_experts_per_tok", "max_position_embeddings"):
        rest = {key: x for key, x in written.items() if key != entry}
        assert DecoderConfig.from_json(rest) == whole, entry
