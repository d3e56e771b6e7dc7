"""The model that both sides load: random weights, written once."""

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np

#: By the names of llama.cpp's types of files.
GGUF = {
    "Q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "Q3_K_M": "LLAMA_FTYPE_MOSTLY_Q3_K_M",
    "Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "Q5_K_M": "LLAMA_FTYPE_MOSTLY_Q5_K_M",
    "Q6_K": "LLAMA_FTYPE_MOSTLY_Q6_K",
    "IQ4_XS": "LLAMA_FTYPE_MOSTLY_IQ4_XS",
}


class Size(NamedTuple):
    """A Llama's, and that of what is done with it."""

    layers: int
    width: int
    mlp: int
    vocabulary: int
    prompt: int
    new: int
    matrix: int
    """Rows and columns of single weights."""

    @property
    def parameters(self) -> int:
        return self.layers * self.width * (4 * self.width + 3 * self.mlp) + 2 * self.vocabulary * self.width


FULL = Size(12, 768, 2048, 32_000, 12, 33, 4096)
QUICK = Size(2, 256, 512, 2048, 12, 9, 512)


#: Of training: texts in a batch, their tokens, and the rank of adapters.
ROWS, LENGTH, RANK = 2, 256, 8


def ids(size: Size, batch: int, length: int) -> np.ndarray:
    """The tokens that both sides read."""
    return np.random.default_rng(0).integers(1, size.vocabulary, (batch, length)).astype(np.int32)


def sparse_weight(size: Size) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((size.matrix, size.matrix), np.float32)
    return w * (rng.random(w.shape) < 0.1), rng.standard_normal((1, size.matrix), np.float32)


def make(folder: pathlib.Path, size: Size) -> None:
    """Writes the checkpoint, with a tokeniser of bytes, which GGUF files must have."""
    import jax
    import jax.numpy as jnp
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    import quaxlike as ql
    from quaxlike.lm.gguf.tokenizer import PATTERNS
    from quaxlike.surgery.trees import named_arrays

    heads = size.width // 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size.width,
        "intermediate_size": size.mlp, "num_hidden_layers": size.layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": 64, "vocab_size": size.vocabulary,
        "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
        "dtype": "bfloat16",
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    end, first, second, *others = "<|endoftext|>", *pre_tokenizers.ByteLevel.alphabet()
    tokens = [end, first, second, *others, first + second]  # with a merge, which a GGUF file must have
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [(first, second)]))
    tokenizer.add_special_tokens([end])
    split = pre_tokenizers.Split(Regex(*PATTERNS["qwen2"]), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    model = ql.lm.models.Decoder(ql.lm.models.DecoderConfig.from_json(config), key=jax.random.key(0))
    arrays = {name: x.astype(jnp.bfloat16) for name, x in named_arrays(model).items()}
    ql.lm.write(folder / "model.safetensors", arrays, format="safetensors")


def gguf(folder: pathlib.Path, kind: str) -> pathlib.Path:
    """The same weights as llama.cpp quantises them, written if they are not there."""
    path = folder.with_name(f"{kind}.gguf")
    if path.exists():
        return path
    import llama_cpp

    import quaxlike as ql

    whole = folder.with_name("whole.gguf")
    if not whole.exists():
        ql.lm.save(whole, ql.lm.load(folder)[0], folder, format="gguf")
    options: Any = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, GGUF[kind])
    if llama_cpp.llama_model_quantize(str(whole).encode(), str(path).encode(), options):
        raise RuntimeError(f"llama.cpp did not write {path}")
    return path
