"""JAX's high-level primitives, of hijax: instances of `HiPrim`, all bound by one primitive."""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jexc

from . import compat

try:
    from jax.experimental.hijax import HiPrim
except ImportError:  # before JAX 0.11
    HiPrim = None

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


class HighLevelPrimitive(jexc.Primitive):
    """The instances of a class of `HiPrim`, as the primitive that their rules are registered for."""

    multiple_results = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.def_abstract_eval(lambda *_, prim: prim.out_avals_flat)


primitive_of: Callable[[type], HighLevelPrimitive] = compat.weakly_cached(
    lambda cls: HighLevelPrimitive(cls.__name__)
)


def is_high_level(cls: Any) -> bool:
    """Whether `cls` is a class of high-level primitives."""
    return isinstance(cls, type) and HiPrim is not None and issubclass(cls, HiPrim)
