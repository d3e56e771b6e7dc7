"""`lax.while_loop` and `lax.fori_loop`, and the fixed point of a loop's carry."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jexc

from ..jaxprs.slots import (
    Slot,
    flatten,
    has_in_leaves,
    is_read_by_its_leaf,
    loosened,
    split,
    unflatten,
)
from ..jaxprs.subjaxpr import Flat, subjaxpr
from ..jaxprs.unify import OperandMismatch, conform, dense_where_it_changes, placeholder, settled, unify
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

    (predicate,) = params["cond_jaxpr"].out_avals
    init_leaves, carry, body = carry_fixed_point(init, body_for, body_slots, "while_loop", predicate.ndim)
    slots, what = (*cond_slots, *carry), "the condition of while_loop"
    cond = subjaxpr(trace, params["cond_jaxpr"], slots, what=what)
    if not is_read_by_its_leaf(cond.out[0], what):
        targets = [Slot(None, (predicate,))]
        cond = subjaxpr(trace, params["cond_jaxpr"], slots, targets=targets, what=what)
    params = params | {
        "cond_jaxpr": cond.jaxpr,
        "body_jaxpr": body.jaxpr,
        "cond_nconsts": len(cond.consts) + len(cond_leaves),
        "body_nconsts": len(body.consts) + len(body_leaves),
    }
    out = primitive.bind(*cond.consts, *cond_leaves, *body.consts, *body_leaves, *init_leaves, **params)
    return unflatten(carry, out)


# A form may depend on that of another carry, but some never settle: a rank may grow with each iteration.
_MOST_CHANGES = 2


def carry_fixed_point(
    init: Sequence[Any],
    body_for: Callable[[Sequence[Slot], Sequence[Slot | None] | None], Flat],
    beside: Sequence[Slot],
    what: str,
    stacked: int = 0,
) -> tuple[list[Any], tuple[Slot, ...], Flat]:
    """Finds the form that a loop's carry keeps from one iteration to the next.

    A plain array that becomes a Value is lifted by the type's `promote`, or else the Value is materialised.
    Two different Values are converted to a form that both can have; if there is none, the error names the
    carry. A Value, or a part of one, whose form changes with each iteration is materialised.

    **Arguments:**

    - `body_for`: makes the body for a carry in the given slots, and converts its results to the targets.
    - `beside`: the slots of the body's other operands.
    - `stacked`: how many loops run at once, each until its own end, as axes: their carries are selected leaf
        by leaf, so that a Value without these axes in all its leaves is materialised.

    **Returns:**

    The leaves of `init` in that form, the slots of the carry, and the body.
    """
    leaves, slots = flatten(init)
    allowed = lambda slot: slot if has_in_leaves(slot, stacked) else slot.dense()
    slots = tuple(slot.carried() for slot in loosened(slots, init, beside))
    carry = tuple(map(allowed, slots))
    changes = [0] * len(init)  # how often a Value has had to change its form

    def joined(i: int, a: Slot, b: Slot) -> Slot:
        if changes[i] > _MOST_CHANGES:
            return a
        message = f"The carry changed structure: carry {i} of {what}, before and after an iteration,"
        out = allowed(unify(a, b, message))
        changes[i] += a.treedef is not None and not out.has_form_of(a)
        return out if changes[i] <= _MOST_CHANGES else allowed(dense_where_it_changes(a, b))

    while True:
        try:
            body = body_for(carry, None)
        except OperandMismatch as mismatch:
            carry = _explore(init, carry, body_for, mismatch)
            continue
        after = body.out[: len(carry)]
        if all(map(Slot.admits, carry, after)):
            break
        unified = tuple(
            joined(i, a if b.treedef is None else a.loosened(x).carried(), b)
            for i, (x, a, b) in enumerate(zip(init, carry, after, strict=True))
        )
        if unified == carry:  # only the results have to be converted
            rest = (None,) * (len(body.out) - len(carry))
            body = body_for(carry, (*carry, *rest))
            break
        carry = unified
    if carry != slots:
        leaves, _ = flatten([conform(x, slot, what) for x, slot in zip(init, carry, strict=True)])
    return leaves, carry, body


def _explore(
    init: Sequence[Any],
    carry: tuple[Slot, ...],
    body_for: Callable[[Sequence[Slot], None], Flat],
    mismatch: OperandMismatch,
) -> tuple[Slot, ...]:
    """Lifts those plain arrays of the carry that turn out to be Values.

    Libraries start loops from placeholders (`jnp.zeros`) that become, say, metres in the first iteration.
    Nothing is assumed about them at first; what an iteration reveals is assumed in the next, until nothing
    new is found.

    **Raises:** the `OperandMismatch`, if no plain array turns out to be a Value.
    """
    loose = tuple(
        placeholder(slot.loosened(x).carried(), mismatch.cls) for slot, x in zip(carry, init, strict=True)
    )
    for plain_tells in (False, True):  # whether a plain result shows that the carry is a plain array
        lifted = tuple(map(settled, _settle(loose, body_for, plain_tells)))
        if not all(map(Slot.has_structure_of, lifted, carry)):
            return lifted
    raise mismatch


def _settle(
    carry: tuple[Slot, ...], body_for: Callable[[Sequence[Slot], None], Flat], plain_tells: bool
) -> tuple[Slot, ...]:
    """The carry, with its placeholders replaced by what iterations reveal."""

    def tells(a: Slot, b: Slot) -> bool:
        is_plain = b.treedef is None and plain_tells and not b.loose
        return settled(a) is not a and (is_plain or (b.treedef is not None and settled(b) is b))

    while True:
        after = body_for(carry, None).out
        known = tuple(
            unify(settled(a), b, "A loop's carry") if tells(a, b) else a
            for a, b in zip(carry, after, strict=False)
        )
        if known == carry:
            return carry
        carry = known
