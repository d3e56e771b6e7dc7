"""FLOPs and bytes of a defined primitive, for `jax.experimental.roofline`.

FLOPs are those of the function that it was defined from, with every iteration of a `scan` counted, or the
result of its slot `flops`. Bytes are those of its operands and results, as for a kernel that keeps
intermediate results on the chip.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import JaxprEqn

if TYPE_CHECKING:
    from .define import DefinedPrimitive

try:
    from jax.experimental import roofline
except ImportError:  # it is experimental: a later release may lack it
    roofline = None


def register(p: "DefinedPrimitive") -> None:
    """Registers the costs of a primitive with `jax.experimental.roofline`."""
    if roofline is not None:
        roofline.register_roofline(p)(functools.partial(_cost, p))


def _cost(p: "DefinedPrimitive", ctx: Any, *_: Any, **params: Any) -> Any:
    assert roofline is not None
    operands = ctx.avals_in
    by_hand = p.slot("flops")
    flops = by_hand(*operands, **params) if by_hand.registered else _flops_of(p.jaxpr(operands, params))
    size = roofline.RooflineShape.total_bytes
    moved = 0 if ctx.pin_lhs_in_vmem else size(operands[:1]) + size(ctx.avals_out)
    moved += 0 if ctx.pin_rhs_in_vmem else size(operands[1:])
    return roofline.RooflineResult(flops=flops, unfused_flops=flops, hbm_bytes=moved, unfused_hbm_bytes=moved)


def _flops_of(jaxpr: Any) -> int:
    return sum(map(_flops, getattr(jaxpr, "jaxpr", jaxpr).eqns))


def _flops(eqn: JaxprEqn) -> int:
    """The FLOPs that JAX counts for this equation."""
    assert roofline is not None
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is not None:
        return eqn.params.get("length", 1) * _flops_of(inner)
    call = lambda *operands: eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]  # pyright: ignore
    return roofline.roofline(call)(*shapes)[1].flops
