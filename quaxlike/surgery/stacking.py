"""Stacking identical layers into a single module, so that `jax.lax.scan` only compiles them once.

All layers must have the same structure, shapes and dtypes: a scan runs the same program for each of them, so
it would silently ignore any other difference.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray, frozen_parts, knows_axes
from ..core.quaxify import quaxify
from ..core.values import is_value
from .trees import path_of


@checked
def stack_layers(layers: Sequence[PyTree]) -> PyTree:
    """Stacks layers into a single layer, along a new leading axis in every array.

    Iterate over the result with `jax.lax.scan`: compile time then doesn't depend on the number of layers.
    Adapters and quantised weights are stacked part by part, without merging or dequantising them. Untrained
    parts that all adapters share, such as VeRA's random matrices, are only stored once.

    **Arguments:**

    - `layers`: modules (or any other pytrees) with the same structure, shapes and dtypes. Leaves other than
        arrays, such as activation functions, must be equal in all layers.

    **Returns:**

    A layer of the same type.

    **Raises:**

    `ValueError` if there are no layers, or if they differ (the message includes the first difference).

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        keys = jax.random.split(jax.random.key(0), 8)
        layers = [ql.quantize(eqx.nn.Linear(64, 64, key=key), "nf4") for key in keys]
        stacked = ql.stack_layers(layers)

        @ql.quaxify
        def run(stacked, x):
            return jax.lax.scan(lambda x, layer: (layer(x), None), x, stacked)[0]

        run(stacked, jnp.ones(64))
        ```
    """
    if not isinstance(layers, Iterable):
        raise TypeError(f"stack_layers takes a sequence of layers; found {layers!r}.")
    layers = list(layers)
    if not layers:
        raise ValueError("stack_layers takes at least one layer; found none.")
    flat = [jtu.tree_flatten_with_path(layer, is_leaf=is_value)[0] for layer in layers]
    structure = jtu.tree_structure(layers[0], is_leaf=is_value)
    for i, layer in enumerate(layers[1:], 1):
        if jtu.tree_structure(layer, is_leaf=is_value) != structure:
            names, first_names = ({path_of(path) for path, _ in flat[j]} for j in (i, 0))
            only = sorted(first_names ^ names)
            what = f"have different arrays: {', '.join(only)}" if only else "differ in their static fields"
            raise ValueError(f"stack_layers takes equal layers; layers 0 and {i} {what}.")
    stacked = [
        _stacked(path_of(column[0][0]), [leaf for _, leaf in column]) for column in zip(*flat, strict=True)
    ]
    return jtu.tree_unflatten(structure, stacked)


@checked
def unstack_layers(stacked: PyTree) -> list[Any]:
    """Splits the result of [`quaxlike.stack_layers`][] back into individual layers.

    **Arguments:**

    - `stacked`: a stacked layer. All its arrays must have a leading axis of the same size.

    **Returns:**

    A list of layers.

    **Raises:**

    `ValueError` if any array lacks a leading axis, if their sizes differ, or if indexing into the leading
    axis of a Value doesn't produce a Value of the same type.
    """
    leaves, structure = jtu.tree_flatten_with_path(stacked, is_leaf=is_value)
    sizes = {path_of(path): leaf.shape[0] if leaf.shape else None for path, leaf in leaves if _is_array(leaf)}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no arrays"
        raise ValueError(f"unstack_layers takes arrays with a leading axis of one size; found {found}.")
    n: Any = next(iter(sizes.values()))
    columns = [_rows(path_of(path), leaf, n) if _is_array(leaf) else [leaf] * n for path, leaf in leaves]
    return [jtu.tree_unflatten(structure, row) for row in zip(*columns, strict=True)]


def _is_array(leaf: Any) -> bool:
    return is_value(leaf) or eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _stacked(name: str, leaves: list[Any]) -> Any:
    first = leaves[0]
    if not _is_array(first):
        differing = next((i for i, leaf in enumerate(leaves) if leaf is not first and leaf != first), None)
        if differing is not None:
            raise ValueError(
                f"stack_layers takes equal layers; {name} is {first!r} in layer 0 and "
                f"{leaves[differing]!r} in layer {differing}."
            )
        return first
    for i, leaf in enumerate(leaves):
        if _form(leaf) != _form(first):
            raise ValueError(
                f"stack_layers takes equal layers; {name} is {_described(first)} in layer 0 and "
                f"{_described(leaf)} in layer {i}."
            )
    if not is_value(first):
        return _stack(*leaves)
    shared = _shared(leaves)
    own = [leaf.replace(**dict.fromkeys(shared)) for leaf in leaves] if shared else leaves
    out: Any = jtu.tree_map(_stack, *own)
    out = out.replace(**shared) if shared else out
    wanted = (len(leaves), *first.shape)
    if tuple(out.shape) != wanted:  # For Values not deriving their shape from their parts.
        out = quaxify(jnp.stack)(leaves)
    if type(out) is not type(first) or out.leading_axis() is NotImplemented:
        raise ValueError(f"{name}: {type(first).__name__} of shape {first.shape} cannot be stacked.")
    return out


def _shared(leaves: Sequence[Any]) -> dict[str, Any]:
    """Returns the untrained parts that are the same array in every layer. These are only stored once."""
    first = leaves[0]
    if not isinstance(first, AdaptedArray) or not knows_axes(first):
        return {}
    parts = {name: getattr(first, name) for name in frozen_parts(first)}

    def same(name: Any, part: Any) -> Any:
        return all(getattr(leaf, name) is part for leaf in leaves)

    return {name: part for name, part in parts.items() if part is not None and same(name, part)}


def _stack(*parts: Any) -> Any:
    if isinstance(parts[0], jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(parts), *parts[0].shape), parts[0].dtype)
    return jnp.stack(parts)


def _form(leaf: Any) -> Any:
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(leaf)]
    return type(leaf) if is_value(leaf) else None, jtu.tree_structure(leaf), shapes


def _described(leaf: Any) -> str:
    parts = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(leaf))
    kind = f"{type(leaf).__name__} with " if is_value(leaf) else ""
    return kind + (parts or "no parts")


def _rows(name: str, leaf: Any, n: int) -> list[Any]:
    if not is_value(leaf):
        return [_row(leaf, i) for i in range(n)]
    axes = leaf.leading_axis()
    if axes is NotImplemented:
        raise ValueError(f"{name}: {type(leaf).__name__} of shape {leaf.shape} cannot be split into rows.")
    parts, structure = jtu.tree_flatten(leaf)
    rows = []
    for i in range(n):
        own = [part if axis is None else _row(part, i, axis) for part, axis in zip(parts, axes, strict=True)]
        row = jtu.tree_unflatten(structure, own)
        rows.append(row if tuple(row.shape) == tuple(leaf.shape[1:]) else quaxify(lambda x, i=i: x[i])(leaf))
    return rows


def _row(part: Any, i: int, axis: int = 0) -> Any:
    if isinstance(part, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(part.shape[:axis] + part.shape[axis + 1 :], part.dtype)
    return part[(*(slice(None),) * axis, i, ...)]  # Without the `...`, NumPy could return a scalar.
