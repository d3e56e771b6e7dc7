"""Hijax's high-level primitives: instances of `HiPrim`, all bound by the same JAX primitive.

Users register rules for a *class* of `HiPrim`, but dispatch compares primitives by identity. So each class
gets its own primitive, for the class's lifetime.

Also knows which of JAX's primitives are never bound, so rules for them are never called.
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
    """Returns a primitive's name and parameters.

    For a high-level primitive that just calls a function, returns those of the ordinary primitive it
    replaces.
    """
    hi: Any = params.get("_prim")
    name = _REPLACED.get(type(hi).__name__)
    if name is None:
        return primitive.name, params
    if name == "remat":
        return name, {"jaxpr": compat.closed(hi.jaxpr)}
    return name, {"call_jaxpr": compat.closed(hi.traced.jaxpr)}


class HighLevelPrimitive(jexc.Primitive):
    """A stand-in for a class of `HiPrim`: the class's rules are registered for it."""

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


def why_never_bound(primitive: jexc.Primitive) -> str | None:
    """Returns why rules for a primitive are never called, or None if they are.

    JAX doesn't bind these like other primitives: see `QuaxTrace.process_custom_jvp_call`.
    """
    if primitive.name not in ("custom_jvp_call", "custom_vjp_call", "shard_map"):
        return None
    return (
        f"A rule for `{primitive}` is never called: functions with custom derivatives and `shard_map` run on "
        "Values by themselves. Register rules for the operations inside, or make the function a primitive "
        "with `quaxlike.primitives.define_primitive`."
    )
