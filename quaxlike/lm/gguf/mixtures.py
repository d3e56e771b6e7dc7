"""The type of each weight of a GGUF file: one for all but the output layer, or those of a recipe."""

from pathlib import Path
from typing import Any, NamedTuple

from ..._checked import did_you_mean
from ...surgery.quantize import choices_of, is_recipe_file
from ...surgery.recipes import RECIPES, Recipe, from_file
from ...surgery.records import records_of
from ...surgery.select import output_layer
from .writer import TYPES, Mixture, file_type_of


class _Preset(NamedTuple):
    """What a recipe leaves out, such as embeddings, in a file; and llama.cpp's number of such files."""

    rest: str
    file_type: int


_PRESETS = {
    "q4_k_m": _Preset("q4_k", 15),
    "q5_k_m": _Preset("q5_k", 17),
    "mxfp4_moe": _Preset("q8_0", 38),
}
#: The type of the output layer, which few bits harm most, beside weights of another type.
_OUTPUTS = {"mxfp4": "q8_0"} | dict.fromkeys(
    ("q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "iq4_nl", "iq4_xs"), "q6_k"
)


def type_of(text: str | Path) -> str | Recipe:
    """A type or recipe as commands take it: its name, or the path of a file with a recipe.

    **Raises:** `ValueError` for an unknown name, with near misses, and as `quantize.from_file` does.
    """
    return from_file(text) if is_recipe_file(text) else _require_type(str(text))


def _require_type(name: str) -> str:
    known = [*TYPES, *RECIPES]
    if name in known:
        return name
    hint = did_you_mean(name.lower(), known, cutoff=0.5)
    raise ValueError(f"GGUF has no type {name!r}.{hint} There are {', '.join(known)}.")


def mixture_of(model: Any, quantize: str | Recipe) -> Mixture:
    """The types of the arrays of a model.

    **Arguments:**

    - `model`: whose arrays may be shapes.
    - `quantize`: one of `TYPES`, or a recipe of [`quaxlike.quantize`][] or its name.

    **Raises:** `ValueError` for another name, with near misses; for a rule without an effect, and for a
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
    # Of a tied embedding, some files have a copy, which is the output layer then.
    output = next((kinds.pop(name) for name in output_layer(records_of(model)) if name in kinds), None)
    preset = _PRESETS.get(quantize) if isinstance(quantize, str) else None
    return Mixture(kinds, preset and preset.rest, output, preset and preset.file_type)
