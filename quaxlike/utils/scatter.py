"""Scattering into every leaf of a pytree."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypedDict, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_map_with_path, treedef_is_leaf
from jax.typing import ArrayLike

from .._checked import checked
from .trees import ARRAY_LIKE, NUMBER, at, describing, map_with_path

_T = TypeVar("_T")


class ScatterArgs(TypedDict, total=False):
    """Options for [`tree_scatter_set`][quaxlike.utils.tree_scatter_set].

    The same options as for `jax.Array.at[...].set`, all of them optional.

    - `mode`: what to do with out-of-bounds indices. Either `"drop"` (the default, also called `"fill"`),
        `"clip"`, or `"promise_in_bounds"`.
    - `wrap_negative_indices`: whether negative indices count from the end.
    - `fill_value`: only used by `.at[...].get`, and ignored here.
    - `indices_are_sorted`, `unique_indices`: promises about the indices, allowing a faster implementation.
    """

    mode: Literal["promise_in_bounds", "fill", "drop", "clip"]
    wrap_negative_indices: bool
    fill_value: bool | int | float | complex | np.generic | None
    indices_are_sorted: bool
    unique_indices: bool


@runtime_checkable
class HasScatterArgs(Protocol):
    """A pytree node with its own options for [`tree_scatter_set`][quaxlike.utils.tree_scatter_set].

    !!! example

        ```python
        from quaxlike.utils import ScatterArgs, dataclass

        @dataclass
        class Buffer:
            rows: jax.Array

            @property
            def scatter_args(self) -> ScatterArgs:
                return {"mode": "drop"}
        ```
    """

    @property
    def scatter_args(self) -> ScatterArgs:
        """The options for this node and every node below it."""
        ...


@checked
def tree_scatter_set(item: _T, value: _T, idxs: ArrayLike, args: ScatterArgs) -> _T:
    """Sets rows of every leaf in a pytree, i.e. `leaf.at[idxs].set(value_leaf, **args)`.

    A node's `scatter_args` also apply to every node below it. In case of a conflict, `args` takes precedence
    over the nodes, and outer nodes over inner nodes.

    **Arguments:**

    - `item`: a pytree of JAX or NumPy arrays, each with shape `(n, *rest)`.
    - `value`: a pytree with the same structure as `item`, with leaves broadcasting to `idxs.shape + rest`. A
        Python number is used for every leaf.
    - `idxs`: integers of any shape.
    - `args`: options for every leaf. Pass `{}` if you don't need any.

    **Returns:**

    A copy of `item` with the new rows.

    **Raises:**

    - `TypeError`: if a value's dtype doesn't promote to the dtype of its leaf, such as writing floats to
        integers; if `idxs` aren't integers; or if an option is unknown.
    - `ValueError`: if the shapes don't match, even if `idxs` is empty. The error message says where.

    !!! example

        ```python
        from quaxlike.utils import tree_scatter_set

        state = {"position": jnp.zeros((6, 3)), "charge": jnp.zeros(6)}
        rows = {"position": jnp.ones((2, 3)), "charge": jnp.ones(2)}
        tree_scatter_set(state, rows, jnp.array([3, 5]), {"mode": "drop"})
        ```
    """
    kind = jnp.result_type(idxs)
    if not jnp.issubdtype(kind, jnp.integer):
        raise TypeError(
            f"tree_scatter_set: `idxs` must be integers, found {kind} of shape {jnp.shape(idxs)}. Make "
            "indices of a mask by jnp.nonzero."
        )
    if isinstance(value, NUMBER) and not isinstance(item, NUMBER):
        value = map_with_path(lambda _, leaf: value, item)
    return _set(item, value, idxs, args, ())


def _set(item: Any, value: Any, idxs: Any, args: ScatterArgs, prefix: tuple[Any, ...]) -> Any:
    def visit(path: tuple[Any, ...], node: Any, new: Any) -> Any:
        path = prefix + path
        if not isinstance(node, HasScatterArgs) or treedef_is_leaf(jax.tree.structure(node)):
            return _set_leaf(path, node, new, idxs, args)
        # `map_with_path` has already matched this node with its counterpart. This must only happen once, so
        # continue with its children.
        passed = cast(ScatterArgs, {**node.scatter_args, **args})

        def child(at: Any, inner: Any, new: Any) -> Any:
            return _set(inner, new, idxs, passed, path + at)

        return tree_map_with_path(child, node, new, is_leaf=lambda inner: inner is not node)

    return map_with_path(visit, item, value, is_leaf=lambda node: isinstance(node, HasScatterArgs))


def _set_leaf(path: tuple[Any, ...], leaf: Any, value: Any, idxs: Any, args: Mapping[str, Any]) -> jax.Array:
    name = "tree_scatter_set"
    unknown = args.keys() - ScatterArgs.__annotations__.keys()
    if unknown:
        known = ", ".join(ScatterArgs.__annotations__)
        raise TypeError(f"{name} has no option {', '.join(sorted(unknown))}; there are {known}.")
    for x in (leaf, value):
        if not isinstance(x, ARRAY_LIKE):
            raise TypeError(f"{name}: found {type(x).__name__}, not an array{at(path)}.")
    leaf = jnp.asarray(leaf)
    with jax.numpy_dtype_promotion("standard"):
        promoted = leaf.dtype if _dtype(value) == leaf.dtype else jnp.result_type(leaf, value)
    if promoted != leaf.dtype:
        raise TypeError(
            f"{name}: a value of {_dtype(value)} may lose information in a leaf of {leaf.dtype}"
            f"{at(path)}. Convert it with `.astype`, or give the leaf a wider dtype."
        )
    with describing(name, path, (leaf, value)):
        if leaf.ndim == 0:
            raise ValueError("the leaf has no axis to set rows of")
        shape, target = jnp.shape(value), jnp.shape(idxs) + leaf.shape[1:]
        aligned = zip(reversed(shape), reversed(target), strict=False)
        if len(shape) > len(target) or any(n not in (1, m) for n, m in aligned):
            raise ValueError(f"the value must broadcast to {target}, the shape of `leaf[idxs]`")
        options = {key: option for key, option in args.items() if key != "fill_value"}
        return leaf.at[jnp.asarray(idxs)].set(jnp.asarray(value, leaf.dtype), **options)


def _dtype(x: Any) -> Any:
    return getattr(x, "dtype", type(x).__name__)
