"""Functions for working with pytrees."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr
from jax.typing import ArrayLike

from .._checked import checked

_T = TypeVar("_T")

NUMBER = (bool, int, float, complex)
ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, *NUMBER)


@runtime_checkable
class PyTreeDef(Protocol[_T]):
    """The structure of a pytree of type `T`: a typed version of `jax.tree_util.PyTreeDef`.

    !!! example

        ```python
        from quaxlike.utils import PyTreeDef, tree_structure

        structure: PyTreeDef[tuple[int, str]] = tree_structure((1, "a"))
        structure.unflatten([2, "b"])  # (2, "b")
        ```
    """

    @property
    def num_leaves(self) -> int: ...
    def flatten_up_to(self, xs: _T, /) -> list[Any]:
        """Returns the parts of `xs` corresponding to this structure's leaves."""
        ...

    def unflatten(self, leaves: Iterable[Any], /) -> _T:
        """Returns the pytree with this structure and the given leaves."""
        ...


@checked
def tree_structure(x: _T, is_leaf: Callable[[Any], bool] | None = None) -> PyTreeDef[_T]:
    """A version of `jax.tree.structure` with precise types.

    **Arguments:**

    - `x`: the pytree.
    - `is_leaf`: a predicate. Nodes for which it returns `True` are treated as leaves. Default: none.

    **Returns:**

    The structure. At run time this is just JAX's own `PyTreeDef`.

    !!! example

        ```python
        from quaxlike.utils import tree_structure

        tree_structure({"w": jnp.ones(3), "b": jnp.ones(1)}).num_leaves  # 2
        ```
    """
    return cast(PyTreeDef[_T], jax.tree.structure(x, is_leaf=is_leaf))


@runtime_checkable
class SupportsTreeMatch(Protocol):
    """A pytree node customising how [`tree_map`][quaxlike.utils.tree_map] matches it with its counterparts.

    !!! example

        ```python
        from quaxlike.utils import dataclass, field, tree_map

        @dataclass
        class Padded:
            rows: jax.Array
            size: int = field(static=True)

            def __tree_match__(self, *others: "Padded") -> "tuple[Padded, ...]":
                size = max(p.size for p in (self, *others))
                pad = lambda p: jnp.pad(p.rows, (0, size - p.size))
                return tuple(Padded(pad(p), size) for p in (self, *others))

        tree_map(jnp.add, Padded(jnp.ones(2), 2), Padded(jnp.ones(3), 3))
        ```
    """

    def __tree_match__(self: _T, *others: _T) -> tuple[_T, ...]:
        """Returns this node and its counterparts from the other pytrees, modified to match."""
        ...


@checked
def tree_map(
    fn: Callable[..., Any],
    tree: _T,
    *trees: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> _T:
    """Like `jax.tree.map`, but nodes with a `__tree_match__` are first matched with their counterparts.

    If there are other pytrees, then each node like this in `tree` and its counterparts are replaced by
    `node.__tree_match__(*counterparts)`. The same then happens to their children, recursively.

    **Arguments:**

    - `fn`: a function of one leaf from each pytree.
    - `tree`: a pytree. Also determines the structure of the result.
    - `*trees`: other pytrees. After matching, these must have the same structure as `tree`.
    - `is_leaf`: a predicate. Nodes for which it returns `True` are treated as leaves, for example
        `ql.is_value`. Default: none.

    **Returns:**

    The pytree of results.

    **Raises:**

    - `ValueError`: if the structures differ, or if `__tree_match__` returns the wrong number of nodes.

    !!! example

        ```python
        from quaxlike.utils import tree_map

        tree_map(jnp.add, {"a": jnp.ones(3)}, {"a": jnp.ones(3)})  # {"a": [2, 2, 2]}
        ```
    """
    return map_with_path(lambda _, *leaves: fn(*leaves), tree, *trees, is_leaf=is_leaf)


def map_with_path(
    fn: Callable[..., Any],
    tree: _T,
    *trees: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> _T:
    """Like `tree_map`, but `fn` also receives the key path as its first argument."""

    def is_end(node: Any) -> bool:
        return is_leaf is not None and is_leaf(node)

    def stops(node: Any) -> bool:
        return _has_tree_match(node) or is_end(node)

    def go(prefix: tuple[Any, ...], trees: Sequence[Any], stops_here: Any) -> Any:
        def visit(path: tuple[Any, ...], node: Any, *others: Any) -> Any:
            path = prefix + path
            nodes = (node, *others)
            if others and _has_tree_match(node):
                nodes = _matched(path, *nodes)
            if is_end(nodes[0]) or jax.tree.structure(nodes[0]) == _LEAF:
                return fn(path, *nodes)
            # Continue inside the node. It is already matched, so it mustn't stop the traversal a second time.
            return go(path, nodes, lambda inner: inner is not nodes[0] and stops(inner))

        return jax.tree_util.tree_map_with_path(visit, *trees, is_leaf=stops_here)

    try:
        return go((), (tree, *trees), stops)
    except ValueError as error:
        if not str(error).startswith("pytree structure error"):
            raise
        told = error
    raise ValueError(f"Trees that are mapped over together must have the same structure. {told}") from told


def _has_tree_match(node: Any) -> bool:
    return hasattr(type(node), "__tree_match__")


_LEAF = jax.tree.structure(0)


def _matched(path: tuple[Any, ...], node: Any, *others: Any) -> tuple[Any, ...]:
    matched = tuple(node.__tree_match__(*others))
    if len(matched) != 1 + len(others):
        raise ValueError(
            f"{type(node).__name__}.__tree_match__ must return itself and its {len(others)} "
            f"counterparts, found {len(matched)} nodes{at(path)}."
        )
    return matched


def at(path: tuple[Any, ...]) -> str:
    """Formats a path for an error message, for example as " at ['a']". Empty for the root."""
    return f" at {keystr(path)}" if path else ""


@checked
def tree_stack(*trees: _T) -> _T:
    """Stacks the leaves of several pytrees along a new axis 0.

    **Arguments:**

    - `*trees`: at least one pytree. All of them must have the same structure and shapes. Dtypes are promoted.

    **Returns:**

    The pytree of stacked leaves, each with shape `(len(trees), *shape)`.

    **Raises:**

    - `TypeError`: if there aren't any pytrees, or if a leaf isn't an array.
    - `ValueError`: if the structures or shapes differ. The error message says where.

    !!! example

        ```python
        from quaxlike.utils import tree_stack

        layers = tree_stack({"w": jnp.ones((3, 3))}, {"w": jnp.zeros((3, 3))})
        jax.lax.scan(lambda x, layer: (layer["w"] @ x, None), jnp.ones(3), layers)
        ```
    """
    return _leafwise("tree_stack", lambda *leaves: jnp.stack(leaves), *trees)


@checked
def tree_concat(*trees: _T) -> _T:
    """Concatenates the leaves of several pytrees along axis 0.

    **Arguments:**

    - `*trees`: at least one pytree. All of them must have the same structure, with shapes differing only in
        axis 0. Dtypes are promoted.

    **Returns:**

    The pytree of concatenated leaves.

    **Raises:**

    - `TypeError`: if there aren't any pytrees, or if a leaf isn't an array.
    - `ValueError`: if a leaf is a scalar, or if the structures or shapes differ. The error message says
        where.

    !!! example

        ```python
        from quaxlike.utils import tree_concat

        # x: shape (3, 3)
        tree_concat({"x": jnp.zeros((2, 3))}, {"x": jnp.ones((1, 3))})
        ```
    """

    def concatenate(*leaves: Any) -> jax.Array:
        if any(jnp.ndim(leaf) == 0 for leaf in leaves):
            raise ValueError("scalars have no axis to concatenate along; use tree_stack")
        return jnp.concatenate(leaves)

    return _leafwise("tree_concat", concatenate, *trees)


@checked
def tree_zeros_like(tree: _T) -> _T:
    """Creates a pytree of zeros with the shapes and dtypes of another pytree's leaves.

    **Arguments:**

    - `tree`: a pytree of arrays, numbers or `jax.ShapeDtypeStruct`s.

    **Returns:**

    The pytree of zeros.

    **Raises:**

    - `TypeError`: if a leaf isn't an array. The error message says where.

    !!! example

        ```python
        from quaxlike.utils import tree_zeros_like

        momentum = tree_zeros_like({"w": jnp.ones((3, 3)), "b": jnp.ones(3)})
        ```
    """
    return _leafwise("tree_zeros_like", jnp.zeros_like, tree)


@checked
def tree_where_broadcast_last(accept: ArrayLike, tree1: _T, tree2: _T) -> _T:
    """Selects between two pytrees, using a condition broadcast over any trailing axes.

    (NumPy-style broadcasting would add the missing axes at the front instead.)

    **Arguments:**

    - `accept`: booleans with shape `(*batch)`. For each leaf, axes of size 1 are appended to this shape until
        it has the leaf's rank.
    - `tree1`: the values to use if `accept` is true. Its leaves must have shape `(*batch, ...)`.
    - `tree2`: the values to use if `accept` is false. It must have the same structure as `tree1`, with leaves
        broadcasting with those of `tree1`.

    **Returns:**

    The pytree of `jnp.where(accept, leaf1, leaf2)`.

    **Raises:**

    - `ValueError`: if a leaf has fewer axes than `accept`, or if the shapes don't match. The error message
        says where.

    !!! example

        ```python
        from quaxlike.utils import tree_where_broadcast_last

        # Accept or reject a step, for each of four chains.
        state = {"x": jnp.zeros((4, 3)), "energy": jnp.zeros(4)}
        proposal = {"x": jnp.ones((4, 3)), "energy": jnp.ones(4)}
        accepted = jnp.array([True, False, True, True])
        tree_where_broadcast_last(accepted, proposal, state)
        ```
    """
    accept = jnp.asarray(accept)

    def where(x: Any, y: Any) -> jax.Array:
        x, y = jnp.broadcast_arrays(x, y)
        if x.ndim < accept.ndim:
            raise ValueError(f"`accept` of shape {accept.shape} has more axes than the leaf")
        if any(n not in (1, size) for n, size in zip(accept.shape, x.shape, strict=False)):
            raise ValueError(f"`accept` of shape {accept.shape} does not fit the leading axes of the leaf")
        padded = accept.reshape(accept.shape + (1,) * (x.ndim - accept.ndim))
        return jnp.where(padded, x, y)

    return _leafwise("tree_where_broadcast_last", where, tree1, tree2)


def _leafwise(name: str, operation: Callable[..., jax.Array], *trees: _T) -> _T:
    """Maps a function over arrays. Errors mention the function's name and the path to the leaf."""
    if not trees:
        raise TypeError(f"{name} needs at least one tree, found none.")

    def apply(path: tuple[Any, ...], *leaves: Any) -> jax.Array:
        for leaf in leaves:
            if not isinstance(leaf, (*ARRAY_LIKE, jax.ShapeDtypeStruct)):
                raise TypeError(
                    f"{name}: the leaf{at(path)} is of type {type(leaf).__name__}, not an array. "
                    "Split such leaves off first, for example with eqx.partition."
                )
        with describing(name, path, leaves):
            return operation(*leaves)

    return map_with_path(apply, *trees)


@contextlib.contextmanager
def describing(name: str, path: tuple[Any, ...], leaves: Iterable[Any]) -> Iterator[None]:
    """Adds the path, shapes and dtypes to any errors about mismatched arrays."""
    try:
        yield
    except (TypeError, ValueError) as error:  # JAX may raise either
        found = ", ".join(f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in leaves)
        raise ValueError(f"{name}: the leaves{at(path)} do not fit ({found}): {error}") from error
