"""`lax.custom_linear_solve`: its operator and its solver on Values."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc

from ..jaxprs.linearity import held, map_parts
from ..jaxprs.slots import Slot, flatten, is_a_space, split, unflatten
from ..jaxprs.subjaxpr import Flat, subjaxpr
from ..jaxprs.unify import with_dense_parts
from ..policy import dense
from ..trace import QuaxTrace, builtin
from ..values import is_value

_WHAT = "custom_linear_solve"
_HINT = "It is not linear in all of its leaves, as the solution of a linear system has to be."


@builtin("custom_linear_solve")
def _linear_solve(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    *groups, b = split(operands, *lengths)
    consts = [flatten(group) for group in groups]

    def solve_for(b_slots: Sequence[Slot], targets: Sequence[Slot] | None = None) -> Flat:
        slots = (*consts[2][1], *b_slots)
        return subjaxpr(trace, jaxprs.solve, slots, targets=targets, what=_WHAT)

    # The primitive is linear in the leaves of `b`, so a type that is not has to be dense here.
    b = [_as_a_space(x, operands) for x in b]
    b_leaves, b_slots = flatten(b)
    solve = solve_for(b_slots)
    # The primitive maps a space to itself, so the solution must have the same leaves as `b`.
    hint = "The solution has other leaves."
    if not _leaves_agree(solve.out, b_slots) and any(is_value(x) and held(x) for x in b):
        b = [map_parts(lambda part: dense(part, _WHAT, hint=hint), x) if is_value(x) else x for x in b]
        b_leaves, b_slots = flatten(b)
        solve = solve_for(b_slots)
    if not _leaves_agree(solve.out, b_slots):
        b = [dense(x, _WHAT, operands, hint=hint) for x in b]
        b_leaves, b_slots = flatten(b)
        solve = solve_for(b_slots, [slot.dense() for slot in solve_for(b_slots).out])
    x_slots = solve.out

    def other(i: int, jaxpr: Any, from_slots: Sequence[Slot], to_slots: Sequence[Slot]) -> Flat | None:
        if jaxpr is None:
            return None
        slots = (*consts[i][1], *from_slots)
        flat = subjaxpr(trace, jaxpr, slots, what=_WHAT)
        if not _leaves_agree(flat.out, to_slots):
            # Dense, but still with its own unit, say.
            own = [with_dense_parts(slot) if held(slot.like) else slot.dense() for slot in flat.out]
            targets = own if _leaves_agree(own, to_slots) else to_slots
            flat = subjaxpr(trace, jaxpr, slots, targets=targets, what=_WHAT)
        return flat

    flats = [
        other(0, jaxprs.matvec, x_slots, b_slots),
        other(1, jaxprs.vecmat, b_slots, x_slots),
        solve,
        other(3, jaxprs.transpose_solve, x_slots, b_slots),
    ]
    leaves = [[*(flat.consts if flat else ()), *cs[0]] for flat, cs in zip(flats, consts, strict=True)]
    params = params | {
        "const_lengths": type(lengths)(*map(len, leaves)),
        "jaxprs": type(jaxprs)(*(flat and flat.jaxpr for flat in flats)),
    }
    out = primitive.bind(*[leaf for group in leaves for leaf in group], *b_leaves, **params)
    return unflatten(x_slots, out)


def _as_a_space(x: Any, operands: Sequence[Any]) -> Any:
    """`x`, made dense in parts or as a whole if it is not linear in all of its leaves."""
    if is_value(x) and x.linear and not is_a_space(x):
        x = map_parts(lambda part: _as_a_space(part, [part]), x)
    return dense(x, _WHAT, operands, hint=_HINT) if is_value(x) and not is_a_space(x) else x


def _leaves_agree(a: Sequence[Slot], b: Sequence[Slot]) -> bool:
    return [x for slot in a for x in slot.strong().avals] == [x for slot in b for x in slot.strong().avals]
