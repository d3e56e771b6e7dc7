"""Typed helpers for programs on pytrees."""

from .checks import NotJaxCompatibleError, is_traced, no_jax_tracing, non_differentiable
from .dataclasses import dataclass, field, lens_field
from .lenses import HasLensFields, Lens, LensField
from .numerics import isin, kahan_summation
from .post_init import enable_post_init, no_post_init, skip_post_init_if_disabled
from .random import key_chain
from .scatter import HasScatterArgs, ScatterArgs, tree_scatter_set
from .sequential import sequential_vmap_with_vjp
from .transforms import jit, linearize, shard_map, vectorize
from .trees import (
    PyTreeDef,
    SupportsTreeMatch,
    tree_concat,
    tree_map,
    tree_stack,
    tree_structure,
    tree_where_broadcast_last,
    tree_zeros_like,
)

__all__ = [
    "HasLensFields",
    "HasScatterArgs",
    "Lens",
    "LensField",
    "NotJaxCompatibleError",
    "PyTreeDef",
    "ScatterArgs",
    "SupportsTreeMatch",
    "dataclass",
    "enable_post_init",
    "field",
    "is_traced",
    "isin",
    "jit",
    "kahan_summation",
    "key_chain",
    "lens_field",
    "linearize",
    "no_jax_tracing",
    "no_post_init",
    "non_differentiable",
    "sequential_vmap_with_vjp",
    "shard_map",
    "skip_post_init_if_disabled",
    "tree_concat",
    "tree_map",
    "tree_scatter_set",
    "tree_stack",
    "tree_structure",
    "tree_where_broadcast_last",
    "tree_zeros_like",
    "vectorize",
]
