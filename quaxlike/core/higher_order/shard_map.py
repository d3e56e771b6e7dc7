"""`jax.shard_map`: the body on Values of each shard, with specs for leaves in place of logical arrays."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jexc

from .. import compat
from ..jaxprs.linearity import held, map_parts
from ..jaxprs.slots import LeafLayout, flatten, leaf_specs, unflatten
from ..policy import dense
from ..recording import shown_as
from ..trace import QuaxTrace, builtin


@builtin("shard_map")
@shown_as("shard_map")
def _shard_map(
    trace: QuaxTrace,
    primitive: jexc.Primitive,
    fun: Callable[..., Any],
    operands: Sequence[Any],
    **params: Any,
) -> Any:
    leaves, slots = flatten([trace.unwrap(x) for x in operands])
    results: Any = None
    out_slots: tuple[LeafLayout, ...] = ()

    def flat_fun(*shards: Any) -> Any:
        nonlocal results, out_slots
        with jexc.take_current_trace() as parent:
            inner = QuaxTrace(parent, trace.tag, trace.resolver)
            with jexc.set_current_trace(inner):
                results, out_specs = fun(*map(inner.box, unflatten(slots, shards))).unpack_aux()
            with jexc.set_current_trace(parent):
                found = [inner.unwrap(x) for x in results]
                flat, out_slots = flatten(
                    [_dense_unless_joinable(x, spec) for x, spec in zip(found, out_specs, strict=True)]
                )
        return compat.flat_tree(flat).with_aux(_spread_specs(out_slots, out_specs))

    params = params | {
        "subfuns": (flat_fun,),
        "in_specs": _spread_specs(slots, params["in_specs"]),
        "debug_info": params["debug_info"].with_unknown_names(),
    }
    out = compat.bind_with_trace(primitive, trace.parent_trace, tuple(leaves), params)
    return results.update([trace.box(x) for x in unflatten(out_slots, list(out))])


def _dense_unless_joinable(x: Any, spec: Any) -> Any:
    """A result, made dense in parts or as a whole if it is a Value whose leaves differ between devices where
    `spec` assumes that they agree: say, the factor of an adapter that each device scaled differently."""
    to_dense = functools.partial(
        dense,
        what="shard_map (out_specs)",
        hint=f"Its leaves differ between devices, so that {spec} cannot join them.",
    )
    if not _is_joinable(x, spec) and x.linear and held(x):
        x = map_parts(to_dense, x)
    return x if _is_joinable(x, spec) else to_dense(x)


def _is_joinable(x: Any, spec: Any) -> bool:
    leaves, slots = flatten([x])
    if slots[0].treedef is None:
        return True
    for leaf, own in zip(leaves, _spread_specs(slots, [spec]), strict=True):
        named = {axis for entry in own for axis in (entry if isinstance(entry, tuple) else (entry,))}
        if compat.varying_axes(leaf) - named:
            return False
    return True


def _spread_specs(slots: Sequence[LeafLayout], specs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(s for slot, spec in zip(slots, specs, strict=True) for s in leaf_specs(slot, spec))
