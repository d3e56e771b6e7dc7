"""Checkpoints with tokenisers, made from the configurations of fixtures."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from quaxlike import lm
from quaxlike.lm.gguf.tokenizer import PATTERNS
from quaxlike.surgery.trees import named_arrays, replace
from tests.lm.models.fixtures import folder
from tests.samples import drawn, random_key

_YARN = {"rope_type": "yarn", "rope_theta": 15e4, "factor": 8.0, "original_max_position_embeddings": 32}
# What the fixtures have that GGUF cannot say.
HELD = {
    "qwen3": {"use_sliding_window": False},
    "gemma3": {"query_pre_attn_scalar": 16},
    "gpt_oss": {"swiglu_limit": 7.0, "rope_parameters": _YARN},
    "qwen3_moe": {
        "use_sliding_window": False,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
}

# Architectures without a fixture: one that is like theirs, and what differs.
LIKE = {
    "olmo3": (
        "olmo2",
        {
            "architectures": ["Olmo3ForCausalLM"], "sliding_window": 4, "rope_parameters": {
                "full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 15e4},
            },
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "smollm3": ("llama_llama3", {
        "architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5, "rope_parameters": _YARN,
    }),
    "granite": (
        "llama_llama3",
        {
            "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 1.5, "residual_multiplier": 0.8,
            "attention_multiplier": 0.3, "logits_scaling": 0.7, "attention_bias": True,
            "rope_parameters": _YARN,
        },
    ),
    "ministral3": (
        "llama_llama3",
        {
            "architectures": ["Ministral3ForCausalLM"], "rope_theta": 1e4,  # that of `rope_parameters` counts
            "rope_parameters": {
                **_YARN, "beta_fast": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
            },
        },
    ),
}  # fmt: skip

_HYBRID = {
    "full_attention_interval": 2, "num_hidden_layers": 3, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_conv_kernel_dim": 3, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
for kind, name, more in (
    ("qwen3_5_text", "Qwen3_5ForCausalLM", {}),
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _EXPERTS),
    ("qwen3_next", "Qwen3NextForCausalLM", _EXPERTS),
):
    LIKE[kind] = "qwen3", {"architectures": [name], "layer_types": None, **_HYBRID, **more}

_ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 3e4, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LIKE["gemma4_text"] = (
    "gemma3",
    {
        "architectures": ["Gemma4ForCausalLM"], "num_hidden_layers": 5, "num_kv_shared_layers": 3,
        "layer_types": [f"{kind}_attention" for kind in 2 * ["sliding", "full"] + ["full"]],
        "use_double_wide_mlp": True, "head_dim": 8, "global_head_dim": 32, "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 293, "rope_parameters": _ROPES, "rope_theta": None,
        "rope_local_base_freq": None, "sliding_window_pattern": None, "query_pre_attn_scalar": None,
        "use_bidirectional_attention": None,
    },
)  # fmt: skip

TEXTS = ["the cat sat on the mat, 12345 times", "  Don't   stop\n\n now", "<|im_start|>user\nHé<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def byte_level(size, pre="qwen2"):
    """A tokeniser like those of Qwen and Llama 3, of this many tokens."""
    tokenizer = Tokenizer(models.BPE())
    (pattern,) = PATTERNS[pre]
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece(size):
    """A tokeniser like Gemma's: spaces are marks, characters beyond the vocabulary bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = described["added_tokens"][:4]
    # Every pair of tokens that make a third is merged, as in conversions from SentencePiece's scores.
    vocab, made = described["model"]["vocab"], [a + b for a, b in described["model"]["merges"]]
    described["model"]["merges"] = [
        [text[:cut], text[cut:]]
        for text in made
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]
    described["post_processor"] = json.loads(
        processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)]).__getstate__()
    )
    return Tokenizer.from_str(json.dumps(described))


def checkpoint(out, name, tokenizer=None, **changes):
    """Writes a random model of a fixture's architecture, which GGUF can hold, with a tokeniser, and with
    changes to its configuration; returns the model."""
    out.mkdir(parents=True)
    tokenizer = tokenizer or byte_level(290)
    size = tokenizer.get_vocab_size() + 3  # rows without a token
    like, own = LIKE.get(name, (name, {}))
    config = json.loads((folder(like) / "config.json").read_text()) | HELD.get(name, {}) | own
    config |= {"model_type": name} if own else {}
    config |= {"vocab_size": size, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0} | changes
    model = drawn(lm.models.Decoder, lm.models.DecoderConfig.from_json(config), key=random_key())
    # Norms are near 1, so that every layer matters.
    norms = {name: leaf + 1 for name, leaf in named_arrays(model).items() if "norm" in name}
    model = replace(model, norms)
    (out / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(out / "tokenizer.json"))
    is_chat = "<|im_end|>" in tokenizer.get_vocab()
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE} if is_chat else {}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    lm.write(out / "model.safetensors", named_arrays(model), format="safetensors")
    return model
