"""The type of each weight in a GGUF file: one type for nearly all weights, or those of a recipe."""

from pathlib import Path
from typing import Any, NamedTuple

from ..._checked import did_you_mean
from ...surgery.quantize import choices_of, is_recipe_file
from ...surgery.recipes import RECIPES, Recipe, from_file
from ...surgery.records import records_of
from ...surgery.select import output_layer
from .writer import TYPES, Mixture, file_type_of


class _Preset(NamedTuple):
    """The type for weights outside a recipe, such as embeddings, and llama.cpp's number for such a file."""

    rest: str
    file_type: int


_PRESETS = {
    "q4_k_m": _Preset("q4_k", 15),
    "q5_k_m": _Preset("q5_k", 17),
    "mxfp4_moe": _Preset("q8_0", 38),
}
#: The type of the output layer if other weights have this type. Few bits harm the output layer most.
_OUTPUTS = {"mxfp4": "q8_0"} | dict.fromkeys(
    ("q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "iq4_nl", "iq4_xs"), "q6_k"
)


def type_of(text: str | Path) -> str | Recipe:
    """Parses a type as commands take it: the name of a type or recipe, or a file with a recipe.

    **Raises:** `ValueError` for an unknown name, with similar names, or a damaged file.
    """
    return from_file(text) if is_recipe_file(text) else _require_type(str(text))


def _require_type(name: str) -> str:
    known = [*TYPES, *RECIPES]
    if name in known:
        return name
    hint = did_you_mean(name.lower(), known, cutoff=0.5)
    raise ValueError(f"GGUF has no type {name!r}.{hint} There are {', '.join(known)}.")


def mixture_of(model: Any, quantize: str | Recipe) -> Mixture:
    """Chooses a type for each array of a model.

    **Arguments:**

    - `model`: a model, or one with shapes for arrays.
    - `quantize`: one of `TYPES`, a recipe of [`quaxlike.quantize`][], or the name of a recipe.

    **Raises:** `ValueError` for an unknown name, with similar names; for a rule that matches nothing; for a
    scheme that GGUF has no type for.
    """
    if isinstance(quantize, str) and _require_type(quantize) in TYPES:
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
    # A tied embedding is also the output layer. Files that store a copy of it give that the same type.
    output = next((kinds.pop(name) for name in output_layer(records_of(model)) if name in kinds), None)
    preset = _PRESETS.get(quantize) if isinstance(quantize, str) else None
    return Mixture(kinds, preset and preset.rest, output, preset and preset.file_type)
