"""Selects the type for every weight in a GGUF file, given either a single type or a recipe."""

from pathlib import Path
from typing import Any, NamedTuple

from ..._checked import did_you_mean
from ...surgery.quantize import choices_of, is_recipe_file
from ...surgery.recipes import RECIPES, Recipe, from_file
from ...surgery.records import records_of
from ...surgery.select import output_layer
from .writer import TYPES, Mixture, file_type_of


class _Preset(NamedTuple):
    """The type for weights that a recipe doesn't cover, such as embeddings, and llama.cpp's file type."""

    rest: str
    file_type: int


_PRESETS = {
    "q4_k_m": _Preset("q4_k", 15),
    "q5_k_m": _Preset("q5_k", 17),
    "mxfp4_moe": _Preset("q8_0", 38),
}
#: The output layer's type given the type of all other weights. It is the layer most sensitive to rounding.
_OUTPUTS = {"mxfp4": "q8_0"} | dict.fromkeys(
    ("q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "iq4_nl", "iq4_xs"), "q6_k"
)


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

    - `model`: a model, whose arrays can be `jax.ShapeDtypeStruct`s.
    - `quantize`: one of `TYPES`, a recipe for [`quaxlike.quantize`][], or a recipe's name.

    **Raises:** `ValueError` if the name is unknown, if a rule doesn't match anything, or if GGUF has no type
    for a scheme.
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
    # A tied embedding is also the output layer, so any copy of it in the file should use the same type.
    output = next((kinds.pop(name) for name in output_layer(records_of(model)) if name in kinds), None)
    preset = _PRESETS.get(quantize) if isinstance(quantize, str) else None
    return Mixture(kinds, preset and preset.rest, output, preset and preset.file_type)
