"""Primitives calling a function once, bound again on leaves.

These are `jax.jit`, `jax.checkpoint`, `custom_vmap`, `jax.shard_map` (its specs for logical arrays are
converted to specs for leaves), and our own `sequential_vmap_with_vjp` and `custom_dce`. Eagerly there is
typically no transform they would make a difference for, so the jaxpr is just evaluated.
"""

import functools
from collections.abc import Callable, Sequence
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
from ..jaxprs.linearity import held, map_parts
from ..jaxprs.slots import LeafLayout, flatten, leaf_specs, per_slot, spread, unflatten
from ..jaxprs.unify import convert_to
from ..policy import dense
from ..recording import shown_as
from ..trace import Operands, Params, QuaxTrace, builtin
from ..values import is_value


@builtin("jit", "pjit")
def _jit(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    jaxpr = params["jaxpr"]
    eager = compat.is_eval_trace(trace.parent_trace)
    # JAX checks the results of a jitted function for NaN and infinity, but not its intermediates. If this is
    # enabled, the function must not be inlined.
    checked_as_one = eager and (jax.config.jax_debug_nans or jax.config.jax_debug_infs)
    if compat.is_inlined_jit(params, eager=eager) and not checked_as_one:
        return evaluate(trace, jaxpr, operands, inlined=True)
    leaves, slots = flatten(operands)
    flat = subjaxpr(trace, jaxpr, slots, what=f"jit of {params['name']}")
    n = len(flat.consts)
    # The constants come first. They must never be donated: other calls use them as well.
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
    """Returns each leaf's sharding, given the logical array's."""
    out: list[Any] = []
    for sharding, slot in zip(shardings, slots, strict=True):
        if isinstance(sharding, jax.NamedSharding) and slot.treedef is not None:
            out += [sharding.update(spec=spec) for spec in leaf_specs(slot, sharding.spec)]
        else:
            out += [sharding] * len(slot)
    return tuple(out)


def leaf_layouts(layouts: Sequence[Any], slots: Sequence[LeafLayout]) -> tuple[Any, ...]:
    """Returns each leaf's device-local layout.

    A layout is an ordering of axes, so it only makes sense for a leaf with as many axes as the array. It is
    left unspecified for any other leaf.
    """

    def rank(aval: Any) -> int:
        return len(getattr(aval, "shape", ()))  # a token doesn't have a shape

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


@builtin("RematTraced")
def _remat3(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    """Implements `jax.checkpoint` under the flag `jax_remat3`, which makes it a high-level primitive."""
    hi = params["_prim"]
    leaves, slots = flatten(operands)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return evaluate(trace, hi.jaxpr, operands)
    flat = subjaxpr(trace, hi.jaxpr, slots, what="checkpoint", closed=False)
    cse = hi.prevent_cse
    # With one flag for each operand, the constants put in front also need flags.
    if not isinstance(cse, bool):
        cse = (False,) * len(flat.consts) + tuple(spread(cse, slots))
    return unflatten(flat.out, type(hi)(flat.jaxpr, hi.policy, cse)(*flat.consts, *leaves))


@builtin("sequential_call")
def _sequential_call(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    if compat.is_eval_trace(trace.parent_trace):  # no sequential vmap
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
    # The rule may run after the current traces have ended, so it mustn't capture them.
    level = QuaxTrace(jax.core.Trace(), trace.tag, trace.resolver)

    def rule_on_leaves(axis_size: int, batched: Sequence[bool], *leaves: Any) -> tuple[list[Any], list[bool]]:
        flags = [any(of_slot) for of_slot in per_slot(slots, batched)]
        # Leaves can't be batched independently of each other: if any part of a Value is batched, batch all of
        # it.
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

    # Leave anything the jaxpr closes over to JAX, which raises an error if any of it is batched.
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
    # The rule runs after the current traces have ended, so it mustn't capture them.
    level = QuaxTrace(jax.core.Trace(), trace.tag, trace.resolver)

    @functools.cache
    def narrow(used_leaves: tuple[bool, ...]) -> Any:
        leaf = iter(used_leaves)
        per_slot = [[next(leaf) for _ in slot.avals] for slot in flat.out]
        used = tuple(map(any, per_slot))
        jaxpr, used_ins = (params["jaxpr"], (True,) * len(slots)) if all(used) else rule(used)
        taken = [slot for slot, is_used in zip(slots, used_ins, strict=True) if is_used]
        # The remaining results must have the same types as in the full computation.
        targets = [slot for slot, is_used in zip(flat.out, used, strict=True) if is_used]
        narrowed = subjaxpr(level, jaxpr, taken, targets=targets, what=what)
        # The caller can't pass these constants. If there are any, remove dead code from the full computation
        # instead, which may remove less but is also correct.
        if narrowed.consts:
            return compat.dce(flat.jaxpr, used_leaves)
        wanted = [u for group, is_used in zip(per_slot, used, strict=True) if is_used for u in group]
        left, ins = compat.dce(narrowed.jaxpr, wanted)
        in_leaf = iter(ins)
        mask = [is_used and next(in_leaf) for is_used in spread(used_ins, slots)]
        return left, (*[False] * len(flat.consts), *mask)

    params = params | {"jaxpr": flat.jaxpr, "rule": narrow}
    return unflatten(flat.out, primitive.bind(*flat.consts, *leaves, **params))


@builtin("shard_map")
@shown_as("shard_map")
def _shard_map(
    trace: QuaxTrace,
    primitive: jexc.Primitive,
    fun: Callable[..., Any],
    operands: Sequence[Any],
    **params: Any,
) -> Any:
    leaves, slots = flatten([trace.unwrap(x) for x in operands])
    results: Any = None
    out_slots: tuple[LeafLayout, ...] = ()

    def flat_fun(*shards: Any) -> Any:
        nonlocal results, out_slots
        with jexc.take_current_trace() as parent:
            inner = QuaxTrace(parent, trace.tag, trace.resolver)
            with jexc.set_current_trace(inner):
                results, out_specs = fun(*map(inner.box, unflatten(slots, shards))).unpack_aux()
            with jexc.set_current_trace(parent):
                found = [inner.unwrap(x) for x in results]
                flat, out_slots = flatten(
                    [_dense_unless_joinable(x, spec) for x, spec in zip(found, out_specs, strict=True)]
                )
        return compat.flat_tree(flat).with_aux(_spread_specs(out_slots, out_specs))

    params = params | {
        "subfuns": (flat_fun,),
        "in_specs": _spread_specs(slots, params["in_specs"]),
        "debug_info": params["debug_info"].with_unknown_names(),
    }
    out = compat.bind_with_trace(primitive, trace.parent_trace, tuple(leaves), params)
    return results.update([trace.box(x) for x in unflatten(out_slots, list(out))])


def _dense_unless_joinable(x: Any, spec: Any) -> Any:
    """Materialises a Value, in parts or as a whole, if its leaves can't be joined by `out_specs`.

    This happens if a leaf differs between devices, but `spec` assumes it is replicated. For example, each
    device may have scaled one factor of an adapter by a different amount.
    """
    to_dense = functools.partial(
        dense,
        what="shard_map (out_specs)",
        hint=f"Its leaves differ between devices, so that {spec} cannot join them.",
    )
    if not _is_joinable(x, spec) and x.linear and held(x):
        x = map_parts(to_dense, x)
    return x if _is_joinable(x, spec) else to_dense(x)


def _is_joinable(x: Any, spec: Any) -> bool:
    leaves, slots = flatten([x])
    if slots[0].treedef is None:
        return True
    for leaf, own in zip(leaves, _spread_specs(slots, [spec]), strict=True):
        named = {axis for entry in own for axis in (entry if isinstance(entry, tuple) else (entry,))}
        # This leaf varies along an axis missing from the spec: joining it would only keep a single device's
        # part.
        if compat.varying_axes(leaf) - named:
            return False
    return True


def _spread_specs(slots: Sequence[LeafLayout], specs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(s for slot, spec in zip(slots, specs, strict=True) for s in leaf_specs(slot, spec))
