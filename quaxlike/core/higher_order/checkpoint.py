"""`jax.checkpoint`: rematerialisation, with its policy, of computations on Values."""

from collections.abc import Sequence
from typing import Any

import jax.core
import jax.extend.core as jexc

from .. import compat
from ..jaxprs.evaluate import evaluate
from ..jaxprs.slots import flatten, unflatten
from ..jaxprs.subjaxpr import subjaxpr
from ..trace import QuaxTrace, builtin


@builtin("remat2", "checkpoint", "remat")
def _checkpoint(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    jaxpr = compat.closed(params["jaxpr"])
    leaves, slots = flatten(operands)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # nothing to recompute later
        return evaluate(trace, jaxpr, operands)
    flat = subjaxpr(trace, jaxpr, slots, what="checkpoint", closed=False)
    params = params | {"jaxpr": compat.opened(flat.jaxpr)}
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, **params))
