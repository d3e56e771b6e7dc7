"""Recipes for `quantize`, i.e. mappings from weights to schemes."""

import dataclasses
import functools
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from .._checked import checked, did_you_mean
from ..arrays.adapted import innermost
from ..arrays.layout import Layout
from ..arrays.quantized import (
    CODECS,
    AbstractQuantizedArray,
    BlockArray,
    FP4Array,
    Int4Array,
    Int8Array,
    NestedScales,
    NF4Array,
)
from .records import Record
from .select import Where, output_layer, select_matrices
from .weight_axes import stored_order

#: A scheme, a pair of a scheme and its options, or `None` to keep weights dense.
Scheme = str | tuple[str, Mapping[str, Any]] | None
#: A mapping from values of `where` to schemes. The first rule to select a weight is used.
Recipe = Mapping[Any, Scheme]

_TYPES: dict[str, type[AbstractQuantizedArray]] = {
    "nf4": NF4Array, "fp4": FP4Array, "int8": Int8Array, "int4": Int4Array,
}  # fmt: skip
#: Functions that quantise an array, by the names of schemes.
SCHEMES: dict[str, Callable[..., Any]] = {
    **{name: functools.partial(BlockArray.quantize, codec=name) for name in CODECS},
    **{name: kind.quantize for name, kind in _TYPES.items()},
}
#: A rule's options for rounding in products. They are set once an array is quantised.
ROUNDING = "activations", "rounds_gradients"
# The scheme itself determines the codec.
_OPTIONS = [
    name
    for name, parameter in inspect.signature(AbstractQuantizedArray.quantize).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name != "codec"
] + [*ROUNDING]


def require_scheme(name: str, *, recipes: bool = True) -> str:
    """Checks that a scheme or recipe of this name exists, and returns the name.

    **Raises:** `ValueError` if it doesn't; the message includes close matches.
    """
    known = [*SCHEMES, *(RECIPES if recipes else ())]
    if name in known:
        return name
    if name in RECIPES:
        raise ValueError(f"{name!r} is a recipe itself, and a rule takes a scheme, such as 'q4_k'.")
    hint = did_you_mean(name.lower().replace("-", ""), known, cutoff=0.5)
    schemes = ", ".join([*_TYPES, *(codec for codec in CODECS if codec not in _TYPES)])
    and_recipes = f"; the recipes are {', '.join(RECIPES)}" if recipes else ""
    raise ValueError(f"quantize has no scheme {name!r}.{hint} The schemes are {schemes}{and_recipes}.")


def require_options(scheme: str, options: Mapping[str, Any]) -> None:
    """Raises `TypeError`, with close matches, if a scheme lacks one of these options."""
    for name in options:
        if name not in _OPTIONS:
            hint = did_you_mean(str(name), _OPTIONS)
            known = ", ".join(_OPTIONS)
            raise TypeError(f"The scheme {scheme!r} has no option {name!r}.{hint} It has {known}.")


@dataclasses.dataclass(frozen=True)
class SchemeOfWeight:
    """The scheme chosen by a recipe for a particular weight."""

    rule: str
    """This weight's rule, as written in the recipe."""
    record: Record
    scheme: str
    options: Mapping[str, Any]


def choices(
    model: Any,
    records: Mapping[str, Record],
    recipe: Recipe,
    exclude: str | Sequence[str] = (),
    *,
    is_general: bool = False,
) -> dict[str, SchemeOfWeight]:
    """Applies a recipe, and returns the schemes of the weights it quantises, by name.

    Set `is_general` for a recipe that wasn't written for a particular model: its rules may then have no
    effect, which is otherwise an error.

    **Raises:** `ValueError` if a rule has no effect, or has an invalid scheme.
    """
    if not recipe:
        raise ValueError("A recipe has at least one rule; found none.")
    seen, found = dict[str, str](), dict[str, SchemeOfWeight]()
    for where, scheme in recipe.items():
        name, options = _scheme_of(where, scheme)
        rule = repr(_text(where))
        try:
            if name is not None:
                require_options(require_scheme(name, recipes=False), options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"The rule {rule}: {error}") from None
        try:
            selected = select_matrices(model, records, where, exclude, may_exclude_all=True)
        except ValueError as error:
            told = str(error)
            raise ValueError(told if told.startswith(rule) else f"The rule {rule}: {told}") from error
        new = {path: record for path, record in selected.items() if path not in seen}
        if selected and not new and not is_general:
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
                f"{scheme!r}.{_hint(scheme)}"
            )


def _hint(scheme: Any) -> str:
    if not isinstance(scheme, Mapping):
        return ""
    return " A name with dots is put in quotes in TOML; otherwise, each of its parts is a table."


def scheme_text(scheme: Scheme) -> str:
    """Formats a scheme and its options for display."""
    name, options = _scheme_of("", scheme)
    return ", ".join([str(name), *(f"{option}={value}" for option, value in options.items())])


def _text(where: Any) -> str:
    if isinstance(where, str):
        return where
    if callable(where):
        return getattr(where, "__name__", type(where).__name__)
    if not isinstance(where, Sequence) or not where:
        return str(where)
    return where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"


#: The key under which a safetensors header stores the model's recipe, as JSON.
RECIPE_ENTRY = "recipe"


def _recipe_in_safetensors(file: BinaryIO) -> Any:
    head = file.read(8)
    text = file.read(min(int.from_bytes(head, "little"), 100_000_000))
    entries = json.loads(text).get("__metadata__", {})
    if RECIPE_ENTRY not in entries:
        raise ValueError("nothing in it says how its model is quantised")
    return json.loads(entries[RECIPE_ENTRY])


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict[str, Any]()
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {key!r} twice")
        found[key] = value
    return found


#: Parsers for recipe files, by suffix.
RECIPE_FILES: dict[str, Callable[[BinaryIO], Any]] = {
    ".json": functools.partial(json.load, object_pairs_hook=_without_repeats),
    ".toml": tomllib.load,
    ".safetensors": _recipe_in_safetensors,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}


def recipe_of(arrays: Mapping[str, Any], layouts: Mapping[str, Layout | None]) -> dict[str, Scheme]:
    """Reconstructs the recipe of quantised arrays, and of adapters with a quantised base.

    Applying this recipe to dense arrays with the same names and `layouts` gives back the same types.
    Calibration's results (`calibrate`, `maxima`) are not part of a recipe. Layers with the same scheme share
    a rule, to keep the recipe short. It is empty if nothing is quantised.
    """
    groups: dict[str, dict[str, tuple[str, Mapping[str, Any]] | None]] = {}
    for name, x in arrays.items():
        parts = _LAYER.split(name, maxsplit=1)
        pattern = r"\.{}\.".join(map(re.escape, parts[::2]))
        groups.setdefault(pattern, {})[parts[1] if len(parts) > 1 else ""] = _found_scheme(
            innermost(x), layouts.get(name)
        )
    rules: dict[str, Scheme] = {}
    for pattern, found in groups.items():
        for scheme in {str(x): x for x in found.values() if x is not None}.values():
            layers = [layer for layer, own in found.items() if own == scheme]
            some = layers[0] if len(layers) == 1 else f"({'|'.join(layers)})"
            numbers = "[0-9]+" if 1 < len(layers) == len(found) else some
            name, options = scheme
            rules[pattern.replace("{}", numbers)] = scheme if options else name
    return rules


def _found_scheme(x: Any, layout: Layout | None) -> tuple[str, Mapping[str, Any]] | None:
    if not isinstance(x, AbstractQuantizedArray):
        return None
    scheme = _NAMES.get(type(x), x.codec.name)
    if type(x) not in _NAMES and (not isinstance(x, BlockArray) or CODECS.get(scheme) != x.codec):
        return None
    options: dict[str, Any] = {}
    if x.block_size not in (None, x.codec.block):
        options["block_size"] = x.block_size
    if isinstance(x.scale, NestedScales):
        options["double_quant"] = True
    if (axis := _axis_of(x, layout)) is not None:
        options["axis"] = axis
    if x.gradients == "train":
        options["train_scales"] = True
    for name in ("compute", *ROUNDING):
        if value := getattr(x, name):
            options[name] = value
    return scheme, options


def _axis_of(x: AbstractQuantizedArray, layout: Layout | None) -> int | None:
    """Returns the axis along which blocks run, or `None` if this is the default of `quantize`."""
    if layout is None or not layout.is_known:
        return None
    n = len(x.permutation)
    order = [x.permutation.index(i) for i in range(n)]
    # Count from the end, so that a stack of layers has the same rule as its layers.
    moved = [*(i for i in range(n) if i != order[-1]), order[-1]]
    return order[-1] - n if order == moved and order != stored_order(layout, n) else None


# Named recipes -------------------------------------------------------------------------------------


def _k_quants(most: str) -> Callable[[Mapping[str, Record]], Recipe]:
    """Returns the recipe for one of llama.cpp's `_M` presets (`llama-quant.cpp`).

    This uses 6 bits for the head, and also for values (or an array of fused queries, keys and values), inputs
    of linear attention, and the down projections in the first eighth of the layers, the last eighth, and
    every third layer in between. In a mixture of eight experts, keys and values use 8 bits.
    """

    def recipe(records: Mapping[str, Record]) -> Recipe:
        layers = {name: int(m[1]) for name in records if (m := _LAYER.search(name))}
        n = 1 + max(layers.values(), default=-1)
        eighth = n // 8

        def matters(i: Any) -> Any:
            return i < eighth or i >= 7 * n // 8 or (i - eighth) % 3 == 2

        more = [name for name, i in layers.items() if matters(i) and _MORE_BITS.fullmatch(name)]
        keys = output = list[str]()
        if _num_experts(records) == 8:  # A special case of llama.cpp for Mixtral.
            keys = [name for name in layers if _KEYS_AND_VALUES.fullmatch(name)]
            output = [name for name in layers if ".o_proj." in name] if most == "q4_k" else []
        rules = {
            **_rule(output_layer(records), "q6_k"),
            **_rule(keys, "q8_0"),
            **_rule(output, "q5_k"),
            **_rule([name for name in more if name not in keys], "q6_k"),
        }
        return {**rules, "all-linear": most}

    return recipe


def _num_experts(records: Mapping[str, Record]) -> int:
    """Returns the number of experts per layer, either stacked or separate."""
    stacks = [x.array.shape[0] for name, x in records.items() if _STACK.search(name) and x.layout is not None]
    single = [1 + int(m[1]) for name in records if (m := _EXPERT.search(name))]
    return max([*stacks, *single], default=0)


def _mxfp4_moe(records: Mapping[str, Record]) -> Recipe:
    experts = [name for name, x in records.items() if ".experts." in name and x.layout is not None]
    return {**_rule(experts, "mxfp4"), **_rule(output_layer(records), "q8_0"), "all-linear": "q8_0"}


def _rule(names: Sequence[str], scheme: Scheme) -> Recipe:
    return {tuple(names): scheme} if names else {}


_LAYER = re.compile(r"\.([0-9]+)\.")
_STACK = re.compile(r"\.experts\.(gate_up|down)_proj$")
_EXPERT = re.compile(r"\.experts\.([0-9]+)\.")
_KEYS_AND_VALUES = re.compile(r".*\.[kv]_proj\..*")
# The names in Llama, BERT, GPT-2 and ModernBERT.
_MORE_BITS = re.compile(
    r".*\.(v_proj|value|qkv_proj|c_attn|Wqkv|in_proj_qkvz?|down_proj|[0-9]+\.output\.dense|mlp\.c_proj|mlp\.Wo)"
    r"(\..*)?"
)

#: Named recipes, as functions mapping a model's records to a recipe.
RECIPES: dict[str, Callable[[Mapping[str, Record]], Recipe]] = {
    "q4_k_m": _k_quants("q4_k"),
    "q5_k_m": _k_quants("q5_k"),
    "mxfp4_moe": _mxfp4_moe,
    "nf4_qlora": lambda records: {"all-linear": ("nf4", {"double_quant": True})},
}


@checked
def from_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a recipe for [`quaxlike.quantize`][] from a JSON or TOML file.

    The file should contain a single table, mapping each pattern to either a scheme, a list with a scheme and
    a table of options, or (in JSON only) null. The order of rules is preserved. For a file written by
    [`quaxlike.files.safetensors.save`][], this reads its model's recipe.

    **Arguments:**

    - `path`: the path of a `.json`, `.toml` or `.safetensors` file.

    **Returns:**

    The recipe, as a dict.

    **Raises:**

    `FileNotFoundError` if the file doesn't exist. `ValueError` if it has any other suffix, or doesn't contain
    a valid recipe.

    !!! example

        ```python
        import tempfile, pathlib, quaxlike as ql

        file = pathlib.Path(tempfile.mkdtemp()) / "recipe.toml"
        file.write_text('"lm_head.*" = "q6_k"\\nall-linear = ["nf4", {}]')
        recipe = ql.quantize.from_file(file)
        ```
    """
    path = Path(path)
    if path.suffix not in RECIPE_FILES:
        raise ValueError(
            "A recipe is a file of JSON or TOML, or that of a model, and ends in "
            f"{', '.join(RECIPE_FILES)}; found {path}."
        )
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: it must hold a recipe.")
    try:
        with open(path, "rb") as file:
            rules = RECIPE_FILES[path.suffix](file)
        if not isinstance(rules, dict):
            raise ValueError(f"a recipe is a table of patterns and schemes; found {type(rules).__name__}.")
        schemes = {where: _scheme_of(where, scheme) for where, scheme in rules.items()}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return {where: (name, options) if options else name for where, (name, options) in schemes.items()}
