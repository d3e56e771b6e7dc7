"""lineax's `linear_solve`, evaluated inline with its own derivative and transpose."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox.internal as eqxi
import jax
import jax.extend.core as jexc
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .. import compat
from ..jaxprs.evaluate import call_on_values
from ..jaxprs.slots import Slot, flatten, split, unflatten
from ..policy import dense
from ..quaxify import value_of
from ..trace import QuaxTrace, builtin
from ..values import is_value
from .inline import call_inline
from .linear_call import linear_call


@builtin("linear_solve")
def _lineax_solve(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    def implementation(*flat: Any) -> list[Any]:
        return compat.vprim_implementation(primitive)(*flat, **params)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        # The tangent solve must remain the primitive, which has a transpose, so its operands must be arrays.
        tangents = [dense(value_of(t), "linear_solve") for t in tangents]
        tangents = [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
        return compat.jvp_rule(primitive)(primals, tangents, **params)

    def call(operands: Sequence[Any]) -> list[Any]:
        return call_inline(trace, implementation, jvp, operands, symbolic_zeros=True)

    vector = _vector_of_solve(operands, params)
    if compat.is_eval_trace(trace.parent_trace) or any(is_value(operands[i]) for i in vector):
        return call(operands)
    return _linear_in(vector, trace, primitive, call, operands, params)


def _vector_of_solve(operands: Sequence[Any], params: dict[str, Any]) -> list[int]:
    """The indices of the operands that are the right-hand side of lineax's `linear_solve`."""

    def vector(operator: Any, state: Any, vector: Any, options: Any, solver: Any, throw: Any) -> Any:
        return vector

    places = eqxi.filter_primitive_def(vector)(*range(len(operands)), **params | {"flatten": jtu.tree_leaves})
    return [i for i in places if isinstance(i, int)]


def _linear_in(
    linear: Sequence[int],
    trace: QuaxTrace,
    primitive: jexc.Primitive,
    call: Callable[[Sequence[Any]], list[Any]],
    operands: Sequence[Any],
    params: dict[str, Any],
) -> list[Any]:
    """Calls `call` on the operands. If its results are plain arrays, its transpose with respect to the
    `linear` operands, also plain arrays, is that of `primitive`."""
    others = [i for i in range(len(operands)) if i not in linear]
    leaves, slots = flatten([operands[i] for i in others])
    out: tuple[Slot, ...] = ()

    def joined(others_: Sequence[Any], linear_: Sequence[Any]) -> list[Any]:
        at = dict(zip((*others, *linear), (*others_, *linear_), strict=True))
        return [at[i] for i in range(len(operands))]

    def on_leaves(*xs: Any) -> list[Any]:
        nonlocal out
        leaves, arrays = split(xs, sum(map(len, slots)))
        flat, out = flatten(call(joined(unflatten(slots, leaves), arrays)))
        return flat

    arrays = [operands[i] for i in linear]
    avals = [*(a for slot in slots for a in slot.avals), *map(jax.typeof, arrays)]
    debug_info = jexc.DebugInfo(primitive.name, f"the {primitive.name} primitive", None, None)
    jaxpr, consts = compat.trace_to_jaxpr(on_leaves, avals, debug_info)
    if any(slot.treedef is not None for slot in out):
        return call(operands)

    def transpose(others: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        undefined = [ad.UndefinedPrimal(a) for a in avals[-len(linear) :]]
        operands = joined(unflatten(slots, others[len(consts) :]), undefined)
        rule = functools.partial(compat.transpose_rule(primitive), list(cts), **params)
        found = call_on_values(trace, rule, operands)
        return [dense(ad.instantiate_zeros(found[i]), primitive.name) for i in linear]

    return linear_call(compat.with_consts(jaxpr, ()), transpose, [*consts, *leaves], arrays)
