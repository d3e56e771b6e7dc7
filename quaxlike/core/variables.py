"""Flax NNX Variables among the arguments of a quaxified function.

There must only be a single copy of each Variable, even if it occurs several times, so that shared parameters
remain shared. Any changes to the copy must be written back to the original.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu

from .values import kind_of


class Copies:
    """Copies of the Variables, for the function to mutate.

    A quaxified function is called with copies of its arguments, with tracers in place of Values. Its changes
    to a module have to be written back to the original, as in `nnx.jit`. (Flax doesn't need to be installed.)
    """

    def __init__(self) -> None:
        self._variable = sys.modules["flax.nnx"].Variable
        self._of: dict[int, tuple[Any, Any, Any]] = {}  # a Variable, its copy, and the copy's content
        self._trees: list[tuple[Any, Any]] = []

    def shared(self, tree: Any, copy: Any) -> Any:
        """Returns `copy` (a copy of `tree`) with a single copy per Variable."""
        leaves = jtu.tree_leaves(tree, is_leaf=self._is_leaf)
        if not any(isinstance(x, self._variable) for x in leaves):
            return copy
        copies, treedef = jtu.tree_flatten(copy, is_leaf=self._is_leaf)
        for i, (x, y) in enumerate(zip(leaves, copies, strict=True)):
            if isinstance(x, self._variable):
                copies[i] = self._of.setdefault(id(x), (x, y, y.get_raw_value()))[1]
        self._trees.append((tree, copy := treedef.unflatten(copies)))
        return copy

    def write_back(self, unwrap: Callable[[Any], Any]) -> None:
        """Writes any changes in the copies back to the Variables, and adds new Variables.

        **Arguments:**

        - `unwrap`: converts a Variable's content from inside the function to its content outside.
        """
        for variable, copy, before in self._of.values():
            # Don't write unchanged content: this would count as a mutation, which Flax sometimes forbids.
            if (after := copy.get_raw_value()) is not before:
                variable.set_raw_value(unwrap(after))
        for tree, copy in self._trees:
            known = dict(jtu.tree_leaves_with_path(tree, is_leaf=self._is_leaf))
            for path, x in jtu.tree_leaves_with_path(copy, is_leaf=self._is_leaf):
                if path not in known and isinstance(x, self._variable):
                    _add(tree, path, unwrap(x))

    def _is_leaf(self, x: Any) -> bool:
        return kind_of(x) == "value" or isinstance(x, self._variable)


def _add(tree: Any, path: tuple[Any, ...], variable: Any) -> None:
    """Adds a Variable created during the call, e.g. by `nnx.Module.sow`."""
    *above, last = path
    for key in above:
        tree = getattr(tree, key.name) if isinstance(key, jtu.GetAttrKey) else tree[_index(key)]
    if isinstance(last, jtu.GetAttrKey):
        setattr(tree, last.name, variable)
    else:
        tree[_index(last)] = variable


def _index(key: Any) -> Any:
    return key.idx if isinstance(key, jtu.SequenceKey) else key.key
