"""Primitives made by Equinox's `create_vprim`: their implementation, with their own derivative and transpose.

These are lineax's `linear_solve`, and, by the name "vprim", what any of them becomes under `vmap`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .. import compat
from ..jaxprs.evaluate import call_on_values
from ..jaxprs.slots import Slot, flatten, per_slot, split
from ..policy import dense
from ..quaxify import value_of
from ..trace import QuaxTrace, builtin
from ..values import materialise
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
            # The right-hand side of the tangent solve is made of them. As an array, it has the transpose below.
            tangents = [dense(value_of(t), "linear_solve") for t in tangents]
        tangents = [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in tangents]
        return compat.jvp_rule(primitive)(primals, tangents, **params)

    def call(*operands: Any) -> list[Any]:
        return call_inline(trace, implementation, jvp, operands, symbolic_zeros=True)

    if compat.is_eval_trace(trace.parent_trace):  # no transform below differentiates
        return call(*operands)
    leaves, slots = flatten(operands)
    out: tuple[Slot, ...] = ()

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out
        flat, out = flatten(call(*(slot.unflatten(x) for slot, x in zip(slots, per_slot(slots, leaves)))))
        return flat

    debug_info = jexc.DebugInfo(primitive.name, f"the {primitive.name} primitive", None, None)
    jaxpr, consts = compat.trace_to_jaxpr(on_leaves, [a for slot in slots for a in slot.avals], debug_info)
    if any(slot.treedef is not None for slot in out):
        return call(*operands)  # whose implementation is transposed

    def transpose(leaves: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        constants, leaves = split(leaves, len(consts))
        groups = per_slot(slots, leaves)
        linear = [any(map(ad.is_undefined_primal, group)) for group in groups]
        operands = [
            ad.UndefinedPrimal(slot.aval) if is_linear else slot.unflatten(group)
            for slot, group, is_linear in zip(slots, groups, linear, strict=True)
        ]
        rule = functools.partial(compat.transpose_rule(primitive), list(cts), **params)
        found = call_on_values(trace, rule, operands)
        of_leaves: list[Any] = []
        for slot, group, is_linear, ct in zip(slots, groups, linear, found, strict=True):
            of_leaves += _pulled_back(slot, group, ct, primitive) if is_linear else group
        return [*constants, *of_leaves]

    return linear_call(compat.with_consts(jaxpr, ()), transpose, [*consts, *leaves])


def _pulled_back(slot: Slot, leaves: Sequence[Any], ct: Any, primitive: jexc.Primitive) -> list[Any]:
    """The cotangents of those of the leaves that are undefined, from that of the operand that they make."""
    linear = [i for i, x in enumerate(leaves) if ad.is_undefined_primal(x)]
    out = list(leaves)

    def of_linear(xs: Sequence[Any]) -> Any:
        at = dict(zip(linear, xs, strict=True))
        return materialise(slot.unflatten([at.get(i, x) for i, x in enumerate(leaves)]))

    zeros = [jnp.zeros(slot.avals[i].shape, slot.avals[i].dtype) for i in linear]
    ct = ad.Zero(slot.aval.to_ct_aval()) if ct is None else ct
    (cts,) = jax.vjp(of_linear, zeros)[1](dense(ad.instantiate_zeros(ct), primitive.name))
    for i, x in zip(linear, cts, strict=True):
        out[i] = x
    return out


def _unbatched(primitive: jexc.Primitive, params: dict[str, Any]) -> jexc.Primitive:
    """The primitive that `vmap`, perhaps several times, made a "vprim"."""
    return _unbatched(params["prim"], dict(params["params"])) if primitive.name == "vprim" else primitive
