"""`lax.while_loop` and `lax.fori_loop`; and the fixed point of a loop's carry."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jexc

from ..slots import Slot, conform, flatten, split, unflatten, unify
from ..subjaxpr import Flat, subjaxpr
from ..trace import QuaxTrace, builtin


@builtin("while")
def _while(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    cond_operands, body_operands, init = split(operands, params["cond_nconsts"], params["body_nconsts"])
    cond_leaves, cond_slots = flatten(cond_operands)
    body_leaves, body_slots = flatten(body_operands)

    def body_for(carry: Sequence[Slot], targets: Sequence[Slot | None] | None) -> Flat:
        slots = (*body_slots, *carry)
        return subjaxpr(trace, params["body_jaxpr"], slots, targets=targets, what="while_loop")

    init, carry, body = carry_fixed_point(init, body_for, "while_loop")
    (predicate,) = params["cond_jaxpr"].out_avals
    cond = subjaxpr(
        trace,
        params["cond_jaxpr"],
        (*cond_slots, *carry),
        targets=[Slot(None, (predicate,))],
        what="the condition of while_loop",
    )
    init_leaves, _ = flatten(init)
    params = params | {
        "cond_jaxpr": cond.jaxpr,
        "body_jaxpr": body.jaxpr,
        "cond_nconsts": len(cond.consts) + len(cond_leaves),
        "body_nconsts": len(body.consts) + len(body_leaves),
    }
    out = primitive.bind(*cond.consts, *cond_leaves, *body.consts, *body_leaves, *init_leaves, **params)
    return unflatten(carry, out)


def carry_fixed_point(
    init: Sequence[Any],
    body_for: Callable[[Sequence[Slot], Sequence[Slot | None] | None], Flat],
    what: str,
) -> tuple[list[Any], tuple[Slot, ...], Flat]:
    """The form that a loop's carry keeps from one iteration to the next.

    A plain array that comes out as a Value is lifted by the type's `promote`, or the Value is
    materialised; two different Values are an error that names the slot.

    **Arguments:**

    - `body_for`: the body for a carry in the given slots, with its results brought to the targets.

    **Returns:**

    `init` in that form, the slots of the carry, and the body.
    """
    _, carry = flatten(init)
    while True:
        body = body_for(carry, None)
        after = body.out[: len(carry)]
        if after == carry:
            break
        unified = tuple(
            unify(a, b, f"Carry {i} of {what}, before and after an iteration,")
            for i, (a, b) in enumerate(zip(carry, after, strict=True))
        )
        if unified == carry:  # the results only have to be brought to it
            rest = (None,) * (len(body.out) - len(carry))
            body = body_for(carry, (*carry, *rest))
            break
        carry = unified
    return [conform(x, slot, what) for x, slot in zip(init, carry, strict=True)], carry, body
