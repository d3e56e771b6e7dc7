"""High-level primitives of hijax: instances of `HiPrim`, all of which are bound by the same JAX primitive.

Rules are registered for a *class* of `HiPrim`. Dispatch compares primitives by identity, so we create one
primitive for each class, with the same lifetime as the class.
"""

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
    """Returns the name and parameters of a primitive.

    For a high-level primitive that calls a function (e.g. given as a jaxpr), these are the name and
    parameters of the ordinary primitive that it replaces.
    """
    hi: Any = params.get("_prim")
    name = _REPLACED.get(type(hi).__name__)
    if name is None:
        return primitive.name, params
    if name == "remat":
        return name, {"jaxpr": compat.closed(hi.jaxpr)}
    return name, {"call_jaxpr": compat.closed(hi.traced.jaxpr)}


class HighLevelPrimitive(jexc.Primitive):
    """The primitive for which we register the rules of a class of `HiPrim`."""

    multiple_results = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.def_abstract_eval(lambda *_, prim: prim.out_avals_flat)


primitive_of: Callable[[type], HighLevelPrimitive] = compat.weakly_cached(
    lambda cls: HighLevelPrimitive(cls.__name__)
)


def is_high_level(cls: Any) -> bool:
    """Returns whether `cls` is a class of high-level primitives."""
    return isinstance(cls, type) and HiPrim is not None and issubclass(cls, HiPrim)
