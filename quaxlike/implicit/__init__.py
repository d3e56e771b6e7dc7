"""Array types in the ImplicitArray style: with fields, `materialize()`, and handlers for primitives.

This is just a thin layer over the core. An `ImplicitArray` is a [`quaxlike.ArrayValue`][], `implicit` is
[`quaxlike.quaxify`][] and `register` is [`quaxlike.register`][], so you can freely mix types of both styles.
The interface follows eformer's `jaximus` and qax.
"""

from .array import ImplicitArray, OrginArray, OriginArray, UninitializedAval, aux_field, materialize_nested
from .handlers import default_handler, implicit, materialize_handler, register, use_implicit
from .ste import ste
from .trees import (
    combine_leaf_predicate,
    flatten_one_implicit_layer,
    implicit_depth,
    is_array,
    leaf_predicate,
    tree_flatten_with_implicit,
    tree_flatten_with_path_with_implicit,
    tree_leaves_with_implicit,
    tree_map_with_implicit,
    tree_map_with_path_with_implicit,
    tree_structure_with_implicit,
)

__all__ = [
    "ImplicitArray",
    "OrginArray",
    "OriginArray",
    "UninitializedAval",
    "aux_field",
    "combine_leaf_predicate",
    "default_handler",
    "flatten_one_implicit_layer",
    "implicit",
    "implicit_depth",
    "is_array",
    "leaf_predicate",
    "materialize_handler",
    "materialize_nested",
    "register",
    "ste",
    "tree_flatten_with_implicit",
    "tree_flatten_with_path_with_implicit",
    "tree_leaves_with_implicit",
    "tree_map_with_implicit",
    "tree_map_with_path_with_implicit",
    "tree_structure_with_implicit",
    "use_implicit",
]
