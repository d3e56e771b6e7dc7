"""The weights of a model by their dotted names."""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ..core.values import is_value

Where = str | Sequence[str] | Callable[[str, Any], bool]

# Kinds of stacks with a matrix for each expert, by what their last two axes are. A module says which of its
# arrays are some by an attribute `stacks_of_matrices`: kinds by names.
EXPERTS = ("experts", "experts, (in, out)")

# What "all-linear" leaves out by name, since nothing else tells it from a linear layer: embeddings, where
# the model is made of plain arrays, and the projection onto the vocabulary, as PEFT and bitsandbytes do.
_EMBEDDING = re.compile(r"(.*[._])?(wte|wpe|emb|embed\w*)([._].*)?")
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out)(\..*)?")


def path_of(key_path: Sequence[Any]) -> str:
    """The dotted name of a leaf, as state dicts write it.

    **Arguments:**

    - `key_path`: a key path of `jax.tree_util.tree_flatten_with_path` and its relatives.

    **Returns:**

    A name such as `"layers.0.attention.query.weight"`.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        [ql.path_of(path) for path, leaf in jax.tree_util.tree_leaves_with_path(mlp)]
        ```
    """
    return jtu.keystr(tuple(key_path), simple=True, separator=".")


def select(model: PyTree, where: Where = "all-linear") -> dict[str, Any]:
    """The arrays of a model that `where` names.

    **Arguments:**

    - `model`: any pytree: an Equinox module, or a flat or nested dict of arrays keyed by (dotted) names.
        A Value in it counts as one array.
    - `where`: one of

        - `"all-linear"`: the weights of all linear layers and experts, embeddings and the output head
          (`lm_head`) apart. Where there are no layers, only arrays: all matrices whose names are not those
          of embeddings.
        - any other string: a regular expression that has to match the whole name;
        - a sequence of names, or of their last components, such as `["q_proj", "v_proj"]`;
        - a callable that takes name and array and says whether to take it.

        The name of a layer stands for its `weight`.

    **Returns:**

    The arrays by name, in the order of the model.

    **Raises:**

    `ValueError` if `where`, or an entry of it, matches nothing; with near misses.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        ql.select(mlp, [r"layers.0"]).keys()  # layers.0.weight
        ```
    """
    arrays = named_arrays(model)
    if callable(where):
        chosen = {name: leaf for name, leaf in arrays.items() if where(name, leaf)}
        if not chosen:
            raise ValueError(
                f"`where` selects none of the {len(arrays)} arrays of the model: {_some(arrays)}."
            )
        return chosen
    if where == "all-linear":
        kinds = layer_kinds(model)
        chosen = {
            name: leaf
            for name, leaf in arrays.items()
            if kinds[name] in ("linear", "matrix", *EXPERTS) and not _HEAD.fullmatch(name)
        }
        if not chosen:
            raise ValueError(
                f"'all-linear' finds no linear layer in the model; name the weights instead: {_some(arrays)}."
            )
        return chosen
    wanted: set[str] = set()
    for pattern in [where] if isinstance(where, str) else where:
        found = {name for name in arrays if matches(pattern, name, regex=isinstance(where, str))}
        if not found:
            raise ValueError(f"{pattern!r} matches none of the arrays of the model. {near(pattern, arrays)}")
        wanted |= found
    return {name: leaf for name, leaf in arrays.items() if name in wanted}


def select_matrices(model: PyTree, where: Where, exclude: str | Sequence[str] = ()) -> dict[str, Any]:
    """The selected weights that can be adapted or quantised: no biases, norms or integers."""
    chosen = select(model, where)
    matrices = {
        name: leaf
        for name, leaf in chosen.items()
        if _is_matrix(leaf) and not name.rpartition(".")[2].startswith("bias")
    }
    if not matrices:
        raise ValueError(
            f"`where` selects no weight of two or more axes and floating-point dtype, only {_some(chosen)}."
        )
    if not exclude:
        return matrices
    excluded = select(model, exclude)
    matrices = {name: leaf for name, leaf in matrices.items() if name not in excluded}
    if not matrices:
        raise ValueError("`exclude` leaves nothing of what `where` selects.")
    return matrices


def replace(model: PyTree, new: Mapping[str, Any]) -> PyTree:
    """The model with other arrays under some of its names; a name may be one that held None."""
    return jtu.tree_map_with_path(
        lambda path, leaf: new.get(path_of(path), leaf),
        model,
        is_leaf=lambda x: x is None or is_value(x),
    )


# -------------------------------------------------------------------------------------------------
# Names
# -------------------------------------------------------------------------------------------------


def named_arrays(model: PyTree) -> dict[str, Any]:
    """All arrays and Values of a model by name."""
    return {path_of(path): leaf for path, leaf in _leaves(model)}


def _leaves(model: PyTree) -> list[tuple[Any, Any]]:
    return [
        (path, leaf)
        for path, leaf in jtu.tree_leaves_with_path(model, is_leaf=is_value)
        if is_value(leaf) or eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) or _is_numpy(leaf)
    ]


def _is_numpy(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def layer_of(name: str) -> str:
    """The layer whose weight `name` is: what PEFT calls a module."""
    return name.removesuffix(".weight")


def matches(pattern: str, name: str, *, regex: bool) -> bool:
    """Whether a name, or the layer whose weight it is, matches: wholly, or by its last components."""
    names = {name, layer_of(name)}
    if regex:
        return any(re.fullmatch(pattern, n) for n in names)
    return any(n == pattern or n.endswith(f".{pattern}") for n in names)


def near(pattern: str, arrays: Mapping[str, Any]) -> str:
    """A hint for a pattern that matches none of these names."""
    plain = re.sub(r"[\\^$()*+?\[\]{}|]|\.(?=[*+])", "", pattern).strip(".")
    layers = list(dict.fromkeys(layer_of(name) for name in arrays))
    by_tail: dict[str, str] = {}
    depth = plain.count(".") + 1
    for layer in layers:
        by_tail.setdefault(".".join(layer.split(".")[-depth:]), layer)
    near = [by_tail[tail] for tail in difflib.get_close_matches(plain, by_tail, n=3, cutoff=0.5)]
    near += [n for n in difflib.get_close_matches(plain, layers, n=3) if n not in near]
    if near:
        return f"Did you mean {', '.join(map(repr, near))}?"
    return f"There are {_some(arrays)}."


def _some(arrays: Mapping[str, Any], at_most: int = 8) -> str:
    names = [f"{name} {tuple(leaf.shape)}" for name, leaf in arrays.items()]
    more = len(names) - at_most
    return ", ".join(names[:at_most]) + (f" and {more} more" if more > 0 else "") or "no arrays"


def _is_matrix(leaf: Any) -> bool:
    return len(leaf.shape) >= 2 and jnp.issubdtype(leaf.dtype, jnp.floating)


# -------------------------------------------------------------------------------------------------
# Layers
# -------------------------------------------------------------------------------------------------


def layer_kinds(model: PyTree) -> dict[str, str | None]:
    """For each array: "linear", "embedding", "conv" or "other conv" (grouped or transposed) if it is the
    weight of such a layer, "experts" if it is a stack of matrices (out, in), or "experts, (in, out)";
    "matrix" if it may be that of a linear layer for all that is known, else None."""
    return {path_of(path): _kind(owner_of(model, path), path, leaf) for path, leaf in _leaves(model)}


def owner_of(model: PyTree, path: Sequence[Any]) -> Any:
    """The node that holds the leaf; None where its pytree type does not say."""
    node: Any = model
    for key in path[:-1]:
        match key:
            case jtu.GetAttrKey(name):
                node = getattr(node, name, None)
            case jtu.SequenceKey(idx):
                node = node[idx]
            case jtu.DictKey(key):
                node = node[key]
            case _:
                return None
    return node


def _kind(owner: Any, path: Sequence[Any], leaf: Any) -> str | None:
    if not _is_matrix(leaf):
        return None
    name, field = path_of(path), path_of(path[-1:]).split(".")[-1]
    if field.startswith("bias"):  # of stacked layers
        return None
    stacks: Mapping[str, str] = getattr(owner, "stacks_of_matrices", {})
    if field in stacks:
        return stacks[field]
    if isinstance(owner, eqx.nn.Linear):
        return "linear"
    if isinstance(owner, eqx.nn.Conv | eqx.nn.ConvTranspose):
        return "conv" if isinstance(owner, eqx.nn.Conv) and owner.groups == 1 else "other conv"
    if isinstance(owner, eqx.nn.LayerNorm | eqx.nn.RMSNorm | eqx.nn.GroupNorm):
        return None
    if isinstance(owner, eqx.nn.Embedding) or _EMBEDDING.fullmatch(name):
        return "embedding"
    if isinstance(owner, eqx.Module) and not field.startswith(("weight", "kernel")):
        return None
    return "matrix" if len(leaf.shape) == 2 else None
