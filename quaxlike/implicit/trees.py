"""Versions of the `jax.tree` functions treating Values as leaves, and some functions for nested Values."""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._checked import checked
from ..core.values import is_value


def is_array(x: Any) -> bool:
    """Returns whether `x` is a NumPy array or scalar, or a JAX array."""
    return isinstance(x, np.ndarray | np.generic | jax.Array)


def leaf_predicate(x: Any) -> bool:
    """Returns whether `x` is an ImplicitArray or any other Value."""
    return is_value(x)


@checked
def combine_leaf_predicate(base_fn: Callable[..., Any], is_leaf: Callable[[Any], bool]) -> Callable[..., Any]:
    """Makes a function from `jax.tree` or `jax.tree_util` treat some additional nodes as leaves.

    **Arguments:**

    - `base_fn`: a function with an `is_leaf` argument.
    - `is_leaf`: a predicate. Nodes for which it returns True are treated as leaves.

    **Returns:**

    A version of `base_fn`. Callers can still pass `is_leaf` (or `new_is_leaf=`) to specify further leaves.
    """

    position = _position_of_is_leaf(base_fn)

    @functools.wraps(base_fn)
    def combined(
        *args: Any,
        is_leaf: Callable[..., bool] | None = None,
        new_is_leaf: Callable[..., bool] | None = None,
        **kwargs: Any,
    ) -> Any:
        # By position, it may be followed by other arguments.
        before, given, after = args, (is_leaf, new_is_leaf), ()
        if position is not None and len(args) > position:
            if is_leaf is not None:
                raise TypeError(f"{base_fn.__name__}() got multiple values for argument 'is_leaf'")
            before, given, after = args[:position], (args[position], new_is_leaf), args[position + 1 :]
        predicates = [p for p in given if p is not None]

        def is_any_leaf(*node: Any) -> bool:  # with `is_leaf_takes_path`, this is called with a path as well
            return always(node[-1]) or any(p(*node) for p in predicates)

        if after:
            return base_fn(*before, is_any_leaf, *after, **kwargs)
        return base_fn(*before, is_leaf=is_any_leaf, **kwargs)

    always = is_leaf
    return combined


def _position_of_is_leaf(fn: Callable[..., Any]) -> int | None:
    """Returns the position of a function's parameter `is_leaf`, or None if it's keyword-only."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # e.g. a built-in function
        return None
    known = "is_leaf" in parameters and parameters["is_leaf"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return list(parameters).index("is_leaf") if known else None


tree_map_with_implicit = combine_leaf_predicate(jtu.tree_map, leaf_predicate)
tree_map_with_path_with_implicit = combine_leaf_predicate(jtu.tree_map_with_path, leaf_predicate)
tree_flatten_with_implicit = combine_leaf_predicate(jtu.tree_flatten, leaf_predicate)
tree_flatten_with_path_with_implicit = combine_leaf_predicate(jtu.tree_flatten_with_path, leaf_predicate)
tree_leaves_with_implicit = combine_leaf_predicate(jtu.tree_leaves, leaf_predicate)
tree_structure_with_implicit = combine_leaf_predicate(jtu.tree_structure, leaf_predicate)


def fields(x: Any) -> tuple[list[Any], Any]:
    """Flattens just one Value, so that any Values nested inside it are leaves."""
    return jtu.tree_flatten(x, is_leaf=lambda y: y is not x and is_value(y))


@checked
def flatten_one_implicit_layer(tree: PyTree) -> tuple[list[Any], Any]:
    """Flattens the outermost layer of ImplicitArrays. Any ImplicitArrays nested inside them are leaves.

    **Returns:**

    The leaves, together with a structure for `jax.tree.unflatten`.
    """
    nodes, around = tree_flatten_with_implicit(tree)
    flat = [fields(node) if is_value(node) else ([node], jtu.tree_structure(0)) for node in nodes]
    hollow = [structure.unflatten([0] * structure.num_leaves) for _, structure in flat]
    leaves = list(itertools.chain.from_iterable(parts for parts, _ in flat))
    return leaves, jtu.tree_structure(around.unflatten(hollow))


@checked
def implicit_depth(tree: PyTree) -> int:
    """Returns how deeply ImplicitArrays are nested. For example, this is 0 if there aren't any, and 1 if none
    of them contains another.
    """
    inside = [x for x in tree_leaves_with_implicit(tree) if is_value(x)]
    return 1 + max(implicit_depth(fields(x)[0]) for x in inside) if inside else 0
