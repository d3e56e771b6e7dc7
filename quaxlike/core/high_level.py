"""JAX's high-level primitives, of hijax: instances of `HiPrim`, all bound by one primitive."""

from typing import Any

import jax.extend.core as jexc

from . import compat

NAME = "call_hi_primitive"
_REPLACED = {
    "CustomJVPTraced": "custom_jvp_call",
    "CustomVJPTraced": "custom_vjp_call",
    "RematTraced": "remat",
}


def as_call(primitive: jexc.Primitive, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a primitive and its parameters: of a high-level primitive that carries code, those of the
    primitive that it replaces."""
    hi: Any = params.get("_prim")
    name = _REPLACED.get(type(hi).__name__)
    if name is None:
        return primitive.name, params
    if name == "remat":
        return name, {"jaxpr": compat.closed(hi.jaxpr)}
    return name, {"call_jaxpr": compat.closed(hi.traced.jaxpr)}
