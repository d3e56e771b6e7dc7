"""llama.cpp runs the GGUF files that quaxlike writes: the same tokens of texts, the same logits, and the same
texts."""

import json
import shutil
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import quaxlike as ql
from quaxlike import lm
from quaxlike.lm import generate, load, save
from quaxlike.lm.models import Decoder, DecoderConfig
from quaxlike.lm.text import TextTokenizer
from quaxlike.surgery.trees import named_arrays
from tests.lm.clients.suite import client
from tests.lm.models import made
from tests.lm.models.made import byte_level

pytestmark = [*client("llama_cpp"), pytest.mark.timeout(3600)]  # published vocabularies are large

_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
#: The tokeniser of an architecture, and its configuration; small ones have the published vocabulary.
FAMILIES = {
    "qwen2": ("qwen2_5", {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936}),
    "qwen3": ("qwen3", {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "head_dim": 32}),
    "llama": (
        "llama3_1",
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "rope_theta": 5e5,
            "rope_scaling": _LLAMA3, "tie_word_embeddings": False,
        },
    ),
    "gemma3_text": (
        "gemma3",
        {
            "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "head_dim": 32, "rope_theta": 1e6,
            "query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 7,
        },
    ),
    "gpt_oss": (
        "gptoss",
        {
            "architectures": ["GptOssForCausalLM"], "vocab_size": 200064, "head_dim": 32, "sliding_window": 8,
            "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 15e4, "rope_scaling": _YARN,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip
_WINDOWS = 2 * ["sliding_attention"]
_NO_WINDOW = {"sliding_window": None}
#: The same for llama.cpp's other architectures.
OTHERS = {
    "mistral": ("llama2", {"architectures": ["MistralForCausalLM"], "vocab_size": 32000} | _NO_WINDOW),
    "phi3": ("llama2", {"architectures": ["Phi3ForCausalLM"], "vocab_size": 32064} | _NO_WINDOW),
    "olmo2": ("llama3_1", {"architectures": ["Olmo2ForCausalLM"], "vocab_size": 128256}),
    "gemma2": (
        "gemma3",
        {
            "architectures": ["Gemma2ForCausalLM"], "vocab_size": 262144, "head_dim": 32,
            "query_pre_attn_scalar": 32, "sliding_window": 8,
            "layer_types": ["full_attention", *_WINDOWS],
        },
    ),
    "mixtral": (
        "llama2",
        {
            "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "sliding_window": None,
            "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "qwen2_moe": (
        "qwen2_5",
        {
            "architectures": ["Qwen2MoeForCausalLM"], "vocab_size": 151936, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 96,
        },
    ),
    "qwen3_moe": (
        "qwen3",
        {
            "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "num_experts": 4, "head_dim": 32,
            "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
        },
    ),
    "olmo3": (
        "llama2",
        {
            "architectures": ["Olmo3ForCausalLM"], "vocab_size": 32000, "sliding_window": 8,
            "rope_scaling": _YARN, "layer_types": [*_WINDOWS, "full_attention", *_WINDOWS],
            "num_hidden_layers": 5,
        },
    ),
    "smollm3": (
        "llama2", {"architectures": ["SmolLM3ForCausalLM"], "vocab_size": 32000, "num_hidden_layers": 5},
    ),
    "granite": (
        "llama2",
        {
            "architectures": ["GraniteForCausalLM"], "vocab_size": 32000, "embedding_multiplier": 1.5,
            "residual_multiplier": 0.8, "attention_multiplier": 0.3, "logits_scaling": 0.7,
            "attention_bias": True, "mlp_bias": True,
        },
    ),
    "ministral3": (
        "llama2",
        {
            "architectures": ["Ministral3ForCausalLM"], "vocab_size": 32000, "sliding_window": None,
            "head_dim": 16, "rope_parameters": {
                **_YARN, "rope_theta": 1e6, "beta_slow": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
}  # fmt: skip
_HYBRID = {
    "vocab_size": 32000, "head_dim": 32, "full_attention_interval": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}  # fmt: skip
OTHERS |= {
    "qwen3_5_text": ("llama2", {"architectures": ["Qwen3_5ForCausalLM"], **_HYBRID}),
    "qwen3_5_moe_text": ("llama2", {"architectures": ["Qwen3_5MoeForCausalLM"], **_HYBRID, **_EXPERTS}),
    "qwen3_next": ("llama2", {"architectures": ["Qwen3NextForCausalLM"], **_HYBRID, **_EXPERTS}),
}
_GEMMA4 = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262144, "head_dim": 16, "global_head_dim": 32,
    "sliding_window": 8, "hidden_size_per_layer_input": 32, "num_hidden_layers": 5, "num_kv_shared_layers": 2,
    "layer_types": [*_WINDOWS, "full_attention", _WINDOWS[0], "full_attention"],
    "use_double_wide_mlp": True, "final_logit_softcapping": 5.0,
}  # fmt: skip
OTHERS |= {
    "gemma4_text": ("gemma3", _GEMMA4),
    "gemma4_text, experts": ("llama2", {
        **_GEMMA4, "vocab_size": 32000, "vocab_size_per_layer_input": 32000, "enable_moe_block": True,
        "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64,
    }),
    "gemma4_text, keys are values": ("gemma3", {
        **_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_kv_shared_layers": 0,
        "num_global_key_value_heads": 1,
    }),
}  # fmt: skip
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": True,
}  # fmt: skip
TEXTS = [
    "Hello world", "  two spaces", "a\n\n\nb\tc", "   x = 3\n        y = 12345\n", "I've been, we'LL see",
    "naïve café — 你好 🦙🙏 Ελληνικά", "<|im_start|>user\nHi<|im_end|>\n<|eot_id|>",
    "<start_of_turn>user\nHi<end_of_turn>\n", "<table><tr>x</tr></table>", "▁▁literal", " ", " " * 40 + "z",
    "\n" * 35 + "x", "Don't 1234567 stop!!!",
]  # fmt: skip
LEARNED = "The quick brown fox jumps over the lazy dog, and the dog, 12 years old, does not care at all."


def random_model(config):
    """A model whose layers matter as much as the embedding."""
    key = jax.random.key(0)
    model = Decoder(DecoderConfig.from_json(config), key=key)
    rng = np.random.default_rng(0)
    offset = model.config.family.norm_offset

    def drawn(name, x):
        noise = rng.normal(size=x.shape)
        if x.ndim == 1:
            return 0.1 * noise + (1 - offset if "norm" in name or name.endswith(("scalar", "scale")) else 0)
        scaled = model.config.family.scaled_embedding
        return noise * ((0.3 if scaled else 1) if "embed" in name else 1.5 * x.shape[-1] ** -0.5)

    paths = jax.tree_util.tree_map_with_path(lambda path, x: (ql.path_of(path), x), model)
    is_pair = lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], str)
    return jax.tree.map(lambda pair: jnp.asarray(drawn(*pair), jnp.float32), paths, is_leaf=is_pair)


def _written(folder, tokenizer, config, model):
    folder.mkdir(parents=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    lm.write(folder / "model.safetensors", named_arrays(model), format="safetensors")


@pytest.fixture
def checkpoint(tmp_path, published_tokenizer):
    """Makes a folder with a random model and a published tokeniser."""

    def make(name):
        tokenizer, config = (FAMILIES | OTHERS)[name]
        config = {**SIZES, **config, "model_type": name.partition(",")[0]}
        model = random_model(config)
        _written(tmp_path / "base", published_tokenizer(tokenizer), config, model)
        return tmp_path / "base", model

    return make


@pytest.fixture
def llama_cpp():
    """Opens a file in llama.cpp, which remembers in float32 as we do, with YaRN as the file says."""
    from llama_cpp import Llama

    opened = []

    def open_file(path):
        model = Llama(
            str(path), n_ctx=256, n_threads=2, verbose=False, logits_all=True,
            type_k=0, type_v=0, flash_attn=False, yarn_beta_fast=-1.0, yarn_beta_slow=-1.0,
        )  # fmt: skip
        opened.append(model)
        return model

    yield open_file
    for model in opened:
        model.close()


def _continued(theirs, ids, count):
    """The most likely tokens after these, by llama.cpp."""
    theirs.reset()
    theirs.eval(ids)
    new = []
    for _ in range(count):
        new.append(int(np.argmax(theirs.scores[theirs.n_tokens - 1])))
        theirs.eval(new[-1:])
    return new


def _logits(model, ids):
    return np.asarray(eqx.filter_jit(ql.quaxify(model))(jnp.asarray(ids), jnp.ones(len(ids), bool)))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_tokens_and_logits(name, checkpoint, llama_cpp, compare, tmp_path):
    """In float32 the two programs compute the same; what is rounded for products differs in other types."""
    check = partial(compare, "llama.cpp", "GGUF f32", name.partition(",")[0])
    source, model = checkpoint(name)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    theirs, tokenizer = llama_cpp(tmp_path / "m.gguf"), TextTokenizer(source)
    for text in TEXTS:
        wanted = tokenizer.encode(text).ids
        check("tokens of texts", theirs.tokenize(text.encode(), add_bos=True, special=True), wanted)
    ids = tokenizer.encode(TEXTS[5]).ids
    theirs.eval(ids)
    # ggml looks the GELU of Gemma up in a table of float16.
    atol = 2e-2 if name.startswith("gemma") else 5e-4
    check("logits", theirs.scores[: len(ids)], _logits(model, ids), atol)
    new = generate(model, jnp.asarray([ids]), max_new_tokens=16)[0].tolist()
    check("greedy tokens", _continued(theirs, ids, 16), new)


def test_experts_of_mxfp4(checkpoint, llama_cpp, tmp_path):
    """Weights of 4 bits are the same in the two programs. For products, llama.cpp rounds the other factor."""
    source, model = checkpoint("gpt_oss")
    save(tmp_path / "mxfp4", ql.quantize(model, "mxfp4", where=["gate_up_proj", "down_proj"]), source)
    model, _ = load(tmp_path / "mxfp4")
    save(tmp_path / "m.gguf", model, tmp_path / "mxfp4", format="gguf")
    theirs, ids = llama_cpp(tmp_path / "m.gguf"), TextTokenizer(source).encode(LEARNED).ids
    theirs.eval(ids)
    ours = _logits(model, ids)
    assert np.std(theirs.scores[: len(ids)] - ours) < 0.03 * np.std(ours)


def _taught(model, ids, steps=60):
    """The model once it knows a text by heart, so that rounding changes no token."""
    optimiser = optax.adam(3e-3)
    tokens, seen = jnp.asarray(ids), jnp.ones(len(ids) - 1, bool)

    def loss(model):
        logits = model(tokens[:-1], seen)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    @jax.jit
    def step(model, state):
        value, gradient = jax.value_and_grad(loss)(model)
        updates, state = optimiser.update(gradient, state)
        return optax.apply_updates(model, updates), state, value

    state = optimiser.init(model)
    for _ in range(steps):
        model, state, value = step(model, state)
    assert value < 0.05
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_texts_in_every_type(name, checkpoint, llama_cpp, compare, tmp_path):
    """Of a model that has learned a text: what llama.cpp writes is what our model of the same file writes."""
    source, model = checkpoint(name)
    tokenizer = TextTokenizer(source)
    ids = tokenizer.encode(LEARNED).ids
    model = _taught(model, ids)
    for quantize in ("f16", "q8_0", "q4_0"):
        file = tmp_path / f"{quantize}.gguf"
        save(file, model, source, format="gguf", quantize=quantize)
        ours, _ = load(file)
        start, count = ids[:4], len(ids) - 4
        new = generate(ours, jnp.asarray([start]), max_new_tokens=count)[0].tolist()
        found = _continued(llama_cpp(file), start, count)
        compare("llama.cpp", f"GGUF {quantize}", name, "learned texts", found, new)
        assert tokenizer.decode(new) == tokenizer.decode(ids[4:])


def test_splits_of_marks(llama_cpp, compare, tmp_path):
    """Qwen3.5 keeps combining marks with the letters before them."""
    tokenizer = byte_level(290, "qwen35")
    source = tmp_path / "base"
    model = made.checkpoint(source, "qwen3_5_text", tokenizer)
    save(tmp_path / "m.gguf", model, source, format="gguf")
    theirs = llama_cpp(tmp_path / "m.gguf")
    for text in [*TEXTS, "e\u0301te\u0301 caf\u0301e", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0301!"]:
        found = theirs.tokenize(text.encode(), add_bos=True, special=True)
        compare("llama.cpp", "GGUF f32", "qwen3_5", "tokens of texts", found, tokenizer.encode(text).ids)
