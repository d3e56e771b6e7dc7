"""Primitives that are evaluated inline.

These are composites, primitives created by `define_primitive` or by Equinox's `create_vprim`, and JAX's
high-level primitives with a jvp rule. (As of JAX 0.12, `lax.custom_root` is an example.)

Inlining a primitive must not replace its derivative by its implementation's, so `_call_inline` keeps its jvp
and transpose rules.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad

from .. import compat, high_level
from ..jaxprs.evaluate import call_on_values, evaluate
from ..jaxprs.linearity import has_tangent
from ..jaxprs.slots import LeafLayout, flatten, is_a_space, per_slot, split, spread, unflatten
from ..trace import BUILTIN, Operands, Params, QuaxTrace, builtin, value_types
from ..values import aval_of, is_value
from .custom_derivatives import CUSTOM, custom_derivative
from .linear import linear_call
from .tangents import cotangents_in, cotangents_out


@builtin("composite", "eval_jaxpr")
def _inline(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    # Drop the composite itself: backends associate its name with particular operands, not with ours.
    jaxpr = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
    return evaluate(trace, compat.closed(jaxpr), operands)


@builtin(high_level.NAME)
def _call_hi_primitive(
    trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params
) -> list[Any]:
    hi = params["_prim"]
    if any(map(is_value, operands)):
        # A rule written by the user comes first, even before custom derivatives.
        key = high_level.primitive_of(type(hi)), *value_types(operands)
        out = trace.dispatch_key(key, list(operands), {"prim": hi}, only_rules=True)
        if out is not NotImplemented:
            return out
    if (name := high_level.as_call(primitive, params)[0]) in CUSTOM:
        return custom_derivative(trace, primitive, name, hi, operands)
    if (rule := BUILTIN.get(type(hi).__name__)) is not None:
        return rule(trace, primitive, operands, params)

    def implementation(*flat: Any) -> list[Any]:
        return jtu.tree_leaves(hi.expand(*jtu.tree_unflatten(hi.in_tree, flat)))

    (*_, base, _) = type(hi).__mro__
    # JAX's default transpose just raises an error. Don't use it: JAX may well be able to transpose the
    # implementation.
    has_transpose = type(hi).transpose is not base.transpose
    name = type(hi).__name__
    return _call_inline(trace, name, primitive, params, implementation, operands, has_transpose=has_transpose)


def _call_inline(
    trace: QuaxTrace,
    name: str,
    primitive: Primitive,
    params: Params,
    implementation: Callable[..., list[Any]],
    operands: Sequence[Any],
    *,
    has_transpose: bool = True,
) -> list[Any]:
    """Runs the implementation of a primitive, with the primitive's own derivative and transpose.

    Without its own transpose, the implementation is transposed.
    """
    call = jax.custom_jvp(implementation)

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        tangents = [_zero(t, t) for t in tangents]
        out, out_dot = compat.jvp_rule(primitive)(primals, tangents, **params)
        dots = zip(out, out_dot, strict=True)
        return out, [SymbolicZero(jax.typeof(x).to_tangent_aval()) if _is_zero(t) else t for x, t in dots]

    def run(operands: Sequence[Any]) -> list[Any]:
        with jexc.take_current_trace() as parent:
            # Use the running level's tag, to dispatch on its Values rather than treat them as leaked.
            inner = QuaxTrace(parent, trace.tag, trace.resolver)
            with jexc.set_current_trace(inner):
                out = (implementation if compat.is_eval_trace(parent) else call)(*map(inner.box, operands))
            return [inner.unwrap(x) for x in out]

    # With no transform below us, nothing will be transposed: skip all of this.
    if not has_transpose or compat.is_eval_trace(trace.parent_trace):
        return run(operands)

    def transpose(cts: Sequence[Any], operands: Sequence[Any]) -> Any:
        return compat.transpose_rule(primitive)(list(cts), *operands, **params)

    return _with_transpose(trace, name, run, transpose, operands)


def _with_transpose(
    trace: QuaxTrace,
    name: str,
    run: Callable[[Sequence[Any]], list[Any]],
    rule: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    operands: Sequence[Any],
) -> list[Any]:
    leaves, slots = flatten(operands)
    out: tuple[LeafLayout, ...] = ()
    can_transpose = True

    def on_leaves(*leaves: Any) -> list[Any]:
        nonlocal out, can_transpose
        results = run(unflatten(slots, leaves))
        moving = [x for x in results if is_value(x) and has_tangent(aval_of(x))]
        # The primitive's rule expects a cotangent for each Value, but only the leaves' cotangents will be
        # given. Converting them back is only possible if this holds.
        can_transpose = all(map(is_a_space, moving))
        flat, out = flatten(results)
        return flat

    debug_info = jexc.DebugInfo(name, f"the {name} primitive", None, None)
    jaxpr, consts = compat.trace_to_jaxpr(on_leaves, [a for slot in slots for a in slot.avals], debug_info)
    if not can_transpose:  # JAX may still be able to transpose the implementation
        return unflatten(out, evaluate(None, compat.with_consts(jaxpr, consts), leaves, inlined=True))

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
            _zero(cotangents_in([slot], group, (), True, types)[0] if has_tangent(slot.aval) else None, slot)
            for slot, group in zip(out, per_slot(out, cts), strict=True)
        ]
        found = call_on_values(trace, lambda *flat: rule(*split(flat, len(out))), [*cts, *operands])
        found = [_zero(ct if own else None, slot) for ct, own, slot in zip(found, linear, slots, strict=True)]
        # Pulling back a cotangent needs the primals' leaves. An undefined primal is linear, so any values
        # will do.
        defined = [jnp.zeros_like(x.aval) if ad.is_undefined_primal(x) else x for x in leaves]
        is_value_leaf = spread([slot.treedef is not None for slot in slots], slots)
        return [*constants, *cotangents_out(slots, itertools.compress(defined, is_value_leaf), found)]

    flat = linear_call(compat.with_consts(jaxpr, ()), transpose, [*consts, *leaves])
    return unflatten(out, flat)


def _zero(x: Any, like: Any) -> Any:
    """Converts any kind of zero to the one expected by the rules of primitives."""
    return ad.Zero(like.aval.to_tangent_aval()) if x is None or _is_zero(x) else x


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero | SymbolicZero)


@builtin("linear_solve", "vprim")
def _vprim(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    def implementation(*flat: Any) -> list[Any]:
        return list(_implementation(primitive)(*flat, **params))

    return _call_inline(trace, primitive.name, primitive, params, implementation, operands)


def _implementation(primitive: Primitive) -> Callable[..., Any]:
    """Returns the implementation to map when Equinox batches its own primitives.

    Mapping `primitive.impl` won't do: Equinox may have set it to a function checking for closed-over tracers.
    (As of Equinox 0.13 there is no public API for this.)
    """
    from equinox.internal import _primitive  # pyright: ignore[reportPrivateUsage]

    return _primitive._vprim_impl_registry[primitive]  # pyright: ignore[reportPrivateUsage]


@builtin("defined")
def _defined(trace: QuaxTrace, primitive: Any, operands: Operands, params: Params) -> Any:
    avals = [aval_of(x) if is_value(x) else jax.typeof(x) for x in operands]
    out = evaluate(trace, primitive.jaxpr(avals, params), operands)
    return out if primitive.multiple_results else out[0]
