"""Jaxprs on Values as flat jaxprs on their leaves, for the primitives that carry code."""

import dataclasses
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc

from .. import compat, recording
from ..policy import policy_key
from ..trace import QuaxTrace
from .evaluate import evaluate
from .slots import Slot, flatten, loosened, split, unflatten
from .unify import conform


@dataclasses.dataclass(frozen=True)
class Flat:
    """A jaxpr on leaves: its inputs are `consts`, then the leaves of the operands."""

    jaxpr: jexc.ClosedJaxpr  # closes over concrete constants
    consts: tuple[Any, ...]  # those that an outer transform traces; they lead the inputs
    out: tuple[Slot, ...]


memo: "weakref.WeakKeyDictionary[Any, dict[Any, Flat]]" = weakref.WeakKeyDictionary()
_memo_lock = threading.Lock()


def subjaxpr(
    trace: QuaxTrace,
    jaxpr: jexc.ClosedJaxpr,
    slots: Sequence[Slot],
    *,
    targets: Sequence[Slot | None] | None = None,
    order: Sequence[int] | None = None,
    what: str = "",
    closed: bool = True,
) -> Flat:
    """Quaxifies `jaxpr` for operands in `slots`. Memoised for as long as `jaxpr` lives.

    **Arguments:**

    - `trace`: the level whose rules are used.
    - `targets`: for each result, the slot to convert it to; None leaves it unchanged.
    - `order`: the position of each leaf of the operands among the flat inputs. Default: in order.
    - `what`: the name of the caller, for messages.
    - `closed`: whether concrete constants may stay inside the jaxpr; else they lead the inputs as well.
    """
    key = (
        tuple(slots),
        None if targets is None else tuple(targets),
        None if order is None else tuple(order),
        what,
        closed,
        trace.resolver,
        policy_key(),
        compat.trace_context(),
    )
    if (recorder := recording.active()) is not None:
        tracing = functools.partial(_trace, trace, jaxpr, slots, targets, order, what, closed)
        return recorder.trace(jaxpr, what, key, tracing)
    with _memo_lock:
        known = memo.setdefault(jaxpr, {})
    flat = known.get(key)
    if flat is None:
        flat = _trace(trace, jaxpr, slots, targets, order, what, closed)
        if not any(isinstance(c, jax.core.Tracer) for c in (*flat.consts, *jaxpr.consts)):
            known[key] = flat
    return flat


def _trace(
    trace: QuaxTrace,
    jaxpr: jexc.ClosedJaxpr,
    slots: Sequence[Slot],
    targets: Sequence[Slot | None] | None,
    order: Sequence[int] | None,
    what: str,
    closed: bool,
) -> Flat:
    out: tuple[Slot, ...] = ()

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out
        if order is not None:
            leaves = tuple(leaves[i] for i in order)
        results = evaluate(trace, jaxpr, unflatten(slots, leaves))
        if targets is not None:
            results = [
                x if slot is None else conform(x, slot, what)
                for x, slot in zip(results, targets, strict=True)
            ]
        flat, out = flatten(results)
        out = loosened(out, results, slots)
        return flat

    avals = [a for slot in slots for a in slot.avals]
    if order is not None:
        avals = [avals[list(order).index(i)] for i in range(len(avals))]
    debug_info = compat.debug_info_of(jaxpr)
    flat, consts = compat.trace_to_jaxpr(on_leaves, avals, debug_info)
    if closed and not any(isinstance(c, jax.core.Tracer) for c in consts):
        return Flat(compat.with_consts(flat, consts), (), out)
    return Flat(compat.with_consts(flat, ()), tuple(consts), out)


def with_leading_inputs(flats: Sequence[Flat], n_leaves: int) -> tuple[list[Flat], tuple[Any, ...]]:
    """Makes several jaxprs of the same operands take the constants of all of them."""
    consts = tuple(c for flat in flats for c in flat.consts)
    if not consts:
        return list(flats), ()
    sizes = [len(flat.consts) for flat in flats]
    out = []
    for i, flat in enumerate(flats):

        def widened(*inputs: Any, i: int = i, flat: Flat = flat) -> list[Any]:
            *groups, leaves = split(inputs, *sizes)
            return jexc.jaxpr_as_fun(flat.jaxpr)(*groups[i], *leaves)

        avals = (
            [*map(jax.typeof, consts), *flat.jaxpr.in_avals[-n_leaves:]]
            if n_leaves
            else [*map(jax.typeof, consts)]
        )
        jaxpr, more = compat.trace_to_jaxpr(widened, avals, compat.debug_info_of(flat.jaxpr))
        out.append(dataclasses.replace(flat, jaxpr=compat.with_consts(jaxpr, more), consts=()))
    return out, consts
