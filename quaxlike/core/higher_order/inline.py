"""Primitives that are evaluated inline: composites, and JAX's high-level primitives with their jvp rules
(`lax.custom_root` is one from 0.12)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .. import compat
from ..jaxprs.evaluate import evaluate
from ..trace import QuaxTrace, builtin


@builtin("composite", "eval_jaxpr")
def _inline(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    # The composite itself is dropped: its name promises a backend certain operands, and these are others.
    jaxpr = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
    return evaluate(trace, compat.closed(jaxpr), operands)


@builtin("call_hi_primitive")
def _call_hi_primitive(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    hi = params["_prim"]

    def implementation(*flat: Any) -> list[Any]:
        return jtu.tree_leaves(hi.expand(*jtu.tree_unflatten(hi.in_tree, flat)))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        out, out_dot = hi.jvp(*(tuple(jtu.tree_unflatten(hi.in_tree, xs)) for xs in (primals, tangents)))
        return jtu.tree_leaves(out), jtu.tree_leaves(out_dot)

    return call_inline(trace, implementation, jvp, operands, symbolic_zeros=False)


def call_inline(
    trace: QuaxTrace,
    implementation: Callable[..., list[Any]],
    jvp: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, Any]],
    operands: Sequence[Any],
    *,
    symbolic_zeros: bool,
) -> list[Any]:
    """Runs the implementation of a primitive, with the primitive's own derivative."""
    call = jax.custom_jvp(implementation)

    @functools.partial(call.defjvp, symbolic_zeros=symbolic_zeros)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        out, out_dot = jvp(primals, tangents)
        dots = zip(out, out_dot, strict=True)
        return out, [SymbolicZero(jax.typeof(x).to_tangent_aval()) if _is_zero(t) else t for x, t in dots]

    with jexc.take_current_trace() as parent:
        inner = QuaxTrace(parent, trace.tag, trace.resolver)
        with jexc.set_current_trace(inner):
            out = (implementation if compat.is_eval_trace(parent) else call)(*map(inner.box, operands))
        return [inner.unwrap(x) for x in out]


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero | SymbolicZero)
