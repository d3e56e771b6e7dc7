"""Metadata for architectures with different sizes for layers with and without a sliding window.

For these, llama.cpp has additional keys ending in `_swa`, for layers with a window. Sizes can also be lists
with one number per layer. The tensor `rope_freqs` only divides the rotary frequencies of layers without a
window.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...files.errors import quoted
from .metadata import ModelKeys

PATTERN = "attention.sliding_window_pattern"
FACTORS = "rope_freqs.weight"
#: Keys stored as lists if they differ between layers.
LISTS = ("attention.head_count_kv", "feed_forward_length")
#: Keys read in here, in addition to those with their own entry.
KEYS = (*LISTS, "rope.freq_base_swa", "rope.dimension_count_swa", "attention.value_length_swa")
_SHARED = "attention.shared_kv_layers"
_WINDOW, _GLOBAL = "sliding_attention", "full_attention"
_NEVER = 1e30  # llama.cpp divides a frequency by this to make it zero


def entries_of(
    keys: ModelKeys,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
) -> dict[str, Any]:
    """Reads the entries of `config.json` depending on the kind of layer.

    `config` contains everything read so far, `shapes` the shapes of all tensors, and `read` loads a single
    tensor.

    **Raises:** `CheckpointError` if a key's value has the wrong type, or if llama.cpp can't run this model.
    """
    windows = _windows(keys, config)
    shared = _shared(keys, windows, config)
    near, far = _by_window(keys, LISTS[0], windows)
    out: dict[str, Any] = {"num_key_value_heads": near, "num_global_key_value_heads": far}
    out |= _widths(keys, LISTS[1], len(windows), shared)
    own = [i for i, window in enumerate(windows[: len(windows) - shared]) if not window]
    out["attention_k_eq_v"] = not any(f"blk.{i}.attn_v.weight" in shapes for i in own)
    if far != near and not out["attention_k_eq_v"]:  # only this entry can express it
        sizes = {"head_dim": config.get("global_head_dim"), "num_key_value_heads": far}
        out["per_layer_config"] = {str(i): sizes for i, window in enumerate(windows) if not window}
    rope = _rope(keys, config)
    if FACTORS in shapes:
        rope[_GLOBAL] |= _scaled(read(FACTORS).astype(np.float64).reshape(-1).tolist(), config)
    return out | {"rope_parameters": rope}


def values_of(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Inverts `entries_of`, except for the tensor. `rope` are the parameters for layers without a window."""
    needed = ("layer_types", "intermediate_size", "head_dim", "global_head_dim", "num_key_value_heads")
    if missing := next((entry for entry in needed if not config.get(entry)), None):
        raise ValueError(f"config.json has no {missing}, which GGUF needs.")
    if _WINDOW not in config["layer_types"]:
        raise ValueError(
            "config.json has no layer with a window; llama.cpp needs one in models of this type."
        )
    if (kind := rope.get("rope_type") or "default") not in ("default", "linear", "proportional"):
        raise ValueError(
            f"config.json has rope_type={kind!r} for layers without a window; in models of this type, GGUF "
            "is written for proportional and linear."
        )
    windows = [kind == _WINDOW for kind in config["layer_types"]]
    shared = config.get("num_kv_shared_layers") or 0
    near, size = config["num_key_value_heads"], config["intermediate_size"]
    far = config.get("num_global_key_value_heads") or near
    wide = range(len(windows))[-shared if config.get("use_double_wide_mlp") and shared else len(windows) :]
    lists = {
        LISTS[0]: [near if window else far for window in windows],
        LISTS[1]: [size * (2 if i in wide else 1) for i in range(len(windows))],
    }
    given = (config.get("rope_parameters") or {}).get(_WINDOW) or {}
    return {
        **{key: sizes[0] if len({*sizes}) == 1 else sizes for key, sizes in lists.items()},
        "rope.freq_base_swa": float(given.get("rope_theta") or 10000.0),
        "rope.dimension_count": config["global_head_dim"], "rope.dimension_count_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
    }  # fmt: skip


def factors_of(size: int, rope: Mapping[str, Any]) -> np.ndarray:
    """Computes the divisors for the rotary frequencies in layers without a window."""
    kind = rope.get("rope_type") or "default"
    share = rope.get("partial_rotary_factor", 1.0) if kind == "proportional" else 1.0
    factor = 1.0 if kind == "default" else rope.get("factor", 1.0)
    return np.where(np.arange(size // 2) < int(share * size // 2), factor, _NEVER).astype(np.float32)


def _windows(keys: ModelKeys, config: Mapping[str, Any]) -> list[bool]:
    layers, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise keys.error(PATTERN, f"expected a boolean for each of {quoted(layers)} layers")
    windows = [kind == _WINDOW for kind in kinds]
    if not any(windows) or windows[-1]:
        problem = "llama.cpp needs layers with a window, and a last layer without"
        raise keys.error(PATTERN, f"{problem}; found {quoted(windows)}")
    return windows


def _shared(keys: ModelKeys, windows: Sequence[bool], config: Mapping[str, Any]) -> int:
    """Reads how many layers at the end use another layer's keys and values.

    llama.cpp always takes these from the two layers before, whereas in transformers it's the last layer of
    each kind.
    """
    shared = config.get("num_kv_shared_layers") or 0
    if type(shared) is not int or not 0 <= shared < len(windows):
        raise keys.error(_SHARED, f"expected fewer than {len(windows)} layers; found {quoted(shared)}")
    before = list(windows[: len(windows) - shared][-2:])
    if shared and before != [True, False]:
        problem = "in llama.cpp the two layers before these have a window, and none"
        raise keys.error(_SHARED, f"{problem}; found windows={quoted(before)}")
    return shared


def _numbers(keys: ModelKeys, key: str, layers: int) -> list[int] | None:
    """Reads one integer per layer. Returns None if the key is missing."""
    value = keys.get(key)
    numbers = [value] * layers if type(value) is int else value
    if numbers is None:
        return None
    if not isinstance(numbers, list) or len(numbers) != layers or any(type(x) is not int for x in numbers):
        raise keys.error(key, f"expected a number, or one for each of {layers} layers; found {quoted(value)}")
    return numbers


def _by_window(keys: ModelKeys, key: str, windows: Sequence[bool]) -> tuple[int | None, int | None]:
    """Reads a number for layers with a window, and one for those without."""
    numbers = _numbers(keys, key, len(windows))
    if numbers is None:
        return None, None
    kinds = [
        {x for x, window in zip(numbers, windows, strict=True) if window is kind} for kind in (True, False)
    ]
    if any(len(kind) != 1 for kind in kinds):
        raise keys.error(key, f"expected a number for each kind of layer; found {quoted(numbers)}")
    return kinds[0].pop(), kinds[1].pop()


def _widths(keys: ModelKeys, key: str, layers: int, shared: int) -> dict[str, Any]:
    numbers = _numbers(keys, key, layers)
    if numbers is None:
        return {}
    first, last = numbers[0], numbers[-1] if shared else numbers[0]
    if numbers != [first] * (layers - shared) + [last] * shared or last not in (first, 2 * first):
        problem = f"expected twice the size in the last {shared} layers, or the same in all"
        raise keys.error(key, f"{problem}; found {quoted(numbers)}")
    return {"intermediate_size": first, "use_double_wide_mlp": last != first}


def _rope(keys: ModelKeys, config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the rotary parameters for each kind of layer, except for the tensor's."""
    scaling = keys.get("rope.scaling.type")
    if scaling not in (None, "none"):
        raise keys.error("rope.scaling.type", f"expected {FACTORS} instead; found {quoted(scaling)}")
    out: dict[str, Any] = {}
    rotated: Any = None
    for kind, end, entry in ((_GLOBAL, "", "global_head_dim"), (_WINDOW, "_swa", "head_dim")):
        size, base = config.get(entry), keys.get(f"rope.freq_base{end}", 10000.0)
        if type(size) is not int or type(base) not in (int, float):
            raise keys.error(f"attention.key_length{end}", f"expected a size; found {quoted(size)}")
        rotated = keys.get(f"rope.dimension_count{end}", rotated or size)
        if rotated != size:
            raise keys.error(f"rope.dimension_count{end}", f"expected {size}; found {quoted(rotated)}")
        out[kind] = {"rope_type": "default", "rope_theta": float(str(np.float32(base)))}
    return out


def _scaled(factors: list[float], config: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the tensor to rotary parameters. If possible, these are as in a published model."""
    count, kept = len(factors), [factor for factor in factors if factor < _NEVER / 2]
    if kept and factors[: len(kept)] == [kept[0]] * len(kept):
        share = len(kept) / count
        share = share if int(share * 2 * count // 2) == len(kept) else math.nextafter(share, 2)
        factor = {} if kept[0] == 1 else {"factor": kept[0]}
        return {"rope_type": "proportional", "partial_rotary_factor": share, **factor}
    return {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
        "original_max_position_embeddings": config.get("max_position_embeddings"),
    }  # fmt: skip
