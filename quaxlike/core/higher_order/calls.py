"""Primitives that call a function, once: the same call, applied to the leaves.

They are `jax.jit`, `jax.checkpoint`, `custom_vmap`, and our `sequential_vmap_with_vjp` and `custom_dce`.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive

from .. import compat
from ..jaxprs.evaluate import call_on_values, evaluate, subjaxpr
from ..jaxprs.slots import LeafLayout, flatten, leaf_specs, per_slot, spread, unflatten
from ..jaxprs.unify import convert_to
from ..trace import Operands, Params, QuaxTrace, builtin
from ..values import is_value


@builtin("jit", "pjit")
def _jit(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    jaxpr = params["jaxpr"]
    eager = compat.is_eval_trace(trace.parent_trace)
    # JAX looks for NaN and infinity in the results of a jitted function, not in what it computes on the way.
    checked_as_one = eager and (jax.config.jax_debug_nans or jax.config.jax_debug_infs)
    if compat.is_inlined_jit(params, eager=eager) and not checked_as_one:
        return evaluate(trace, jaxpr, operands, inlined=True)
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, jaxpr, slots, what=f"jit of {params['name']}")
    n = len(flat.consts)
    unspecified = (compat.UNSPECIFIED,) * n
    params = params | {
        "jaxpr": flat.jaxpr,
        "in_shardings": unspecified + leaf_shardings(params["in_shardings"], slots),
        "in_layouts": (None,) * n + leaf_layouts(params["in_layouts"], slots),
        "donated_invars": (False,) * n + spread(params["donated_invars"], slots),
        "out_shardings": leaf_shardings(params["out_shardings"], flat.out),
        "out_layouts": leaf_layouts(params["out_layouts"], flat.out),
    }
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, **params))


def leaf_shardings(shardings: Sequence[Any], slots: Sequence[LeafLayout]) -> tuple[Any, ...]:
    """For each leaf, the sharding that follows from that of the logical array."""
    out: list[Any] = []
    for sharding, slot in zip(shardings, slots, strict=True):
        if isinstance(sharding, jax.NamedSharding) and slot.treedef is not None:
            out += [sharding.update(spec=spec) for spec in leaf_specs(slot, sharding.spec)]
        else:
            out += [sharding] * len(slot)
    return tuple(out)


def leaf_layouts(layouts: Sequence[Any], slots: Sequence[LeafLayout]) -> tuple[Any, ...]:
    """For each leaf, its device-local layout, which orders axes: only leaves of the array's rank have one."""
    rank = lambda aval: len(getattr(aval, "shape", ()))  # a token has none
    return tuple(
        layout if rank(aval) == rank(slot.aval) else None
        for layout, slot in zip(layouts, slots, strict=True)
        for aval in slot.avals
    )


@builtin("remat2", "checkpoint", "remat")
def _checkpoint(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    jaxpr = compat.closed(params["jaxpr"])
    leaves, slots = flatten(operands)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # nothing to recompute later
        return evaluate(trace, jaxpr, operands)
    flat = subjaxpr(trace, jaxpr, slots, what="checkpoint", closed=False)
    params = params | {"jaxpr": compat.open_jaxpr(flat.jaxpr)}
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, **params))


@builtin("sequential_call")
def _sequential_call(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    if compat.is_eval_trace(trace.parent_trace):  # there is no vmap under which to keep it sequential
        return evaluate(trace, params["jaxpr"], operands)
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, params["jaxpr"], slots, what="sequential_vmap_with_vjp")
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, jaxpr=flat.jaxpr))


@builtin("custom_vmap_call")
def _custom_vmap(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
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
            jax.vmap(lambda x, slot=slot: convert_to(x, slot, what))(x) if b else convert_to(x, slot, what)
            for x, b, slot in zip(results, out_flags, flat.out, strict=True)
        ]
        return flatten(outs)[0], list(spread(out_flags, flat.out))

    # Whatever the jaxpr closes over is left to JAX, which does not allow it to be batched.
    of_leaves = custom_vmap(lambda *leaves: jexc.jaxpr_as_fun(flat.jaxpr)(*flat.consts, *leaves))
    of_leaves.def_vmap(rule_on_leaves)
    return unflatten(flat.out, of_leaves(*leaves))


@builtin("custom_dce_call")
def _custom_dce(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    rule, what = params["rule"], f"custom_dce of {params['name']}"
    if compat.is_eval_trace(trace.parent_trace):  # no transform below eliminates dead code
        return evaluate(trace, params["jaxpr"], operands)
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, params["jaxpr"], slots, what=what)
    # The rule runs after the current traces end, so it must not capture them.
    level = QuaxTrace(jax.core.Trace(), trace.tag, trace.resolver)

    @functools.cache
    def narrow(used_leaves: tuple[bool, ...]) -> Any:
        leaf = iter(used_leaves)
        per_slot = [[next(leaf) for _ in slot.avals] for slot in flat.out]
        used = tuple(map(any, per_slot))
        jaxpr, used_ins = (params["jaxpr"], (True,) * len(slots)) if all(used) else rule(used)
        taken = [slot for slot, is_used in zip(slots, used_ins, strict=True) if is_used]
        # The remaining results keep the form that they have in the full computation.
        targets = [slot for slot, is_used in zip(flat.out, used, strict=True) if is_used]
        narrowed = subjaxpr(level, jaxpr, taken, targets=targets, what=what)
        if narrowed.consts:
            return compat.dce(flat.jaxpr, used_leaves)
        wanted = [u for group, is_used in zip(per_slot, used, strict=True) if is_used for u in group]
        left, ins = compat.dce(narrowed.jaxpr, wanted)
        in_leaf = iter(ins)
        mask = [is_used and next(in_leaf) for is_used in spread(used_ins, slots)]
        return left, (*[False] * len(flat.consts), *mask)

    params = params | {"jaxpr": flat.jaxpr, "rule": narrow}
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, **params))
