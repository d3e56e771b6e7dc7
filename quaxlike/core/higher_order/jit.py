"""`jax.jit` inside a quaxified function: the same jit, applied to the leaves."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc

from .. import compat
from ..jaxprs.evaluate import evaluate
from ..jaxprs.slots import Slot, flatten, leaf_specs, spread, unflatten
from ..jaxprs.subjaxpr import subjaxpr
from ..trace import QuaxTrace, builtin


@builtin("jit", "pjit")
def _jit(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    jaxpr = params["jaxpr"]
    eager = compat.is_eval_trace(trace.parent_trace)
    # JAX looks for NaN and infinity in the results of a jitted function, not in what it computes on the way.
    checked_as_one = eager and (jax.config.jax_debug_nans or jax.config.jax_debug_infs)
    if compat.is_inlined_jit(params, eager=eager) and not checked_as_one:
        return evaluate(trace, jaxpr, operands, inlined=True)
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, jaxpr, slots, what=f"jit of {params['name']}")
    n = len(flat.consts)
    unspecified = (compat.UNSPECIFIED,) * n
    params = params | {
        "jaxpr": flat.jaxpr,
        "in_shardings": unspecified + leaf_shardings(params["in_shardings"], slots),
        "in_layouts": (None,) * n + leaf_layouts(params["in_layouts"], slots),
        "donated_invars": (False,) * n + spread(params["donated_invars"], slots),
        "out_shardings": leaf_shardings(params["out_shardings"], flat.out),
        "out_layouts": leaf_layouts(params["out_layouts"], flat.out),
    }
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, **params))


def leaf_shardings(shardings: Sequence[Any], slots: Sequence[Slot]) -> tuple[Any, ...]:
    """For each leaf, the sharding that follows from that of the logical array."""
    out: list[Any] = []
    for sharding, slot in zip(shardings, slots, strict=True):
        if isinstance(sharding, jax.NamedSharding) and slot.treedef is not None:
            out += [sharding.update(spec=spec) for spec in leaf_specs(slot, sharding.spec)]
        else:
            out += [sharding] * len(slot)
    return tuple(out)


def leaf_layouts(layouts: Sequence[Any], slots: Sequence[Slot]) -> tuple[Any, ...]:
    """For each leaf, its device-local layout, which orders axes: only leaves of the array's rank have one."""
    rank = lambda aval: len(getattr(aval, "shape", ()))  # a token has none
    return tuple(
        layout if rank(aval) == rank(slot.aval) else None
        for layout, slot in zip(layouts, slots, strict=True)
        for aval in slot.avals
    )
