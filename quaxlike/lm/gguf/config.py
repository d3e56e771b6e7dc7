"""Conversion between a GGUF file's metadata and transformers' `config.json`."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..._checked import is_finite
from ...files.errors import CheckpointError, file_error, quoted
from ..families import FAMILIES, Family, Gguf
from ..folders.entries import warn_of_unknown
from . import window_layers
from .metadata import ModelKeys
from .names import family_of

# Maps metadata keys, without the architecture's prefix, to the equivalent entries of `config.json`.
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
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id", "unknown": "unk_token_id"}


def config_of(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> dict[str, Any]:
    """Converts a GGUF file's metadata to the equivalent of transformers' `config.json`.

    `shapes` maps llama.cpp's tensor names to shapes. `read` loads a single tensor: the scaling factors for
    rotary frequencies are tensors, rather than metadata. Returns `{}` if the architecture is unknown.

    **Raises:** `CheckpointError` if any key's value has the wrong type.
    """
    family, keys = family_of(metadata), ModelKeys(path, metadata)
    if family is None or family.gguf is None:
        return {}
    own = family.gguf
    _warn_of_unknown(keys, own)
    config: dict[str, Any] = {
        "architectures": [name for name in FAMILIES if FAMILIES[name] is family],
        "model_type": own.model_type, "dtype": "float32", **own.config,
    }  # fmt: skip
    for key, entry in {**_KEYS, **own.keys}.items():
        if own.windowed and key in window_layers.LISTS:
            continue
        if (value := _number(keys, key)) is not None:
            config[entry] = None if value == own.nulls.get(entry) else value
    for key, (factor, other) in own.products.items():
        product, known = _number(keys, key), config.get(factor)
        if type(product) is int and type(known) is int and known > 0 and product % known == 0:
            config[other] = product // known
        elif product is not None:
            raise keys.error(key, f"{product} is no multiple of {factor}, which is {known}")
    if family.experts_beside:
        config[family.experts_beside] = bool(config.get("num_experts"))
    if more := _more_layers(keys, family):
        config["num_hidden_layers"] -= more
    if family.attends and (recurrent := keys.get(_RECURRENT)) is not None:
        config |= _recurrent(keys, family, recurrent, config.get("num_hidden_layers", 0))
    if _WINDOW in own.keys:
        config |= _pattern(keys, config.get("num_hidden_layers", 0))
    if "token_embd.weight" in shapes:
        config["vocab_size"] = rows = shapes["token_embd.weight"][0]
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != rows:
            raise file_error(path, "token_embd.weight", f"has {rows} rows, for {len(tokens)} tokens")
        if "vocab_size_per_layer_input" in family.entries:
            config["vocab_size_per_layer_input"] = rows  # llama.cpp requires these to be equal
    config["tie_word_embeddings"] = "output.weight" not in shapes
    for entry, tensor in (("attention_bias", "attn_output"), ("mlp_bias", "ffn_up")):
        config.setdefault(entry, own.biases and f"blk.0.{tensor}.bias" in shapes)
    if own.large and config.get("num_attention_heads") and "hidden_size" in config:
        config["query_pre_attn_scalar"] = _scalar(own, config)
    if own.windowed and "num_hidden_layers" in config:  # there is none in the file of an adapter
        config.pop("rope_theta", None)
        config |= window_layers.entries_of(keys, config, shapes, read)
    else:
        config |= _rope(keys, config, shapes, read, family.partial)
    if own.rope_keys:
        numbers = {name: _number(keys, key) for key, name in own.rope_keys.items()}
        original = _number(keys, "rope.scaling.original_context_length")
        rope = {"rope_type": "default", **numbers, "original_max_position_embeddings": original}
        rope |= config.get("rope_scaling", {})
        config["rope_scaling"] = {name: x for name, x in rope.items() if x is not None}
    tokens = {entry: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, entry in _TOKENS.items()}
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = [end for i, end in enumerate(ends) if end is not None and end not in ends[:i]]
    if tokens["eos_token_id"] is not None and len(ends) > 1:
        tokens["eos_token_id"] = ends
    return config | {entry: token for entry, token in tokens.items() if token is not None}


_MORE = "nextn_predict_layers"
_SECTIONS = "rope.dimension_sections"
_RECURRENT = "attention.recurrent_layers"


def _recurrent(keys: ModelKeys, family: Family, found: Any, layers: Any) -> dict[str, Any]:
    """Reads which layers use the first mixer, from a list with one boolean per layer."""
    if not isinstance(found, list) or not all(type(x) in (bool, int) for x in found):
        raise keys.error(_RECURRENT, f"expected a list of booleans; found {quoted(found)}")
    kinds = ("full_attention", next(iter(family.mixers)))
    return {"layer_types": [kinds[bool(x)] for x in found[:layers]]}


def _more_layers(keys: ModelKeys, family: Family) -> int:
    """Returns how many of the last blocks only predict further tokens. These aren't used."""
    more, count = (keys.get(key) or 0 for key in (_MORE, "block_count"))
    if family.gguf is None or not family.gguf.predictors or not more:
        return 0
    if type(more) is not int or type(count) is not int or not 0 < more < count:
        raise keys.error(_MORE, f"expected fewer than {count} layers; found {quoted(more)}")
    return more


def blocks_beside(path: Path, metadata: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Finds the tensors in blocks that only predict further tokens."""
    family, keys = family_of(metadata), ModelKeys(path, metadata)
    more = _more_layers(keys, family) if family else 0
    if not more:
        return set()
    first = keys.get("block_count") - more
    blocks = {name: re.match(r"blk\.(\d+)\.", name) for name in names}
    return {name for name, found in blocks.items() if found and int(found[1]) >= first}


def without_blocks_beside(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the metadata for a file without the blocks that only predict further tokens.

    This also shortens lists with one value per block.
    """
    family, keys = family_of(metadata), ModelKeys(path, metadata)
    more = _more_layers(keys, family) if family else 0
    if not more:
        return dict(metadata)
    prefix, count = keys.prefix, keys.get("block_count")

    def cut(key: str, x: Any) -> Any:
        is_of_layers = key.startswith(prefix) and isinstance(x, list | np.ndarray) and len(x) == count
        return x[:-more] if is_of_layers else x

    kept = {key: cut(key, x) for key, x in metadata.items() if key != prefix + _MORE}
    return kept | {f"{prefix}block_count": count - more}


# Far larger than any real layer count or head size, so damaged files can't trigger huge allocations.
_LARGEST = 1 << 16
# Additional keys, not read as plain numbers.
_OTHERS = (
    *(_MORE, _RECURRENT),
    *(f"{_WINDOW}_pattern", "rope.dimension_count", "rope.scaling.original_context_length"),
    *(
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_attn_factor",
    ),
    *("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    "rope.scaling.yarn_log_multiplier",
)
# Keys with no effect on a decoder. (The first of these can also be inferred from the tensor shapes.)
_WITHOUT_EFFECT = ("attention.value_length", "attention.causal", "pooling_type", "rope.scaling.finetuned")
# Our decoders hard-code these values, so we warn if a file has a different value.
_ONLY = {"rope.freq_base_swa": 10000.0, "expert_weights_scale": 1.0, "logit_scale": 1.0}


def _warn_of_unknown(keys: ModelKeys, own: Gguf) -> None:
    """Warns about unrecognised keys with the architecture's prefix.

    Any of these may change the model in an unknown way.
    """
    prefix = keys.prefix
    found = {key.removeprefix(prefix): x for key, x in keys.metadata.items() if key.startswith(prefix)}
    known = {*_KEYS, *own.keys, *own.products, *own.rope_keys, own.marker, *_OTHERS}
    known |= {*_WITHOUT_EFFECT, *([_SECTIONS] if own.sections else [])}
    known |= {*window_layers.KEYS} if own.windowed else set()
    unknown = {f"{prefix}{key}": x for key, x in found.items() if key not in known and _ONLY.get(key) != x}
    warn_of_unknown(str(keys.path), unknown, ())


def _number(keys: ModelKeys, key: str) -> int | float | None:
    """Reads a number, stored either once or per layer. Returns None if the key is missing."""
    value = keys.get(key)
    is_same = isinstance(value, list) and value and all(x == value[0] for x in value)
    number: Any = value[0] if is_same else value
    if number is not None and type(number) not in (int, float):
        raise keys.error(key, f"expected one number; found {quoted(value)}")
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _pattern(keys: ModelKeys, layers: Any) -> dict[str, Any]:
    """Reads which layers use sliding-window attention, for files specifying this per layer."""
    found = keys.get(window_layers.PATTERN)
    if isinstance(found, list) and all(type(x) in (bool, int) for x in found):
        return {"layer_types": [_TYPES[bool(x)] for x in found]}
    if type(found) is int:
        if type(layers) is not int or not 0 <= layers < _LARGEST:
            raise keys.error("block_count", f"expected the number of layers; found {quoted(layers)}")
        return {"layer_types": [_TYPES[not found or (i + 1) % found != 0] for i in range(layers)]}
    if found is not None:
        problem = f"expected a number, or a list of booleans; found {quoted(found)}"
        raise keys.error(window_layers.PATTERN, problem)
    return {}


def _rope(
    keys: ModelKeys,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    partial: bool,
) -> dict[str, Any]:
    """Reads how much of each head is rotated and how the rotary frequencies are scaled."""
    out: dict[str, Any] = {}
    heads = config.get("num_attention_heads")
    size = config.get("head_dim") or (config.get("hidden_size", 0) // heads if heads else 0)
    if isinstance(rotated := keys.get("rope.dimension_count"), int) and size and (partial or rotated != size):
        if not partial and size < _LARGEST:  # impossible sizes are reported elsewhere with a clearer message
            problem = f"expected {size}: {config['model_type']!r} rotates whole heads; found {rotated}"
            raise keys.error("rope.dimension_count", problem)
        out["partial_rotary_factor"] = rotated / size
    elif partial and rotated is None:
        out["partial_rotary_factor"] = 1.0  # as in llama.cpp, whatever transformers' default is
    original = keys.get("rope.scaling.original_context_length") or config.get("max_position_embeddings")
    if "rope_freqs.weight" in shapes:  # llama.cpp divides the frequencies by these factors, as in Llama 3
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
        if factor := keys.get("rope.scaling.attn_factor"):
            out["rope_scaling"]["attention_factor"] = factor
    elif (kind := keys.get("rope.scaling.type")) not in (None, "none"):
        out["rope_scaling"] = {"rope_type": kind, "original_max_position_embeddings": original}
        factor = keys.get("rope.scaling.factor")
        if type(factor) not in (int, float):
            raise keys.error("rope.scaling.factor", f"expected a number; found {quoted(factor)}")
        out["rope_scaling"]["factor"] = factor
        if kind == "yarn":
            out["rope_scaling"] |= _yarn(keys, factor)
    return out


_LOG = "yarn_log_multiplier"


def _yarn(keys: ModelKeys, factor: float) -> dict[str, Any]:
    """Reads all YaRN parameters apart from the scaling factor.

    llama.cpp multiplies the cosines and sines both by `attn_factor` and by YaRN's attention factor for
    `factor`, whereas the `attention_factor` in transformers is their product.
    """
    names = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_beta_fast", "yarn_beta_slow", _LOG)
    given = {name: keys.get(f"rope.scaling.{name}") for name in names}
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        if not is_finite(value):
            raise keys.error(f"rope.scaling.{name}", f"expected a number; found {quoted(value)}")
    if (extrapolated := found.get("yarn_ext_factor", 1)) not in (1, -1):  # -1 is llama.cpp's default
        raise keys.error("rope.scaling.yarn_ext_factor", f"expected 1; found {quoted(extrapolated)}")
    out = {f"beta_{x}": found[f"yarn_beta_{x}"] for x in ("fast", "slow") if f"yarn_beta_{x}" in found}
    for key in ("attn_factor", "yarn_attn_factor"):
        if key in found:
            out["attention_factor"] = found[key] * _grown(factor)
    if share := found.get(_LOG):  # transformers calls this mscale_all_dim
        if share < 0:
            raise keys.error(f"rope.scaling.{_LOG}", f"expected a positive number; found {quoted(share)}")
        out["attention_factor"] = out.get("attention_factor", _grown(factor)) / _grown(factor, share)
    return out


def _yarn_values(rope: Mapping[str, Any], gguf: Gguf) -> dict[str, float]:
    """The inverse of `_yarn`: converts the YaRN entries in a `config.json` to GGUF metadata."""
    usual = {} if gguf.yarn else {"beta_fast": (None, 32), "beta_slow": (None, 1)}
    for name, known in usual.items():
        if (found := rope.get(name, known[0])) not in known:
            raise ValueError(
                f"config.json has {name}={found!r} for YaRN; llama.cpp takes {known[-1]!r} in models of type "
                f"{gguf.model_type!r}. If that does as well, say it in the config.json of a copy, "
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
    """Computes YaRN's attention factor for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 1 + 0.1 * share * math.log(factor)


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a `config.json` to llama.cpp's metadata, excluding the tokeniser.

    **Raises:** `ValueError` if the architecture is unknown, if an entry is missing, or if GGUF can't
    represent an entry.
    """
    kind = config.get("model_type")
    known = {gguf.model_type: (family, gguf) for family in FAMILIES.values() if (gguf := family.gguf)}
    if kind not in known:
        names = ", ".join(known)
        raise ValueError(f"config.json has model_type={kind!r}; metadata of GGUF is known for {names}.")
    family, own = known[kind]
    rope = _rope_parameters(config)
    config = {**family.sizes, **config, "rope_theta": rope["rope_theta"]}
    heads = config.get("num_attention_heads")
    defaults = {
        "max_position_embeddings": 2048, "num_key_value_heads": heads, "rms_norm_eps": 1e-6,
        "num_experts": config.get("num_local_experts"), **own.nulls,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for key, entry in {**_KEYS, **own.keys}.items():
        value = defaults.get(entry) if config.get(entry) is None else config[entry]
        if value is None and entry in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            raise ValueError(f"config.json has no {entry}, which GGUF needs.")
        if value is not None:
            values[key] = float(value) if entry in ("rms_norm_eps", "rope_theta") else value
    products = {key: config[factor] * config[other] for key, (factor, other) in own.products.items()}
    values |= products
    if len({config[entry] for entry in own.same}) > 1:
        told = " and ".join(f"{entry}={config[entry]}" for entry in own.same)
        raise ValueError(
            f"config.json has {told}; llama.cpp takes these to be equal in models of type {own.model_type!r}."
        )
    for entry, most in own.limits.items():
        if config[entry] > most:
            raise ValueError(
                f"config.json has {entry}={config[entry]}; above {most}, llama.cpp computes something "
                f"else for models of type {own.model_type!r}."
            )
    if _WINDOW in values and config.get("layer_types"):
        values[f"{_WINDOW}_pattern"] = [kind == _TYPES[1] for kind in config["layer_types"]]
    if "attention.key_length" in values:
        values["attention.value_length"] = values["attention.key_length"]
    scalar = config.get("query_pre_attn_scalar")
    if own.large and scalar != (derived := _scalar(own, config)):
        raise ValueError(
            f"config.json has query_pre_attn_scalar={scalar}; GGUF has no key for it, and llama.cpp takes "
            f"{derived}."
        )
    wide = _head_size(config) * config["num_attention_heads"]
    if own.square and wide != config["hidden_size"]:
        raise ValueError(
            f"config.json has heads of {wide} numbers together, for hidden_size={config['hidden_size']}; "
            f"llama.cpp takes these to be equal in models of type {own.model_type!r}."
        )
    values |= (
        window_layers.values_of(config, rope) if own.windowed else _rope_values(config, rope, family, own)
    )
    return {"general.architecture": own.name, **{f"{own.name}.{key}": x for key, x in values.items()}}


def _rope_values(
    config: Mapping[str, Any], rope: Mapping[str, Any], family: Family, own: Gguf
) -> dict[str, Any]:
    """Converts the rotary parameters to metadata. (For those stored as tensors, see `rope_tensors`.)"""
    values: dict[str, Any] = {}
    kind, share = _rope_kind(rope), rope.get("partial_rotary_factor", 1.0)
    if share != 1 and not family.partial:
        if kind != "default":
            raise ValueError(
                f"config.json has partial_rotary_factor={share} beside rope_type={kind!r}; models of type "
                f"{own.model_type!r} rotate whole heads."
            )
        share = 1.0  # transformers ignores the entry for these models
    values["rope.dimension_count"] = rotated = int(_head_size(config) * share)
    if own.sections:
        # Pairs take turns. llama.cpp ends the process if there are more in the sections than in a head.
        values[_SECTIONS] = [(rotated // 2 + i) // 3 for i in (2, 1, 0)] + [0]
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
        values |= _yarn_values(rope, own) if kind == "yarn" else {}
    elif kind == "longrope" and rope.get("attention_factor"):
        values["rope.scaling.attn_factor"] = float(rope["attention_factor"])
    if original := rope.get("original_max_position_embeddings"):
        values["rope.scaling.original_context_length"] = original
    values |= {key: float(rope[entry]) for key, entry in own.rope_keys.items() if rope.get(entry)}
    return values


def rope_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Computes llama.cpp's tensors for scaled rotary frequencies.

    These are used by Llama 3, LongRoPE and Gemma 4.
    """
    rope = _rope_parameters(config)
    known = [family.gguf for family in FAMILIES.values() if family.gguf]
    if any(own.windowed for own in known if own.model_type == config.get("model_type")):
        return {window_layers.FACTORS: window_layers.factors_of(config["global_head_dim"], rope)}
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
    """Reads the rotary parameters, which transformers 4 and 5 store differently."""
    # In the order of `DecoderConfig`, which decides what the model computes.
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    given = given.get("full_attention") or given  # llama.cpp infers Gemma's window layers
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


def _scalar(own: Gguf, config: Mapping[str, Any]) -> int:
    """Returns the size for Gemma's attention scores: they are divided by its square root.

    This is the head size, except for the largest model.
    """
    if config.get("num_hidden_layers") == own.large:
        return config["hidden_size"] // config["num_attention_heads"]
    return _head_size(config)


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def keys_of(config: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Like `metadata_of`, but error messages name the checkpoint.

    **Raises:** `CheckpointError` if GGUF can't represent the configuration.
    """
    try:
        return metadata_of(config)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
