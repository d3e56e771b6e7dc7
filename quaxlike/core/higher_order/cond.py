"""`lax.cond` and `lax.switch`: branches on Values, whose results are unified."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc

from ..jaxprs.slots import Slot, flatten, is_read_by_its_leaf, unflatten
from ..jaxprs.subjaxpr import subjaxpr, with_leading_inputs
from ..jaxprs.unify import unify
from ..policy import dense
from ..trace import QuaxTrace, builtin


@builtin("cond")
def _cond(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    found, (slot,) = flatten(operands[:1])
    index = found[0] if is_read_by_its_leaf(slot, "cond") else dense(operands[0], "cond", operands)
    leaves, slots = flatten(operands[1:])
    branches = params["branches"]
    flats = [subjaxpr(trace, branch, slots, what="cond") for branch in branches]
    out = flats[0].out
    if any(flat.out != out for flat in flats):
        out = tuple(
            functools.reduce(lambda a, b, i=i: unify(a, b, f"Result {i} of the branches of cond"), outs)
            for i, outs in enumerate(zip(*(flat.out for flat in flats), strict=True))
        )
        if not all(all(map(Slot.admits, out, flat.out)) for flat in flats):
            flats = [subjaxpr(trace, branch, slots, targets=out, what="cond") for branch in branches]
    flats, consts = with_leading_inputs(flats, len(leaves))
    params = params | {"branches": tuple(flat.jaxpr for flat in flats)}
    return unflatten(out, primitive.bind(index, *consts, *leaves, **params))
