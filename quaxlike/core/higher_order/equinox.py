"""Equinox's own primitives, which have no public names."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc
import jax.tree_util as jtu

from ..jaxprs.slots import flatten
from ..jaxprs.unify import widened, without_placeholder
from ..policy import by_default
from ..trace import QuaxTrace, builtin
from ..values import is_value
from .structural import leafwise, select

builtin("nonbatchable", "nontraceable", "nondifferentiable_backward")(leafwise)
builtin("select_if_vmap")(select)


@builtin("maybe_set")
def _maybe_set(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    """Writes a Value into a buffer of Equinox's loops, which is lifted to its type."""
    which, buffer, x, *index = operands
    if not is_value(x) or any(map(is_value, (which, *index))):
        return by_default(primitive, operands, params)
    buffer = widened(without_placeholder(buffer), x)
    x = widened(x, buffer)
    if jtu.tree_structure(buffer) != jtu.tree_structure(x):
        return by_default(primitive, operands, params)
    into, (slot,) = flatten([buffer])
    pairs = zip(into, flatten([x])[0], strict=True)
    return [slot.unflatten([primitive.bind(which, to, leaf, *index, **params)[0] for to, leaf in pairs])]
