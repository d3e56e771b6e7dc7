"""Primitives that move data without looking at it act on each leaf of a Value."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc
import jax.tree_util as jtu

from ..policy import dense
from ..slots import flatten, unflatten, unify
from ..trace import QuaxTrace, builtin, by_default
from ..values import is_value


@builtin("copy", "copy_p", "stop_gradient", "name", "optimization_barrier", "pvary", "reduce_precision_p")
def _leafwise(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    leaves, slots = flatten(operands)
    if primitive.multiple_results:
        return unflatten(slots, primitive.bind(*leaves, **params))
    return unflatten(slots, [primitive.bind(leaf, **params) for leaf in leaves])[0]


@builtin("select_n")
def _select_n(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    """With a scalar predicate a choice between whole Values; else it looks at elements."""
    which, *cases = operands
    _, slots = flatten(cases)
    if is_value(which) or which.shape != () or len(set(slots)) > 1 or not is_value(cases[0]):
        return by_default(primitive, operands, params)
    return jtu.tree_map(lambda *leaves: primitive.bind(which, *leaves, **params), *cases)


@builtin("add_any", "add_jaxvals")
def _add_jaxvals(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Any:
    """The sum of two cotangents: leaf by leaf for Values that are linear in their leaves."""
    x, y = operands
    _, (a, b) = flatten(operands)
    if is_value(x) and is_value(y) and type(x).linear and a.strong() == b.strong():
        return jtu.tree_map(lambda p, q: primitive.bind(p, q, **params), x, y)
    return by_default(primitive, operands, params)


__all__ = ["dense", "unify"]
