"""The table of GGUF's architectures: their names and metadata keys, mapped to those of transformers.

Source: the tables of llama.cpp, <https://github.com/ggml-org/llama.cpp>, `gguf-py/gguf/constants.py` and
`conversion`.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..files.errors import complain
from ..files.model_config import is_finite
from .experts import halves_of

# From llama.cpp's names to transformers'; those with an ending are of arrays that have none there.
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# Entries of `config.json`, by metadata keys without the architecture's prefix.
_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_WINDOW = "attention.sliding_window"
_TYPES = ("full_attention", "sliding_attention")
_GEMMA_KEYS = {
    _WINDOW: "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id", "unknown": "unk_token_id"}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, and how its files differ from those of transformers."""

    model: str
    """The class of transformers."""
    model_type: str
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names within a block that differ from Llama's."""
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Metadata keys besides the usual ones."""
    rope_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Metadata keys besides the usual ones, of entries of `rope_parameters`."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Entries of `config.json` that no metadata key determines, or whose defaults differ in llama.cpp."""
    permuted: bool = False
    """Whether the rows of q and k are in the order of llama.cpp's rotary embedding."""
    norm_offset: float | int = 0
    """The number that has been added to the weights of norms in files."""
    output: Literal["", "own", "tied"] = ""
    """Whether files must have an output layer of their own, or must not; either by default."""
    large: int = 0
    """The number of layers of the Gemma whose scores are scaled by another head size."""
    interleaved: bool = False
    """Whether gates and values of experts alternate in transformers, whose matrices are (in, out) then."""
    yarn: bool = False
    """Whether llama.cpp reads the bounds of YaRN's ramp from files; it takes the usual ones otherwise."""


_GEMMA = Architecture(
    "Gemma2ForCausalLM", "gemma2", parts={**_AFTER, "ffn_norm": "pre_feedforward_layernorm"},
    keys=_GEMMA_KEYS, norm_offset=1, output="tied", large=46,
)  # fmt: skip
_UNBIASED = {"attention_bias": False, "mlp_bias": False}
#: By `general.architecture`.
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", keys=_EXPERT_KEYS, output="own"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", keys=_EXPERT_KEYS, config={"norm_topk_prob": True}
    ),
    "gemma2": _GEMMA,
    "gemma3": dataclasses.replace(
        _GEMMA, model="Gemma3ForCausalLM", model_type="gemma3_text", output="", large=62
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", parts=_AFTER, config=_UNBIASED, output="own"),
    "phi3": Architecture(
        "Phi3ForCausalLM", "phi3",
        parts={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        keys={"rope.scaling.original_context_length": "original_max_position_embeddings"},
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM", "gpt_oss",
        parts={"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        keys={
            _WINDOW: "sliding_window", "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "intermediate_size",
        },
        config={"attention_bias": True}, output="own", interleaved=True,
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", config=_UNBIASED, permuted=True),
    "granite": Architecture(
        "GraniteForCausalLM", "granite",
        keys={
            "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
            "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
        },
        config={"attention_multiplier": 0}, permuted=True,
    ),
    "mistral3": Architecture(
        "Ministral3ForCausalLM", "ministral3",
        rope_keys={"attention.temperature_scale": "llama_4_scaling_beta"}, permuted=True, yarn=True,
    ),
}  # fmt: skip
#: Other models whose files claim to be of an architecture, and the key by which they are told.
_VARIANTS = {
    "llama": (
        "expert_count",
        dataclasses.replace(
            ARCHITECTURES["llama"], model="MixtralForCausalLM", model_type="mixtral", keys=_EXPERT_KEYS
        ),
    ),
    "olmo2": (
        _WINDOW,
        dataclasses.replace(
            ARCHITECTURES["olmo2"],
            model="Olmo3ForCausalLM",
            model_type="olmo3",
            keys={_WINDOW: "sliding_window"},
        ),
    ),
}
#: Names and entries, by `model_type`.
_BY_TYPE = {
    **{entry.model_type: (name, entry) for name, entry in ARCHITECTURES.items()},
    **{entry.model_type: (name, entry) for name, (_, entry) in _VARIANTS.items()},
    "mistral": ("llama", ARCHITECTURES["llama"]),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture | None:
    """The table's entry for a file; None if its architecture is not in the table."""
    name = str(metadata.get("general.architecture"))
    key, variant = _VARIANTS.get(name, ("", None))
    return variant if variant and metadata.get(f"{name}.{key}") else ARCHITECTURES.get(name)


def name_of(name: str, architecture: Architecture | None) -> str:
    """The transformers name of a llama.cpp tensor; the same name if there is none."""
    if architecture is None:
        return name
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    parts = {**_IN_BLOCK, **architecture.parts}
    if found is None:
        return name
    if whole := parts.get(f"{found[2]}.{kind}"):
        return f"model.layers.{found[1]}.{whole}"
    return f"model.layers.{found[1]}.{parts[found[2]]}.{kind}" if found[2] in parts else name


def original_name(name: str, architecture: Architecture | None) -> str:
    """The inverse of `name_of`."""
    stem, _, kind = name.rpartition(".")
    top = {hf: gguf for gguf, hf in _TOP.items()}
    if stem in top:
        return f"{top[stem]}.{kind}"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if architecture is None or found is None:
        return name
    inner = {hf: gguf for gguf, hf in {**_IN_BLOCK, **architecture.parts}.items()}
    layer, (stem, _, kind) = found[1], found[2].rpartition(".")
    if found[2] in inner:
        return f"blk.{layer}.{inner[found[2]]}"
    return f"blk.{layer}.{inner[stem]}.{kind}" if stem in inner else name


def original_names(names: Iterable[str], metadata: Mapping[str, Any]) -> dict[str, str]:
    """llama.cpp's names, by those of transformers; a stack that it cuts in two has that of the first part."""
    architecture = architecture_of(metadata)
    halves = {name: halves_of(name) if architecture else None for name in names}
    return {name: pair[0] if pair else original_name(name, architecture) for name, pair in halves.items()}


def row_order(
    path: Path, name: str, shape: tuple[int, ...], metadata: Mapping[str, Any]
) -> np.ndarray | None:
    """For each row of q and k in transformers, the row in the file; None if the order is the same."""
    found = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(weight|bias)", name)
    architecture = architecture_of(metadata)
    if found is None or architecture is None or not architecture.permuted:
        return None
    prefix = f"{metadata.get('general.architecture')}.attention."
    heads = metadata.get(f"{prefix}head_count")
    if found[1] == "k":
        heads = metadata.get(f"{prefix}head_count_kv", heads)
    if len(shape) != (2 if found[2] == "weight" else 1):
        raise complain(path, name, f"must be a matrix, or the vector of its biases; found the shape {shape}")
    n = shape[0]
    if type(heads) is not int or heads < 1 or n % heads or n // heads % 2:
        raise complain(path, name, f"{heads!r} heads do not divide its {n} rows into pairs")
    return np.arange(n).reshape(heads, n // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def config_of(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> dict[str, Any]:
    """transformers' `config.json` for a model; empty if its architecture is not in the table.

    **Arguments:**

    - `path`: the name of the file in errors.
    - `metadata`: its keys and values.
    - `shapes`: of its tensors, by llama.cpp's names.
    - `read`: reads a tensor by such a name, for factors of rotary frequencies.

    **Raises:** `CheckpointError` for a value of another type than the key has.
    """
    architecture, prefix = architecture_of(metadata), f"{metadata.get('general.architecture')}."
    if architecture is None:
        return {}
    config: dict[str, Any] = {
        "architectures": [architecture.model], "model_type": architecture.model_type, "dtype": "float32",
        **architecture.config,
    }  # fmt: skip
    for key, entry in {**_KEYS, **architecture.keys}.items():
        if (value := _number(path, prefix + key, metadata)) is not None:
            config[entry] = value
    if _WINDOW in architecture.keys:
        config |= _pattern(path, prefix, metadata)
    if "token_embd.weight" in shapes:
        config["vocab_size"] = rows = shapes["token_embd.weight"][0]
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != rows:
            raise complain(path, "token_embd.weight", f"has {rows} rows, for {len(tokens)} tokens")
    config["tie_word_embeddings"] = "output.weight" not in shapes
    config.setdefault("attention_bias", "blk.0.attn_output.bias" in shapes)
    config.setdefault("mlp_bias", "blk.0.ffn_up.bias" in shapes)
    if architecture.large and config.get("num_attention_heads") and "hidden_size" in config:
        config["query_pre_attn_scalar"] = _scalar(architecture, config)
    config |= _rope(path, metadata, prefix, config, shapes, read)
    if architecture.rope_keys:
        numbers = {
            name: _number(path, prefix + key, metadata) for key, name in architecture.rope_keys.items()
        }
        original = _number(path, f"{prefix}rope.scaling.original_context_length", metadata)
        rope = {"rope_type": "default", **numbers, "original_max_position_embeddings": original}
        rope |= config.get("rope_scaling", {})
        config["rope_scaling"] = {name: x for name, x in rope.items() if x is not None}
    tokens = {entry: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, entry in _TOKENS.items()}
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = [end for i, end in enumerate(ends) if end is not None and end not in ends[:i]]
    if tokens["eos_token_id"] is not None and len(ends) > 1:
        tokens["eos_token_id"] = ends
    return config | {entry: token for entry, token in tokens.items() if token is not None}


def _number(path: Path, key: str, metadata: Mapping[str, Any]) -> int | float | None:
    """The number that a key says, for all layers; None if it is absent."""
    value: Any = metadata.get(key)
    is_same = isinstance(value, list) and value and all(x == value[0] for x in value)
    number: Any = value[0] if is_same else value
    if number is not None and type(number) not in (int, float):
        raise complain(path, key, f"expected one number; found {_short(value)}")
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _pattern(path: Path, prefix: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The layers with a window, if a file says more than their number."""
    key = f"{prefix}{_WINDOW}_pattern"
    found = metadata.get(key)
    if isinstance(found, list) and all(type(x) in (bool, int) for x in found):
        return {"layer_types": [_TYPES[bool(x)] for x in found]}
    if type(found) is int:
        return {"sliding_window_pattern": found}
    if found is not None:
        raise complain(path, key, f"expected a number, or a list of booleans; found {_short(found)}")
    return {}


def _rope(
    path: Path,
    metadata: Mapping[str, Any],
    prefix: str,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> dict[str, Any]:
    """The scaling of rotary frequencies, and the part of heads that is rotated."""
    get = lambda key: metadata.get(f"{prefix}rope.{key}")
    out: dict[str, Any] = {}
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    if isinstance(turned := get("dimension_count"), int) and size and turned != size:
        out["partial_rotary_factor"] = turned / size
    original = get("scaling.original_context_length") or config.get("max_position_embeddings")
    if "rope_freqs.weight" in shapes:  # the frequencies of Llama 3, say, are divided by these factors
        factors = read("rope_freqs.weight").astype(np.float64).reshape(-1).tolist()
        out["rope_scaling"] = {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors,
            "attention_factor": 1.0, "original_max_position_embeddings": original,
        }  # fmt: skip
    elif "rope_factors_long.weight" in shapes and "rope_factors_short.weight" in shapes:
        short, long = (
            read(f"rope_factors_{kind}.weight").astype(np.float64).reshape(-1).tolist()
            for kind in ("short", "long")
        )
        out["rope_scaling"] = {
            "rope_type": "longrope", "short_factor": short, "long_factor": long,
            "original_max_position_embeddings": original,
        }  # fmt: skip
        if factor := get("scaling.attn_factor"):
            out["rope_scaling"]["attention_factor"] = factor
    elif (kind := get("scaling.type")) not in (None, "none"):
        out["rope_scaling"] = {"rope_type": kind, "original_max_position_embeddings": original}
        factor: Any = get("scaling.factor")
        if type(factor) not in (int, float):
            raise complain(path, f"{prefix}rope.scaling.factor", f"expected a number; found {_short(factor)}")
        out["rope_scaling"]["factor"] = factor
        if kind == "yarn":
            out["rope_scaling"] |= _yarn(path, f"{prefix}rope.scaling.", metadata, factor)
    return out


_LOG = "yarn_log_multiplier"


def _yarn(path: Path, prefix: str, metadata: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """What a file says about YaRN besides its factor. llama.cpp multiplies cosines and sines by `attn_factor`
    and by what YaRN prescribes for the factor."""
    keys = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_beta_fast", "yarn_beta_slow", _LOG)
    found = {key: metadata[prefix + key] for key in keys if metadata.get(prefix + key) is not None}
    for key, value in found.items():
        if not is_finite(value):
            raise complain(path, prefix + key, f"expected a number; found {_short(value)}")
    if (extrapolated := found.get("yarn_ext_factor", 1)) not in (1, -1):  # -1: the default
        raise complain(path, f"{prefix}yarn_ext_factor", f"expected 1; found {_short(extrapolated)}")
    out = {f"beta_{x}": found[f"yarn_beta_{x}"] for x in ("fast", "slow") if f"yarn_beta_{x}" in found}
    for key in ("attn_factor", "yarn_attn_factor"):
        if key in found:
            out["attention_factor"] = found[key] * _grown(factor)
    if share := found.get(_LOG):  # mscale_all_dim
        if share < 0:
            raise complain(path, prefix + _LOG, f"expected a positive number; found {_short(share)}")
        out["attention_factor"] = out.get("attention_factor", _grown(factor)) / _grown(factor, share)
    return out


def _yarn_values(rope: Mapping[str, Any], architecture: Architecture) -> dict[str, float]:
    """The keys that say the same about YaRN as the entries of a `config.json`."""
    usual = {} if architecture.yarn else {"beta_fast": (None, 32), "beta_slow": (None, 1)}
    for name, known in usual.items():
        if (found := rope.get(name, known[0])) not in known:
            raise ValueError(
                f"config.json has {name}={found!r} for YaRN; llama.cpp takes {known[-1]!r} in models of type "
                f"{architecture.model_type!r}. If that does as well, say it in the config.json of a copy, "
                "and pass that as `source`."
            )
    grown = _grown(rope["factor"])
    own, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    shared = _grown(rope["factor"], own) / _grown(rope["factor"], all_dim) if own and all_dim else grown
    scale = rope.get("attention_factor") or shared
    out = {"rope.scaling.attn_factor": float(scale / grown)} if scale != grown else {}
    betas = {x: rope.get(f"beta_{x}") for x in ("fast", "slow")}
    return out | {f"rope.scaling.yarn_beta_{x}": float(beta) for x, beta in betas.items() if beta}


def _grown(factor: float, share: float = 1.0) -> float:
    """The factor of cosines and sines that YaRN prescribes for texts that are longer by a factor."""
    return 1.0 if factor <= 1 else 1 + 0.1 * share * math.log(factor)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that llama.cpp needs about a model, from its `config.json`; without the tokeniser.

    **Raises:** `ValueError` for an architecture that is not in the table, a missing entry, or an entry that
    the format has no key for.
    """
    kind = str(config.get("model_type"))
    if kind not in _BY_TYPE:
        raise ValueError(
            f"config.json has model_type={kind!r}; metadata of GGUF is known for {', '.join(_BY_TYPE)}."
        )
    (name, architecture), rope = _BY_TYPE[kind], _rope_parameters(config)
    config = {**config, "rope_theta": rope["rope_theta"]}
    heads = config.get("num_attention_heads")
    defaults = {
        "max_position_embeddings": 2048, "num_key_value_heads": heads, "rms_norm_eps": 1e-6,
        "num_experts": config.get("num_local_experts"),
    }  # fmt: skip
    values: dict[str, Any] = {}
    for key, entry in {**_KEYS, **architecture.keys}.items():
        value = defaults.get(entry) if config.get(entry) is None else config[entry]
        if value is None and entry in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            raise ValueError(f"config.json has no {entry}, which GGUF needs.")
        if value is not None:
            values[key] = float(value) if entry in ("rms_norm_eps", "rope_theta") else value
    if _WINDOW in values and config.get("layer_types"):
        values[f"{_WINDOW}_pattern"] = [kind == _TYPES[1] for kind in config["layer_types"]]
    if "attention.key_length" in values:
        values["attention.value_length"] = values["attention.key_length"]
    scalar = config.get("query_pre_attn_scalar")
    if architecture.large and scalar != (derived := _scalar(architecture, config)):
        raise ValueError(
            f"config.json has query_pre_attn_scalar={scalar}; GGUF has no key for it, and llama.cpp takes "
            f"{derived}."
        )
    values["rope.dimension_count"] = int(_head_size(config) * rope.get("partial_rotary_factor", 1.0))
    kind = _rope_kind(rope)
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        values |= _yarn_values(rope, architecture) if kind == "yarn" else {}
    elif kind == "longrope" and rope.get("attention_factor"):
        values["rope.scaling.attn_factor"] = float(rope["attention_factor"])
    if original := rope.get("original_max_position_embeddings"):
        values["rope.scaling.original_context_length"] = original
    values |= {key: float(rope[entry]) for key, entry in architecture.rope_keys.items() if rope.get(entry)}
    return {"general.architecture": name, **{f"{name}.{key}": value for key, value in values.items()}}


def rope_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The factors of rotary frequencies that llama.cpp stores as tensors (Llama 3, LongRoPE), by name."""
    rope = _rope_parameters(config)
    if _rope_kind(rope) == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.asarray(rope[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        }
    if _rope_kind(rope) != "llama3":
        return {}
    size = _head_size(config)
    inverse = rope["rope_theta"] ** -(np.arange(0, size, 2) / size)
    turns = rope["original_max_position_embeddings"] * inverse / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32)}


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters, from the entries of transformers 4 or 5."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = given.get("full_attention") or given  # llama.cpp derives those of Gemma's other layers itself
    theta = config.get("rope_theta") or 10000.0
    part = config.get("partial_rotary_factor") or 1.0
    return {"rope_theta": theta, "partial_rotary_factor": part, **given}


def _rope_kind(rope: Mapping[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "yarn", "llama3", "longrope"):
        raise ValueError(
            f"config.json has rope_type={kind!r}; GGUF is written for linear, yarn, llama3 and longrope."
        )
    return kind


def _scalar(architecture: Architecture, config: Mapping[str, Any]) -> int:
    """The size whose square root divides Gemma's scores."""
    if config.get("num_hidden_layers") == architecture.large:
        return config["hidden_size"] // config["num_attention_heads"]
    return _head_size(config)


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"
