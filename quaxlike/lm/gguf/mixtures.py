"""Selects the type for every weight in a GGUF file, given a type, one of llama.cpp's presets, or a recipe."""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..._checked import did_you_mean
from ...surgery.quantize import choices_of, is_recipe_file
from ...surgery.recipes import RECIPES, Recipe, from_file
from ...surgery.records import records_of
from ...surgery.select import output_layer
from .writer import TYPES, Mixture, file_type_of

#: The output layer's type given the type of all other weights. It is the layer most sensitive to rounding.
_OUTPUTS = {"mxfp4": "q8_0"} | dict.fromkeys(
    ("q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "iq4_nl", "iq4_xs"), "q6_k"
)


class _Preset(NamedTuple):
    """One of `llama-quantize`'s presets, i.e. a type for each kind of weight.

    **Attributes:**

    - `most`: for all weights not listed below.
    - `output`: for the output layer.
    - `file_type`: llama.cpp's number for the file type.
    - `values`, `shared_values`: for projections to values, and for those shared by four or more heads.
    - `outputs`, `outputs_of_8`: for attention's output projections, and for those beside eight experts.
    - `down`, `first_down`: for down projections, and for those in the first eighth of the layers.
    - `more_bits`: for values and down projections in the layers selected by `_has_more_bits`.
    - `experts`: for stacks of experts.
    """

    most: str
    output: str | None
    file_type: int
    values: str | None = None
    shared_values: str | None = None
    outputs: str | None = None
    outputs_of_8: str | None = None
    down: str | None = None
    first_down: str | None = None
    more_bits: str | None = None
    experts: str | None = None


def _plain_preset(name: str, **others: str) -> _Preset:
    return _Preset(name, _OUTPUTS.get(name), file_type_of(name), **others)


#: `llama-quantize` takes `q3_k`, `q4_k` and `q5_k` as other names of its `_m` presets. Here, these are types.
_PRESETS = {
    "q4_k_m": _Preset("q4_k", "q6_k", 15, more_bits="q6_k", outputs_of_8="q5_k"),
    "q5_k_m": _Preset("q5_k", "q6_k", 17, more_bits="q6_k"),
    "mxfp4_moe": _Preset("q8_0", "q8_0", 38, experts="mxfp4"),
    "q2_k": _plain_preset(
        "q2_k", values="q3_k", shared_values="q4_k", outputs="q3_k", outputs_of_8="q5_k", down="q3_k"
    ),
    **{name: _plain_preset(name) for name in ("q8_0", "q6_k", "q5_0", "q5_1", "q4_0", "q4_1")},
    **{
        name: _plain_preset(name, shared_values="q5_k", outputs_of_8="q5_k", first_down="q5_k")
        for name in ("iq4_nl", "iq4_xs")
    },
}
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def _has_more_bits(i: int, count: int) -> bool:
    return i < count // 8 or i >= 7 * count // 8 or (i - count // 8) % 3 == 2


def _of_blocks(preset: _Preset, tensors: Iterable[str], metadata: Mapping[str, Any]) -> dict[str, str]:
    """Returns the types for all tensors where a preset doesn't use the same type as for most.

    Source: `llama_tensor_get_type_impl` in llama.cpp's `llama-quant.cpp`, without an importance matrix.
    """
    architecture = metadata.get("general.architecture")

    def size(key: str, default: int) -> int:
        found = metadata.get(f"{architecture}.{key}") or default
        return found[0] if isinstance(found, list) else found

    layers, experts = size("block_count", 0), size("expert_count", 0)
    heads = size("attention.head_count", 0)
    shared = size("attention.head_count_kv", heads)
    sharing = heads // shared if shared else 0  # some layers of hybrid models have no heads
    is_70b = layers == 80 and (architecture == "qwen2" or (architecture == "llama" and sharing > 1))
    blocks = {m[0]: (int(m[1]), m[2]) for name in tensors if (m := _IN_BLOCK.fullmatch(name))}
    # Some layers have no values of their own. llama.cpp counts the others.
    of_values = sorted((i, name) for name, (i, part) in blocks.items() if part in ("attn_v", "attn_qkv"))
    place = {name: i for i, (_, name) in enumerate(of_values)}

    def values(name: str) -> str | None:
        if _has_more_bits(place[name], len(place)) and preset.more_bits:
            return preset.more_bits
        kind = (preset.shared_values if sharing >= 4 else None) or preset.values or preset.most
        return "q5_k" if is_70b and kind in ("q3_k", "q4_k") else kind

    def choice(name: str, layer: int, part: str) -> str | None:
        if preset.experts:
            return preset.experts if part.endswith("_exps") else None
        if experts == 8 and (name in place or part == "attn_k"):
            return "q8_0"
        if name in place:
            return values(name)
        if part == "attn_output":
            return preset.outputs_of_8 if experts == 8 else preset.outputs
        if not part.startswith("ffn_down"):
            return None
        if preset.more_bits and _has_more_bits(layer, layers):
            return preset.more_bits
        return (preset.first_down if layer < layers // 8 else None) or preset.down

    chosen = {name: choice(name, *where) for name, where in blocks.items()}
    return {name: kind for name, kind in chosen.items() if kind is not None}


def type_of(text: str | Path) -> str | Recipe:
    """Parses a command-line argument: the name of a type or recipe, or the path to a recipe file.

    **Raises:** `ValueError` if the file is damaged, or if the name is unknown (listing any similar names).
    """
    return from_file(text) if is_recipe_file(text) else _require_type(str(text))


def _require_type(name: str) -> str:
    known = [*TYPES, *RECIPES]
    if name in known:
        return name
    hint = did_you_mean(name.lower(), known, cutoff=0.5)
    raise ValueError(f"GGUF has no type {name!r}.{hint} There are {', '.join(known)}.")


def mixture_of(model: Any, quantize: str | Recipe) -> Mixture:
    """Selects a type for each array in a model.

    **Arguments:**

    - `model`: a model. Its arrays can be `jax.ShapeDtypeStruct`s.
    - `quantize`: one of `TYPES`, a recipe for [`quaxlike.quantize`][], or a recipe's name.

    **Raises:** `ValueError` if the name is unknown, if a rule matches nothing, or if GGUF has no type for a
    scheme.
    """
    if isinstance(quantize, str) and _require_type(quantize) in _PRESETS:
        preset = _PRESETS[quantize]
        return Mixture({}, preset.most, preset.output, preset.file_type, partial(_of_blocks, preset))
    if quantize in TYPES:
        return Mixture({}, quantize, _OUTPUTS.get(quantize), file_type_of(quantize))
    chosen = choices_of(model, quantize)
    for choice in chosen.values():
        if choice.scheme not in TYPES or choice.options:
            told = f"{choice.scheme!r} with {', '.join(choice.options)}" if choice.options else choice.scheme
            raise ValueError(
                f"The rule {choice.rule!r}: GGUF has no type for {told}. Its types are {', '.join(TYPES)}, "
                "without options."
            )
    kinds = {name: choice.scheme for name, choice in chosen.items()}
    # A tied embedding is also the output layer, so any copy of it in the file should use the same type.
    output = next((kinds.pop(name) for name in output_layer(records_of(model)) if name in kinds), None)
    return Mixture(kinds, None, output)
