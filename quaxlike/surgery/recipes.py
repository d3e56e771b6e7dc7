"""Recipes for `quantize`: they map weights to schemes."""

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from .._checked import checked
from .records import Record
from .select import Where, output_layer, select_matrices

#: A scheme, a scheme with its options, or None for weights that stay dense.
Scheme = str | tuple[str, Mapping[str, Any]] | None
#: A mapping from values of `where` to schemes. A weight follows the first rule that selects it.
Recipe = Mapping[Any, Scheme]


@dataclasses.dataclass(frozen=True)
class SchemeOfWeight:
    """What a recipe says about one weight."""

    rule: str
    """The rule for this weight, as written in the recipe."""
    record: Record
    scheme: str
    options: Mapping[str, Any]


def choices(
    model: Any, records: Mapping[str, Record], recipe: Recipe, exclude: str | Sequence[str] = ()
) -> dict[str, SchemeOfWeight]:
    """Returns what a recipe says about each weight, without the ones that stay dense.

    **Raises:** `ValueError` for a rule without an effect, and for one that is not a scheme.
    """
    if not recipe:
        raise ValueError("A recipe has at least one rule; found none.")
    seen, found = dict[str, str](), dict[str, SchemeOfWeight]()
    for where, scheme in recipe.items():
        name, options = _scheme_of(where, scheme)
        selected = select_matrices(model, records, where, exclude)
        new = {path: record for path, record in selected.items() if path not in seen}
        if not new:
            earlier = ", ".join(dict.fromkeys(repr(seen[path]) for path in selected))
            raise ValueError(
                f"The rule {where!r} has no effect: all that it selects follows {earlier}, which "
                "comes before it. Put it first, or leave it out."
            )
        seen |= dict.fromkeys(new, _text(where))
        if name is not None:
            found |= {
                path: SchemeOfWeight(_text(where), record, name, options) for path, record in new.items()
            }
    return found


def _scheme_of(where: Where, scheme: Any) -> tuple[str | None, Mapping[str, Any]]:
    match scheme:
        case str() | None:
            return scheme, {}
        case [str() as name, Mapping() as options]:
            return name, cast(Mapping[str, Any], options)
        case _:
            raise ValueError(
                f"The rule {where!r} takes a scheme, such as 'q4_k', a pair of a scheme and its options, "
                "such as ('nf4', {'double_quant': True}), or None to leave weights as they are; found "
                f"{scheme!r}."
            )


def _text(where: Any) -> str:
    if isinstance(where, str):
        return where
    return getattr(where, "__name__", None) or f"{where[0]} and {len(where) - 1} more"


# Named recipes -------------------------------------------------------------------------------------


def _k_quants(most: str) -> Callable[[Mapping[str, Record]], Recipe]:
    """llama.cpp's `_M` presets (`use_more_bits` of `llama-quant.cpp`): the head, and values and down
    projections of the first and last layers and of each third one between, in 6 bits."""

    def recipe(records: Mapping[str, Record]) -> Recipe:
        layers = {name: int(m[1]) for name in records if (m := _LAYER.search(name))}
        n = 1 + max(layers.values(), default=-1)
        eighth = n // 8

        def matters(i: Any) -> Any:
            return i < eighth or i >= 7 * n // 8 or (i - eighth) % 3 == 2

        more = [name for name, i in layers.items() if matters(i) and _MORE_BITS.fullmatch(name)]
        return {**_rule(output_layer(records), "q6_k"), **_rule(more, "q6_k"), "all-linear": most}

    return recipe


def _mxfp4_moe(records: Mapping[str, Record]) -> Recipe:
    experts = [name for name, x in records.items() if ".experts." in name and x.layout is not None]
    return {**_rule(experts, "mxfp4"), **_rule(output_layer(records), "q8_0"), "all-linear": "q8_0"}


def _rule(names: Sequence[str], scheme: Scheme) -> Recipe:
    return {tuple(names): scheme} if names else {}


_LAYER = re.compile(r"\.([0-9]+)\.")
_MORE_BITS = re.compile(r".*\.(v_proj|down_proj)\..*")

#: Functions that make a recipe for a model's arrays, by name.
RECIPES: dict[str, Callable[[Mapping[str, Record]], Recipe]] = {
    "q4_k_m": _k_quants("q4_k"),
    "q5_k_m": _k_quants("q5_k"),
    "mxfp4_moe": _mxfp4_moe,
    "nf4_qlora": lambda records: {"all-linear": ("nf4", {"double_quant": True})},
}


@checked
def from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a recipe of [`quaxlike.quantize`][] from a file of JSON or TOML.

    The file holds one table: patterns, and for each a scheme, a list of a scheme and a table of its options,
    or in JSON null. Rules keep their order.

    **Arguments:**

    - `path`: the file; its suffix is `.json` or `.toml`.

    **Returns:**

    The recipe, as a dict.

    **Raises:**

    `ValueError` for another suffix, or a file that is not such a table.

    !!! example

        ```python
        import tempfile, pathlib, quaxlike as ql

        file = pathlib.Path(tempfile.mkdtemp()) / "recipe.toml"
        file.write_text('"lm_head.*" = "q6_k"\\nall-linear = ["nf4", {}]')
        recipe = ql.quantize.from_file(file)
        ```
    """
    path = Path(path)
    readers = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise ValueError(f"A recipe is a file of JSON or TOML, and ends in .json or .toml; found {path}.")
    try:
        rules = readers[path.suffix](path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(rules, dict):
        raise ValueError(
            f"{path}: a recipe is a table of patterns and schemes; found {type(rules).__name__}."
        )
    recipe: dict[str, Any] = {}
    for where, scheme in rules.items():
        try:
            name, options = _scheme_of(where, scheme)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        recipe[where] = (name, options) if options else name
    return recipe
