"""Batching of a defined primitive, by its hand-written rule or by a form."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.tree_util as jtu

from .forms import Batch
from .layout import Params, flatten_like, unflatten, with_form, without_tree

if TYPE_CHECKING:
    from .define import DefinedPrimitive


def batch(
    p: "DefinedPrimitive", axis: Any, operands: Sequence[Any], dims: Sequence[Any], /, **params: Any
) -> tuple[Any, Any]:
    # JAX marks an axis without a name by a bare object.
    axis_name = None if type(axis.name) is object else axis.name
    if all(d is None for d in dims) and not _uses_axis(p, axis_name, operands, params):
        out = p.bind(*operands, **params)
        return out, ([None] * len(out) if p.multiple_results else None)
    if p.rules.batching is not None:
        by_hand = _batch_by_hand(p, axis.size, operands, dims, params)
        if by_hand is not None:
            return by_hand
    form = Batch(tuple(dims), axis.size, axis_name, axis.spmd_name)
    out = p.batch_p.bind(*operands, **with_form(params, form))
    return (out, [0] * len(out)) if p.multiple_results else (out[0], 0)


def _uses_axis(p: "DefinedPrimitive", name: Any, operands: Sequence[Any], params: Params) -> bool:
    if name is None:
        return False
    effects = p.jaxpr([jax.typeof(x) for x in operands], params).effects
    return any(getattr(effect, "name", None) == name for effect in effects)


def _batch_by_hand(
    p: "DefinedPrimitive", size: Any, operands: Sequence[Any], dims: Sequence[Any], params: Params
) -> tuple[Any, Any] | None:
    assert p.rules.batching is not None
    in_tree, static = without_tree(params)
    by_hand = p.rules.batching(size, unflatten(in_tree, operands), unflatten(in_tree, dims), **static)
    if by_hand is NotImplemented:
        return None
    out, out_dims = by_hand
    if not p.multiple_results:
        return out, out_dims
    out_leaves, out_tree = jtu.tree_flatten(out)
    return out_leaves, flatten_like(out_tree, out_dims, f"the batching rule of {p.name!r}")
