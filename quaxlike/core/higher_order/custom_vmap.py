"""`jax.custom_batching.custom_vmap`: the function and its batching rule, both on Values."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_batching import custom_vmap

from .. import compat
from ..jaxprs.evaluate import call_on_values, evaluate
from ..jaxprs.slots import flatten, per_slot, spread, unflatten
from ..jaxprs.subjaxpr import subjaxpr
from ..jaxprs.unify import conform
from ..trace import QuaxTrace, builtin
from ..values import is_value


@builtin("custom_vmap_call")
def _custom_vmap(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    call, what = compat.closed(params["call"]), "custom_vmap"
    if compat.is_eval_trace(trace.parent_trace):  # no transform below batches
        return evaluate(trace, call, operands)
    rule, in_tree, out_tree = params["rule"], params["in_tree"], params["out_tree"]
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, call, slots, what=what)
    # The rule may run after the current traces end, so it must not capture them.
    level = QuaxTrace(jax.core.Trace(), trace.tag, trace.resolver)

    def rule_on_leaves(axis_size: int, batched: Sequence[bool], *leaves: Any) -> tuple[list[Any], list[bool]]:
        flags = [any(of_slot) for of_slot in per_slot(slots, batched)]
        # If a part of a Value is batched, all of it is.
        whole = [
            jnp.broadcast_to(x, (axis_size, *x.shape)) if flag and not has_axis else x
            for x, has_axis, flag in zip(leaves, batched, spread(flags, slots), strict=True)
        ]

        def on_values(*args: Any) -> tuple[list[Any], list[bool]]:
            in_batched = list(jtu.tree_unflatten(in_tree, flags))
            out, out_batched = rule(axis_size, in_batched, *jtu.tree_unflatten(in_tree, args))
            results, found = jtu.tree_flatten(out, is_leaf=is_value)
            flags_out, of_flags = jtu.tree_flatten(out_batched)
            if not found == of_flags == out_tree:
                raise ValueError(
                    f"The vmap rule of {getattr(rule, '__name__', rule)} returned results {found} and "
                    f"out_batched {of_flags}; expected {out_tree} for both."
                )
            return results, flags_out

        results, out_flags = call_on_values(level, on_values, unflatten(slots, whole))
        outs = [
            jax.vmap(lambda x, slot=slot: conform(x, slot, what))(x) if b else conform(x, slot, what)
            for x, b, slot in zip(results, out_flags, flat.out, strict=True)
        ]
        return flatten(outs)[0], list(spread(out_flags, flat.out))

    # Whatever the jaxpr closes over is left to JAX, which does not allow it to be batched.
    of_leaves = custom_vmap(lambda *leaves: jexc.jaxpr_as_fun(flat.jaxpr)(*flat.consts, *leaves))
    of_leaves.def_vmap(rule_on_leaves)
    return unflatten(flat.out, of_leaves(*leaves))
