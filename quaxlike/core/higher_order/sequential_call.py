"""`sequential_vmap_with_vjp`: the same call, applied to the leaves."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc

from .. import compat
from ..jaxprs.evaluate import evaluate
from ..jaxprs.slots import flatten, unflatten
from ..jaxprs.subjaxpr import subjaxpr
from ..trace import QuaxTrace, builtin


@builtin("sequential_call")
def _sequential_call(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    if compat.is_eval_trace(trace.parent_trace):  # there is no vmap under which to keep it sequential
        return evaluate(trace, params["jaxpr"], operands)
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, params["jaxpr"], slots, what="sequential_vmap_with_vjp")
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, jaxpr=flat.jaxpr))
