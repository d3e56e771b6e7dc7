"""`select`: looks up a model's weights by their dotted names."""

import re
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from jaxtyping import PyTree

from .._checked import check_option, checked
from .records import Layouts, Record, how_to_state_layout, records_of
from .trees import layer_of, listing, matches, suggestion, tensors_of
from .weight_axes import FUSED

Where = str | Sequence[str] | Callable[[str, Any], bool]

# For consistency with PEFT and bitsandbytes, "all-linear" excludes the projection onto the vocabulary or onto
# labels, as well as routers. (Besides, programs loading quantised models expect routers in full precision.)
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out)(\..*)?")
_TOKENS = re.compile(r"(.*\.)?(embed_tokens|wte|embed_in)(\..*)?")


@checked
def select(model: PyTree, where: Where = "all-linear", *, layout: Layouts = None) -> dict[str, Any]:
    """Selects arrays from a model by name.

    This is useful for checking what the `where` argument of e.g. [`quaxlike.loraify`][] or
    [`quaxlike.quantize`][] selects.

    **Arguments:**

    - `model`: any pytree, for example an Equinox module or a (possibly nested) dict of arrays. A Value counts
        as a single array.
    - `where`: any of the following.

        - `"all-linear"`: the weights of all linear layers and experts, except for the output head (`lm_head`,
            or a classifier's `head_parts`) and routers (`gate` or `router` next to `experts`). Embeddings and
            convolutions aren't linear layers: select them by name. Layers are classified by
            [`quaxlike.layouts`][].
        - Any other string: a regular expression for the whole name.
        - A sequence of names, or their last components, such as `["q_proj", "v_proj"]`.
        - A callable `where(name, array)` returning whether to select this array.

        A layer's name refers to its weight (`weight`, `kernel`, `embedding`, or Haiku's `w`). If the model
        fuses several layers into one (e.g. `gate_proj` and `up_proj` into `gate_up_proj`), then select the
        fused layer by naming them all. Naming only some is an error, or a warning if their names also match
        other arrays.

    - `layout`: layouts that can't be inferred from the layer or the name, as in [`quaxlike.layouts`][].
        Default: none.

    **Returns:**

    A dict from names to arrays, in the same order as in the model.

    **Raises:**

    `ValueError` if `where`, or any entry in it, matches nothing (the message includes close matches). For
    `"all-linear"`, also if an array's layout, or whether it is a linear layer's weight, can't be determined.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        ql.select(mlp, [r"layers.0"]).keys()  # layers.0.weight
        ```
    """
    records = records_of(model, layout)
    return {name: records[name].array for name in _chosen(model, records, where)}


def _chosen(
    model: PyTree, records: Mapping[str, Record], where: Where, excluded: Container[str] = ()
) -> Collection[str]:
    """Returns the selected names, in the same order as in the model."""
    if where == "all-linear":
        return _all_linear(records, excluded)
    arrays = {name: record.array for name, record in records.items()}
    if callable(where):
        chosen = [name for name, array in arrays.items() if where(name, array)]
        if not chosen:
            raise ValueError(
                f"`where` selects none of the {len(arrays)} arrays of the model: {listing(arrays)}."
            )
        return chosen
    if not isinstance(where, str):
        check_option("select", "where", where, Sequence[str])
    return _by_name(model, arrays, where)


def _by_name(model: PyTree, arrays: Mapping[str, Any], where: str | Sequence[str]) -> list[str]:
    """Returns the names of the arrays matching a regular expression or any of the given names."""

    def hits(pattern: Any, names: Any) -> Any:
        return {x for x in names if matches(pattern, x, regex=isinstance(where, str))}

    forms = [(name, parts) for name in arrays for parts in _parts(model, name, arrays)]
    wanted, named, only_in_one = set[str](), set[str](), dict[str, set[str]]()
    for pattern in [where] if isinstance(where, str) else where:
        found, inside = hits(pattern, arrays), hits(pattern, (part for _, own in forms for part in own))
        if not found | inside:
            hint = suggestion(pattern, arrays)
            if isinstance(where, str) and any(matches(where, name, regex=False) for name in arrays):
                hint = f"A string is a regular expression for whole names; for their ends, pass [{where!r}]."
            raise ValueError(f"{pattern!r} matches none of the arrays of the model. {hint}")
        if not found:
            only_in_one[pattern] = inside
        wanted, named = wanted | found, named | inside
    wanted |= {name for name, parts in forms if named.issuperset(parts)}
    left = {name: parts for name, parts in forms if name not in wanted and named.intersection(parts)}
    for pattern, inside in only_in_one.items():
        fused = [_in_one(name, parts) for name, parts in left.items() if inside.intersection(parts)]
        if fused:
            raise ValueError(f"{pattern!r} matches none of the arrays of the model. {fused[0]}")
    if left:
        others = f", nor are {len(left) - 1} others" if len(left) > 1 else ""
        warnings.warn(f"{_in_one(*next(iter(left.items())))} It is not selected{others}.", stacklevel=5)
    return [name for name in arrays if name in wanted]


def _parts(model: PyTree, name: str, arrays: Container[str]) -> list[list[str]]:
    """Lists the names of a fused or stacked array's parts in other checkpoints.

    If the model stores parts separately as well, then their names refer to the separate ones instead.
    """
    layer = layer_of(name)
    above, dot, last = layer.rpartition(".")
    own = [f"{above}{dot}{part}{name.removeprefix(layer)}" for part in FUSED.get(last, ())]
    published = tensors_of(model, name)
    forms = [own, published if len(published) > 1 else []]
    return [form for form in forms if form and not any(part in arrays for part in form)]


def _in_one(name: str, parts: Iterable[str]) -> str:
    short = list(dict.fromkeys(layer_of(part).rpartition(".")[2] for part in parts))
    own = layer_of(name).rpartition(".")[2]
    return f"{name} is {' and '.join(short)} in one array: name {own}, or all of {', '.join(short)}."


def is_router(layer: str, arrays: Iterable[str]) -> bool:
    """Returns whether a layer is a router, i.e. next to some experts.

    The latter matters, because other modules have layers named `gate`, too.
    """
    module, _, own = layer.removesuffix(".proj").rpartition(".")
    return own in ("gate", "router") and any(name.startswith(f"{module}.experts.") for name in arrays)


def _is_output(name: str, record: Record) -> bool:
    return record.in_head or _HEAD.fullmatch(name) is not None


def _all_linear(records: Mapping[str, Record], excluded: Container[str]) -> list[str]:
    kinds = {
        name: record.layout.kind
        for name, record in records.items()
        if record.layout is not None and not (_is_output(name, record) or is_router(layer_of(name), records))
    }
    unknown = {name: records[name].array for name, kind in kinds.items() if kind == "unknown"}
    unknown = {name: array for name, array in unknown.items() if name not in excluded}
    if unknown:
        name, leaf = next(iter(unknown.items()))
        raise ValueError(
            f"'all-linear' cannot tell whether these are weights of linear layers, and which of their axes "
            f"are outputs: {listing(unknown)}. {how_to_state_layout(name, tuple(leaf.shape))}"
        )
    chosen = [name for name, kind in kinds.items() if kind in ("linear", "matrix")]
    if not chosen:
        arrays = {name: record.array for name, record in records.items()}
        others = [name for name, record in records.items() if record.layout is not None]
        hint = (
            f"; name the weights instead, e.g. where=[{others[0]!r}]"
            if others
            else ", nor any other weight of two or more axes and floating-point dtype"
        )
        raise ValueError(
            f"'all-linear' finds no linear layer in the model{hint}. The model has {listing(arrays)}."
        )
    return chosen


def _not_selected(records: Mapping[str, Record]) -> dict[str, Any]:
    """Returns the weights excluded by "all-linear". These can only be selected by name."""
    chosen = {*_all_linear(records, records)}
    weights = {name: record.array for name, record in records.items() if record.layout is not None}
    return {name: array for name, array in weights.items() if name not in chosen}


def output_layer(records: Mapping[str, Record]) -> list[str]:
    """Returns the name of the output head's weight or, if tied to an embedding, of the embedding's.

    The list is empty if there is neither, and for classifiers: their heads are trained in full.
    """
    if any(record.in_head for record in records.values()):
        return []
    matrices = [name for name, record in records.items() if record.layout is not None]
    own = [name for name in matrices if _HEAD.fullmatch(name)]
    return own or [name for name in matrices if _TOKENS.fullmatch(name)]


def select_matrices(
    model: PyTree,
    records: Mapping[str, Record],
    where: Where,
    exclude: str | Sequence[str],
    head: bool = False,
    may_exclude_all: bool = False,
) -> dict[str, Record]:
    """Returns the selected weights to adapt or quantise.

    This skips biases, norms and integer arrays. The output layer is included if `head=True`.
    """
    excluded = _chosen(model, records, exclude) if exclude else ()
    also = output_layer(records) if head else []
    if head and not also:
        raise ValueError(
            "`head` is for models with an output layer (lm_head, embed_out) or an embedding of tokens "
            "(embed_tokens, wte, embed_in). This one has neither; name its layer in `where`."
        )
    names = {*_chosen(model, records, where, excluded), *also}
    chosen = {name: record for name, record in records.items() if name in names}
    matrices = {name: record for name, record in chosen.items() if record.layout is not None}
    if not matrices:
        found = listing({name: record.array for name, record in chosen.items()})
        raise ValueError(
            f"`where` selects no weight of two or more axes and floating-point dtype, only {found}."
        )
    kept = {name: record for name, record in matrices.items() if name not in excluded}
    if not kept and not may_exclude_all:
        taken = listing({name: record.array for name, record in matrices.items()})
        others = _not_selected(records) if where == "all-linear" else {}
        hint = (
            "'all-linear' takes no convolutions, embeddings, routers and output layers; name in `where` what "
            f"you want of them: {listing(others)}."
            if others
            else "Exclude fewer of them, or name others in `where`."
        )
        raise ValueError(f"`exclude` leaves nothing of what `where` selects, which is {taken}. {hint}")
    return kept
