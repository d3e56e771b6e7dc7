"""Primitives made by Equinox's `create_vprim`: their implementation, with their own derivative and transpose.

These are lineax's `linear_solve`, and, by the name "vprim", what any of them becomes under `vmap`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .. import compat
from ..jaxprs.evaluate import call_on_values
from ..jaxprs.linearity import has_tangent
from ..jaxprs.slots import Slot, flatten, is_a_space, per_slot, split, spread, unflatten
from ..policy import dense
from ..quaxify import value_of
from ..trace import QuaxTrace, builtin
from ..values import aval_of, is_value
from .custom_derivatives import cotangents_in, cotangents_out
from .inline import call_inline
from .linear_call import linear_call


@builtin("linear_solve", "vprim")
def _with_own_rules(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    def implementation(*flat: Any) -> list[Any]:
        return list(compat.vprim_implementation(primitive)(*flat, **params))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        if _unbatched(primitive, params).name == "linear_solve":
            # The right-hand side of the tangent solve is made of them.
            tangents = [dense(value_of(t), "linear_solve") for t in tangents]
        tangents = [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
        return compat.jvp_rule(primitive)(primals, tangents, **params)

    def call(*operands: Any) -> list[Any]:
        return call_inline(trace, implementation, jvp, operands, symbolic_zeros=True)

    if compat.is_eval_trace(trace.parent_trace):  # no transform below differentiates
        return call(*operands)
    leaves, slots = flatten(operands)
    out: tuple[Slot, ...] = ()
    has_transpose = True

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out, has_transpose
        results = call(*unflatten(slots, leaves))
        moving = [x for x in results if is_value(x) and has_tangent(aval_of(x))]
        has_transpose = all(map(is_a_space, moving))
        flat, out = flatten(results)
        return flat

    debug_info = jexc.DebugInfo(primitive.name, f"the {primitive.name} primitive", None, None)
    jaxpr, consts = compat.trace_to_jaxpr(on_leaves, [a for slot in slots for a in slot.avals], debug_info)
    if not has_transpose:
        return call(*operands)  # whose implementation is transposed

    def transpose(leaves: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        constants, leaves = split(leaves, len(consts))
        groups = per_slot(slots, leaves)
        linear = [any(map(ad.is_undefined_primal, group)) for group in groups]
        operands = [
            ad.UndefinedPrimal(slot.aval) if is_linear else slot.unflatten(group)
            for slot, group, is_linear in zip(slots, groups, linear, strict=True)
        ]
        types = {cls for slot in (*slots, *out) for cls in slot.classes}
        cts = [
            _zero(*cotangents_in([slot], group, (), True, types), slot)
            if has_tangent(slot.aval)
            else _zero(None, slot)
            for slot, group in zip(out, per_slot(out, cts), strict=True)
        ]
        found = call_on_values(trace, rule, [*cts, *operands])
        found = [_zero(ct if own else None, slot) for ct, own, slot in zip(found, linear, slots, strict=True)]
        defined = [jnp.zeros_like(x.aval) if ad.is_undefined_primal(x) else x for x in leaves]
        is_value_leaf = spread([slot.treedef is not None for slot in slots], slots)
        kept = itertools.compress(defined, is_value_leaf)
        return [*constants, *cotangents_out(slots, kept, found)]

    def rule(*flat: Any) -> Any:
        cts, operands = split(flat, len(out))
        return compat.transpose_rule(primitive)(list(cts), *operands, **params)

    return linear_call(compat.with_consts(jaxpr, ()), transpose, [*consts, *leaves])


def _zero(ct: Any, slot: Slot) -> Any:
    """`ct`, which may be a zero in any of its forms."""
    return ad.Zero(slot.aval.to_ct_aval()) if ct is None or isinstance(ct, SymbolicZero) else ct


def _unbatched(primitive: jexc.Primitive, params: dict[str, Any]) -> jexc.Primitive:
    """The primitive that `vmap`, perhaps several times, made a "vprim"."""
    return _unbatched(params["prim"], dict(params["params"])) if primitive.name == "vprim" else primitive
