"""`lax.scan` (and so `lax.map`, and `fori_loop` with a known trip count) over the rows of Values, where
their type can cut them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from .. import compat
from ..jaxprs.linearity import map_parts
from ..jaxprs.slots import Slot, axes_of_rows, flatten, row_aval, split, unflatten
from ..jaxprs.subjaxpr import Flat, subjaxpr
from ..jaxprs.unify import with_dense_parts
from ..policy import dense
from ..trace import QuaxTrace, builtin
from ..values import Value, aval_of, is_value
from .while_loop import carry_fixed_point


@builtin("scan")
def _scan(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    n_consts, n_carry = compat.scan_arity(params)
    consts, init, xs = split(operands, n_consts, n_carry)
    xs = [_cuttable(x, operands) for x in xs]
    const_leaves, const_slots = flatten(consts)
    x_leaves, x_slots, shared = _rows(xs)
    length = params["length"]

    def body_for(carry: Sequence[Slot], targets: Sequence[Slot | None] | None) -> Flat:
        n_carried = sum(map(len, carry))
        order = _order(len(const_leaves), n_carried, shared)
        slots = (*const_slots, *carry, *x_slots)

        def body(targets: Sequence[Slot | None] | None) -> Flat:
            return subjaxpr(trace, params["jaxpr"], slots, targets=targets, order=order, what="scan")

        flat = body(targets)
        ys = [_stacking(slot, length) for slot in flat.out[len(carry) :]]
        if ys == list(flat.out[len(carry) :]):
            return flat
        carried = targets[: len(carry)] if targets else [None] * len(carry)
        return body([*carried, *ys])

    carry_leaves, carry, body = carry_fixed_point(init, body_for, (*const_slots, *x_slots), "scan")
    y_slots = body.out[len(carry) :]
    before = [leaf for leaf, is_shared in zip(x_leaves, shared, strict=True) if is_shared]
    rows = [leaf for leaf, is_shared in zip(x_leaves, shared, strict=True) if not is_shared]
    leading = [*body.consts, *const_leaves, *before]
    params = compat.scan_params(
        params, body.jaxpr, len(leading), len(carry_leaves), len(rows), sum(map(len, y_slots))
    )
    out = primitive.bind(*leading, *carry_leaves, *rows, **params)
    return unflatten((*carry, *y_slots), out)


def _cuttable(x: Any, operands: Sequence[Any]) -> Any:
    """`x`, made dense in parts or as a whole if it is a Value that its type cannot cut into rows."""
    if not is_value(x) or _is_cut(slot := flatten([x])[1][0]):
        return x
    if _is_cut(with_dense_parts(slot)):
        x = map_parts(lambda part: _cuttable(part, [part]), x)
        if _is_cut(flatten([x])[1][0]):
            return x
    cls = type(x)
    if cls.leading_axis is Value.leading_axis:
        hint = f"To scan over its rows, define `{cls.__name__}.leading_axis()`."
    else:
        hint = f"A row of this {cls.__name__} is not of its type. A stack of them can be scanned over."
    return dense(x, "scan", operands, hint=hint)


def _is_cut(slot: Slot) -> bool:
    return axes_of_rows(slot) is not NotImplemented


def _rows(xs: Sequence[Any]) -> tuple[list[Any], list[Slot], list[bool]]:
    """The leaves that are scanned over, rows first; the slots of one row; which leaves all rows share."""
    leaves: list[Any] = []
    slots: list[Slot] = []
    shared: list[bool] = []
    for x in xs:
        parts, (slot,) = flatten([x])
        axes = [0] if slot.treedef is None else list(axes_of_rows(slot))
        if len(axes) != len(parts):
            raise ValueError(
                f"{type(x).__name__}.leading_axis() must name one axis (or None) for each of its "
                f"{len(parts)} array leaves; found {axes}."
            )
        parts = [p if a is None else jnp.moveaxis(p, a, 0) for p, a in zip(parts, axes, strict=True)]
        row = slot.with_avals(
            jax.typeof(p) if a is None else row_aval(jax.typeof(p)) for p, a in zip(parts, axes, strict=True)
        )
        if is_value(x) and row.aval.shape != aval_of(x).shape[1:]:
            raise ValueError(
                f"{type(x).__name__}.leading_axis() gives {axes} for leaves of shapes "
                f"{[a.shape for a in slot.avals]}, but that makes rows of shape {row.aval.shape} where "
                f"the array of shape {aval_of(x).shape} has rows of shape {aval_of(x).shape[1:]}."
            )
        leaves += parts
        slots.append(row)
        shared += [a is None for a in axes]
    return leaves, slots, shared


def _order(n_consts: int, n_carried: int, shared: Sequence[bool]) -> list[int] | None:
    """The position of each leaf among the inputs: leaves that all rows share become constants of the loop."""
    if not any(shared):
        return None
    n_shared = sum(shared)
    at_shared, at_row = n_consts, n_consts + n_shared + n_carried
    order = [*range(n_consts), *range(n_consts + n_shared, n_consts + n_shared + n_carried)]
    for is_shared in shared:
        if is_shared:
            order.append(at_shared)
            at_shared += 1
        else:
            order.append(at_row)
            at_row += 1
    return order


def _stacking(slot: Slot, length: int) -> Slot:
    """The slot, made dense in parts or as a whole if stacking its leaves does not stack the arrays."""
    if stacks(slot, length):
        return slot
    in_parts = with_dense_parts(slot)
    if stacks(in_parts, length):
        return in_parts
    if slot.cls.leading_axis is not Value.leading_axis:
        return slot.dense("a stack of them along a new leading axis is not of its type.")
    name = f"{slot.cls.__name__}.leading_axis()"
    return slot.dense(f"the scan stacks its leaves. Define `{name}`, to say along which axes of them.")


def stacks(slot: Slot, length: int) -> bool:
    """Whether stacking the leaves of such Values gives a Value for the stacked arrays."""
    if slot.treedef is None:
        return True
    stacked = slot.with_avals(jexc.unmapped_aval(length, 0, a) for a in slot.avals)
    try:
        axes = axes_of_rows(stacked)
        shape, dtype = stacked.aval.shape, stacked.aval.dtype
    except Exception:  # a type whose shapes do not fit cannot be stacked
        return False
    if axes is NotImplemented or any(axis != 0 for axis in axes):
        return False
    return shape == (length, *slot.aval.shape) and dtype == slot.aval.dtype
