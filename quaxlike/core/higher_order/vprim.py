"""Primitives made by Equinox's `create_vprim`: their implementation, with their own derivative and transpose.

These are lineax's `linear_solve`, and, by the name "vprim", what any of them becomes under `vmap`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jexc

from .. import compat
from ..policy import dense
from ..quaxify import value_of
from ..trace import QuaxTrace, builtin
from .inline import call_inline


@builtin("linear_solve", "vprim")
def _vprim(
    trace: QuaxTrace, primitive: jexc.Primitive, operands: Sequence[Any], params: dict[str, Any]
) -> list[Any]:
    def implementation(*flat: Any) -> list[Any]:
        return list(_implementation(primitive)(*flat, **params))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        if _unbatched(primitive, params).name == "linear_solve":
            # The right-hand side of the tangent solve is made of them.
            tangents = [dense(value_of(t), "linear_solve") for t in tangents]
        return compat.jvp_rule(primitive)(primals, tangents, **params)

    def transpose(cts: Sequence[Any], operands: Sequence[Any]) -> Any:
        return compat.transpose_rule(primitive)(list(cts), *operands, **params)

    return call_inline(trace, primitive.name, implementation, jvp, transpose, operands)


def _unbatched(primitive: jexc.Primitive, params: dict[str, Any]) -> jexc.Primitive:
    """The primitive that `vmap`, perhaps several times, made a "vprim"."""
    return _unbatched(params["prim"], dict(params["params"])) if primitive.name == "vprim" else primitive


def _implementation(primitive: jexc.Primitive) -> Callable[..., Any]:
    """The implementation that Equinox maps to batch a primitive of its own. (`primitive.impl` may refuse to
    be mapped, to catch tracers that were closed over.)"""
    from equinox.internal import _primitive  # pyright: ignore[reportPrivateUsage]

    return _primitive._vprim_impl_registry[primitive]  # pyright: ignore[reportPrivateUsage]
