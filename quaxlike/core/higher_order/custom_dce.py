"""`custom_dce`: the function, and the one that its rule returns, both on Values."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.core
import jax.extend.core as jexc

from .. import compat
from ..jaxprs.evaluate import evaluate
from ..jaxprs.slots import flatten, spread, unflatten
from ..jaxprs.subjaxpr import subjaxpr
from ..trace import QuaxTrace, builtin


@builtin("custom_dce_call")
def _custom_dce(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    rule, what = params["rule"], f"custom_dce of {params['name']}"
    if compat.is_eval_trace(trace.parent_trace):  # no transform below eliminates dead code
        return evaluate(trace, params["jaxpr"], operands)
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, params["jaxpr"], slots, what=what)
    # The rule runs after the current traces end, so it must not capture them.
    level = QuaxTrace(jax.core.Trace(), trace.tag, trace.resolver)

    @functools.cache
    def narrow(used_leaves: tuple[bool, ...]) -> Any:
        leaf = iter(used_leaves)
        per_slot = [[next(leaf) for _ in slot.avals] for slot in flat.out]
        used = tuple(map(any, per_slot))
        jaxpr, used_ins = (params["jaxpr"], (True,) * len(slots)) if all(used) else rule(used)
        taken = [slot for slot, is_used in zip(slots, used_ins, strict=True) if is_used]
        # The remaining results keep the form that they have in the full computation.
        targets = [slot for slot, is_used in zip(flat.out, used, strict=True) if is_used]
        narrowed = subjaxpr(level, jaxpr, taken, targets=targets, what=what)
        if narrowed.consts:
            return compat.dce(flat.jaxpr, used_leaves)
        wanted = [u for group, is_used in zip(per_slot, used, strict=True) if is_used for u in group]
        left, ins = compat.dce(narrowed.jaxpr, wanted)
        in_leaf = iter(ins)
        mask = [is_used and next(in_leaf) for is_used in spread(used_ins, slots)]
        return left, (*[False] * len(flat.consts), *mask)

    params = params | {"jaxpr": flat.jaxpr, "rule": narrow}
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, **params))
