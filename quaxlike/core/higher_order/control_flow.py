"""`lax.cond`, `lax.switch`, `lax.while_loop`, `lax.fori_loop`, `lax.scan` and `lax.map` on Values.

XLA only sees leaves. So the results of all branches must have the same form (i.e. the same class, statics and
leaf shapes), and so must a loop's carry before and after an iteration. This file searches for a common form.
There may be none: for example, the rank of a LoRA may grow in every iteration. So the search gives up after a
few attempts.

A scan iterates over the rows of a Value, if its type can be sliced into rows.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.extend.core import Primitive

from .. import compat
from ..jaxprs.evaluate import Flat, subjaxpr, with_leading_inputs
from ..jaxprs.linearity import map_parts
from ..jaxprs.residuals import with_few_residuals
from ..jaxprs.slots import (
    LeafLayout,
    axes_of_rows,
    flatten,
    has_in_leaves,
    is_read_by_its_leaf,
    row_aval,
    split,
    unflatten,
)
from ..jaxprs.unify import (
    OperandMismatch,
    convert_to,
    dense_where_it_changes,
    unify,
    with_dense_parts,
)
from ..plain_arrays import hooks
from ..policy import dense
from ..trace import Operands, Params, QuaxTrace, builtin
from ..values import Value, aval_of, is_value


@builtin("cond")
def _cond(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    found, (slot,) = flatten(operands[:1])
    index = found[0] if is_read_by_its_leaf(slot, "cond") else dense(operands[0], "cond", operands)
    leaves, slots = flatten(operands[1:])
    branches = params["branches"]
    # First trace each branch without constraining its results' form. Usually they all agree. Only if they
    # differ, trace again with a common form.
    flats = [subjaxpr(trace, branch, slots, what="cond") for branch in branches]
    out = flats[0].out
    if any(flat.out != out for flat in flats):
        of_branches = zip(*(flat.out for flat in flats), strict=True)
        out = tuple(
            functools.reduce(lambda a, b, i=i: unify(a, b, f"Result {i} of the branches of cond"), outs)
            for i, outs in enumerate(of_branches)
        )
        if not all(all(map(LeafLayout.admits, out, flat.out)) for flat in flats):
            flats = [subjaxpr(trace, branch, slots, targets=out, what="cond") for branch in branches]
    # JAX passes the same operands to every branch, so each has to accept the constants of all of them.
    flats, consts = with_leading_inputs(flats)
    params = params | {"branches": tuple(flat.jaxpr for flat in flats)}
    return unflatten(out, primitive.bind(index, *consts, *leaves, **params))


@builtin("while")
def _while(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    cond_operands, body_operands, init = split(operands, params["cond_nconsts"], params["body_nconsts"])
    cond_leaves, cond_slots = flatten(cond_operands)
    body_leaves, body_slots = flatten(body_operands)

    def body_for(carry: Sequence[LeafLayout], targets: Sequence[LeafLayout | None] | None) -> Flat:
        slots = (*body_slots, *carry)
        return subjaxpr(trace, params["body_jaxpr"], slots, targets=targets, what="while_loop")

    (predicate,) = params["cond_jaxpr"].out_avals
    init_leaves, carry, body = carry_fixed_point(init, body_for, body_slots, "while_loop", predicate.ndim)
    slots, what = (*cond_slots, *carry), "the condition of while_loop"
    cond = subjaxpr(trace, params["cond_jaxpr"], slots, what=what)
    if not is_read_by_its_leaf(cond.out[0], what):
        # The condition returned a Value, but the loop requires a plain boolean, so convert it.
        targets = [LeafLayout(None, (predicate,))]
        cond = subjaxpr(trace, params["cond_jaxpr"], slots, targets=targets, what=what)
    params = params | {
        "cond_jaxpr": cond.jaxpr,
        "body_jaxpr": body.jaxpr,
        "cond_nconsts": len(cond.consts) + len(cond_leaves),
        "body_nconsts": len(body.consts) + len(body_leaves),
    }
    out = primitive.bind(*cond.consts, *cond_leaves, *body.consts, *body_leaves, *init_leaves, **params)
    return unflatten(carry, out)


# How often each part of the carry may change its form. (Once isn't always enough: the form of one part may
# depend on another's.)
_MOST_CHANGES = 2


def carry_fixed_point(
    init: Sequence[Any],
    body_for: Callable[[Sequence[LeafLayout], Sequence[LeafLayout | None] | None], Flat],
    others: Sequence[LeafLayout],
    what: str,
    stacked: int = 0,
) -> tuple[list[Any], tuple[LeafLayout, ...], Flat]:
    """Finds a form for a loop's carry that each iteration preserves.

    A plain array turning into a Value is lifted by `promote`, or the Value is materialised if its type
    doesn't define this. Two different Values are converted to a common form; it's an error if there isn't
    one. A Value (or a part) changing its form in every iteration is materialised.

    **Arguments:**

    - `body_for`: returns the body for a carry with the given slots, converting its results to the targets.
    - `others`: the slots of the body's other operands.
    - `stacked`: how many axes the predicate has. If not zero, several loops run at once, and may need
        different iteration counts. Their carries are selected leaf by leaf, so a Value is materialised unless
        all its leaves have these axes.

    **Returns:**

    The leaves of `init` in this form, the slots of the carry, and the body.
    """
    leaves, slots = flatten(init)

    def allowed(slot: LeafLayout) -> LeafLayout:
        return slot if has_in_leaves(slot, stacked) else slot.dense()

    def started(slot: LeafLayout, x: Any) -> LeafLayout:
        return hooks.placeholders.start(slot, x) if hooks.placeholders else slot

    if hooks.placeholders:
        slots = hooks.placeholders.starts(slots, init, others)
    carry = tuple(map(allowed, slots))
    changes = [0] * len(init)  # how often each carry had to change its form

    def joined(i: int, a: LeafLayout, b: LeafLayout) -> LeafLayout:
        # By now the changing parts have been materialised, so the search terminates.
        if changes[i] > _MOST_CHANGES:
            return a
        message = f"The carry changed structure: carry {i} of {what}, before and after an iteration,"
        out = allowed(unify(a, b, message))
        # Don't count lifting a plain array: this can only happen once.
        changes[i] += a.treedef is not None and not out.has_form_of(a)
        return out if changes[i] <= _MOST_CHANGES else allowed(dense_where_it_changes(a, b))

    while True:
        try:
            # Trace the body with the carry's current form, to find its results' form.
            body = body_for(carry, None)
        except OperandMismatch as mismatch:
            if hooks.placeholders is None:
                raise

            def results_for(carry: Sequence[LeafLayout]) -> tuple[LeafLayout, ...]:
                return body_for(carry, None).out

            lifted = hooks.placeholders.revealed(init, carry, results_for, mismatch.cls, unify)
            if lifted is None:
                raise
            carry = lifted
            continue
        after = body.out[: len(carry)]
        # The usual case: the form didn't change, and nothing needs to be converted.
        if all(map(LeafLayout.admits, carry, after)):
            break
        unified = tuple(
            joined(i, a if b.treedef is None else started(a, x), b)
            for i, (x, a, b) in enumerate(zip(init, carry, after, strict=True))
        )
        if unified == carry:  # only the results have to be converted
            rest = (None,) * (len(body.out) - len(carry))
            body = body_for(carry, (*carry, *rest))
            break
        carry = unified
    # Convert the initial values to the carry's form once, before the loop.
    if carry != slots:
        leaves, _ = flatten([convert_to(x, slot, what) for x, slot in zip(init, carry, strict=True)])
    return leaves, carry, body


@builtin("scan")
def _scan(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    n_consts, n_carry = compat.scan_arity(params)
    consts, init, xs = split(operands, n_consts, n_carry)
    xs = [_cuttable(x, operands) for x in xs]
    const_leaves, const_slots = flatten(consts)
    x_leaves, x_slots, shared = _rows(xs)
    length = params["length"]

    def body_for(carry: Sequence[LeafLayout], targets: Sequence[LeafLayout | None] | None) -> Flat:
        n_carried = sum(map(len, carry))
        order = _order(len(const_leaves), n_carried, shared)
        slots = (*const_slots, *carry, *x_slots)

        def body(targets: Sequence[LeafLayout | None] | None) -> Flat:
            return subjaxpr(trace, params["jaxpr"], slots, targets=targets, order=order, what="scan")

        flat = body(targets)
        ys = [_stacking(slot, length) for slot in flat.out[len(carry) :]]
        # Values can only be stacked if their leaves can. If some have to be materialised for this, trace the
        # body again.
        if ys == list(flat.out[len(carry) :]):
            return flat
        carried = targets[: len(carry)] if targets else [None] * len(carry)
        return body([*carried, *ys])

    carry_leaves, carry, body = carry_fixed_point(init, body_for, (*const_slots, *x_slots), "scan")
    y_slots = body.out[len(carry) :]
    before = [leaf for leaf, is_shared in zip(x_leaves, shared, strict=True) if is_shared]
    rows = [leaf for leaf, is_shared in zip(x_leaves, shared, strict=True) if not is_shared]
    leading = [*body.consts, *const_leaves, *before]
    carried = range(len(leading), len(leading) + len(carry_leaves))
    # Otherwise the backward pass would store a copy of every frozen weight for each iteration.
    jaxpr, constants = with_few_residuals(body.jaxpr, carried)
    inputs = [*leading, *carry_leaves, *rows]
    inputs = [jax.lax.stop_gradient(x) if i in constants else x for i, x in enumerate(inputs)]
    params = compat.scan_params(
        params, jaxpr, len(leading), len(carry_leaves), len(rows), sum(map(len, y_slots))
    )
    out = primitive.bind(*inputs, **params)
    return unflatten((*carry, *y_slots), out)


def _cuttable(x: Any, operands: Sequence[Any]) -> Any:
    """Materialises a Value, in parts or as a whole, if it can't be sliced into rows."""
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


def _is_cut(slot: LeafLayout) -> bool:
    return axes_of_rows(slot) is not NotImplemented


def _rows(xs: Sequence[Any]) -> tuple[list[Any], list[LeafLayout], list[bool]]:
    """Returns the leaves to scan over (with rows first), the slot for a single row of each operand, and which
    leaves are shared by all rows."""
    leaves: list[Any] = []
    slots: list[LeafLayout] = []
    shared: list[bool] = []
    for x in xs:
        parts, (slot,) = flatten([x])
        axes = [0] if slot.treedef is None else list(axes_of_rows(slot))
        if len(axes) != len(parts):
            raise ValueError(
                f"{type(x).__name__}.leading_axis() must name one axis (or None) for each of its "
                f"{len(parts)} array leaves; found {axes}."
            )
        # A scan always slices its operands along their first axis, so move the axis of the rows there.
        parts = [p if a is None else jnp.moveaxis(p, a, 0) for p, a in zip(parts, axes, strict=True)]
        row = slot.with_avals(
            jax.typeof(p) if a is None else row_aval(jax.typeof(p)) for p, a in zip(parts, axes, strict=True)
        )
        # Without this check, an incorrect `leading_axis` would silently scan over something other than the
        # array's rows.
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
    """Returns each leaf's position among the loop's inputs.

    Leaves shared by all rows become constants.
    """
    if not any(shared):
        return None
    first_carried = n_consts + sum(shared)
    at_shared, at_row = itertools.count(n_consts), itertools.count(first_carried + n_carried)
    carried = range(first_carried, first_carried + n_carried)
    return [*range(n_consts), *carried, *(next(at_shared if is_shared else at_row) for is_shared in shared)]


def _stacking(slot: LeafLayout, length: int) -> LeafLayout:
    """Materialises a slot, in parts or as a whole, if stacking the leaves doesn't stack the arrays."""
    if stacks(slot, length):
        return slot
    in_parts = with_dense_parts(slot)
    if stacks(in_parts, length):
        return in_parts
    if slot.cls.leading_axis is not Value.leading_axis:
        return slot.dense("a stack of them along a new leading axis is not of its type.")
    name = f"{slot.cls.__name__}.leading_axis()"
    return slot.dense(f"the scan stacks its leaves. Define `{name}`, to say along which axes of them.")


def stacks(slot: LeafLayout, length: int) -> bool:
    """Returns whether stacking the leaves of Values gives a Value representing the stacked arrays."""
    if slot.treedef is None:
        return True
    # Check the stack itself as well. It may be invalid even if the rows are valid: static fields may only
    # make sense for a single row.
    stacked = slot.with_avals(jexc.unmapped_aval(length, 0, a) for a in slot.avals)
    try:
        axes = axes_of_rows(stacked)
        shape, dtype = stacked.aval.shape, stacked.aval.dtype
    except Exception:  # this type can't be stacked: its shapes don't fit
        return False
    if axes is NotImplemented or any(axis != 0 for axis in axes):
        return False
    return shape == (length, *slot.aval.shape) and dtype == slot.aval.dtype
