"""Debug callbacks, which receive the Value itself. (`pure_callback` and `io_callback` take arrays: for them a
Value is materialised, under the policy, as for any primitive without a rule.)"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jexc
import jax.tree_util as jtu

from ..jaxprs.slots import flatten, unflatten
from ..trace import QuaxTrace, builtin


@builtin("debug_callback")
def _debug_callback(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    callback = params["callback"]
    leaves, slots = flatten(operands)

    def on_leaves(*leaves: Any) -> Any:
        return callback(*unflatten(slots, leaves))

    return primitive.bind(*leaves, **params | {"callback": on_leaves})


@builtin("debug_print")
def _debug_print(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    leaves, slots = flatten(operands)
    inputs = unflatten(slots, range(len(leaves)))
    in_tree = jtu.tree_structure(jtu.tree_unflatten(params["in_tree"], inputs))
    return primitive.bind(*leaves, **params | {"in_tree": in_tree})
