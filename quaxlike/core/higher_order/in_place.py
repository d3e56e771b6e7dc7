"""Primitives that are evaluated in place: composites, and JAX's high-level primitives (`lax.custom_root` is
one from 0.12), whose jvp rule is kept."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.tree_util as jtu

from .. import compat
from ..subjaxpr import evaluate
from ..trace import QuaxTrace, builtin


@builtin("composite", "eval_jaxpr")
def _in_place(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    # The name of a composite promises a backend certain operands, which are others here.
    jaxpr = params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
    return evaluate(trace, compat.closed(jaxpr), operands)


@builtin("call_hi_primitive")
def _call_hi_primitive(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    hi = params["_prim"]

    @jax.custom_jvp
    def call(*args: Any) -> Any:
        return hi.expand(*args)

    call.defjvp(hi.jvp)
    with jexc.take_current_trace() as parent:
        inner = QuaxTrace(parent, trace.tag, trace.resolver)
        with jexc.set_current_trace(inner):
            args = jtu.tree_unflatten(hi.in_tree, [inner.box(x) for x in operands])
            out = (hi.expand if compat.is_eval_trace(parent) else call)(*args)
        return [inner.unwrap(x) for x in jtu.tree_leaves(out)]
