"""Primitives made by `define_primitive` that no rule covers: those that implement them are dispatched."""

from collections.abc import Sequence
from typing import Any

import jax

from ..jaxprs.evaluate import evaluate
from ..trace import QuaxTrace, builtin
from ..values import aval_of, is_value


@builtin("defined")
def _defined(trace: QuaxTrace, primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    avals = [aval_of(x) if is_value(x) else jax.typeof(x) for x in operands]
    out = evaluate(trace, primitive.jaxpr(avals, params), operands)
    return out if primitive.multiple_results else out[0]
