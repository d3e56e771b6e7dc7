"""Linear functions of Values: `lax.custom_linear_solve`, and functions with a custom transpose.

Mathematically, a linear solve maps a space to itself, so the solution must have the same leaves as the
right-hand side. Moreover, both must be linear in all their leaves: the derivative of a solve is another
solve, with their tangents in their place. Anything else is materialised.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import compat
from ..jaxprs.evaluate import Flat, subjaxpr
from ..jaxprs.linearity import held, map_parts
from ..jaxprs.slots import LeafLayout, flatten, is_a_space, split, unflatten
from ..jaxprs.unify import with_dense_parts
from ..policy import dense
from ..trace import Operands, Params, QuaxTrace, builtin
from ..values import is_value

# Called with the operands (an `UndefinedPrimal` for each linear one) and the cotangents of the results.
# Returns one cotangent per operand; only those for the linear operands are used.
Transpose = Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]]

_linear_call_p = Primitive("linear_call_on_leaves")
_linear_call_p.multiple_results = True


def linear_call(fun: compat.ClosedJaxpr, transpose: Transpose, operands: Sequence[Any]) -> list[Any]:
    """Calls the jaxpr `fun`, with a custom transpose.

    Like `jax.custom_derivatives.linear_call`, but can also be batched, and differentiated with respect to any
    operand. Which operands are linear isn't known until it is transposed.
    """
    return _linear_call_p.bind(*operands, fun=fun, transpose=transpose)


def _evaluate(*operands: Any, fun: compat.ClosedJaxpr, **_: Any) -> Sequence[Any]:
    return jexc.jaxpr_as_fun(fun)(*operands)


def _abstract(*_: Any, fun: compat.ClosedJaxpr, **__: Any) -> Sequence[Any]:
    return fun.out_avals


def jvp_along(fun: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """Like `jax.jvp`, but also supports symbolic zeros as tangents."""
    # `jax.jvp` doesn't accept symbolic zeros, and instantiating them would propagate zeros through an entire
    # solve.
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def of_moving(*xs: Any) -> Any:
        operands = list(primals)
        for i, x in zip(moving, xs, strict=True):
            operands[i] = x
        return fun(*operands)

    return jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    return jvp_along(functools.partial(_evaluate, **params), primals, tangents)


def _transpose(
    cts: Sequence[Any], *operands: Any, fun: compat.ClosedJaxpr, transpose: Transpose
) -> list[Any]:
    found = transpose(operands, cts)
    return [ct if ad.is_undefined_primal(x) else None for x, ct in zip(operands, found, strict=True)]


def _batch(
    operands: Sequence[Any], dims: Sequence[Any], *, fun: compat.ClosedJaxpr, transpose: Transpose
) -> tuple[Sequence[Any], Sequence[int]]:
    (size,) = {x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None}
    of_example = jax.vmap(jexc.jaxpr_as_fun(fun), dims, axis_size=size)
    mapped = jax.make_jaxpr(of_example)(*operands)

    def mapped_transpose(operands: Sequence[Any], cts: Sequence[Any]) -> Sequence[Any]:
        # `vmap` supports neither undefined primals nor symbolic zeros. So remove them here, and insert them
        # again inside the mapped function.
        known = [i for i, x in enumerate(operands) if not ad.is_undefined_primal(x)]
        moving = [i for i, ct in enumerate(cts) if not isinstance(ct, ad.Zero)]

        def one(known_: Sequence[Any], *moving_: Any) -> Sequence[Any]:
            each: list[Any] = list(map(ad.UndefinedPrimal, fun.in_avals))
            for i, x in zip(known, known_, strict=True):
                each[i] = x
            full: list[Any] = [ad.Zero(aval.to_ct_aval()) for aval in fun.out_avals]
            for i, x in zip(moving, moving_, strict=True):
                full[i] = x
            found = transpose(each, full)
            return [ad.instantiate_zeros(ct) if i not in known else None for i, ct in enumerate(found)]

        axes = [dims[i] for i in known]
        found = jax.vmap(one, (axes, *[0] * len(moving)), axis_size=size)(
            [operands[i] for i in known], *(cts[i] for i in moving)
        )
        return [
            # Every batch element contributes to an unbatched operand's cotangent, so sum over the batch.
            ct if ct is None else jnp.sum(ct, 0) if d is None else jnp.moveaxis(ct, 0, d)
            for ct, d in zip(found, dims, strict=True)
        ]

    return linear_call(mapped, mapped_transpose, operands), [0] * len(fun.out_avals)


_linear_call_p.def_impl(_evaluate)
_linear_call_p.def_abstract_eval(_abstract)
_linear_call_p.to_lojax = _evaluate  # for hijax: how to lower this if `fun` contains high-level primitives
ad.primitive_jvps[_linear_call_p] = _jvp
ad.primitive_transposes[_linear_call_p] = _transpose
batching.primitive_batchers[_linear_call_p] = _batch
mlir.register_lowering(_linear_call_p, mlir.lower_fun(_evaluate, multiple_results=True))


_WHAT = "custom_linear_solve"
_HINT = "It is not linear in all of its leaves, as the solution of a linear system has to be."


@builtin("custom_linear_solve")
def _linear_solve(trace: QuaxTrace, primitive: Primitive, operands: Operands, params: Params) -> list[Any]:
    lengths, jaxprs = params["const_lengths"], params["jaxprs"]
    *groups, b = split(operands, *lengths)
    consts = [flatten(group) for group in groups]

    def solve_for(b_slots: Sequence[LeafLayout], targets: Sequence[LeafLayout] | None = None) -> Flat:
        slots = (*consts[2][1], *b_slots)
        return subjaxpr(trace, jaxprs.solve, slots, targets=targets, what=_WHAT)

    # The primitive must be linear in the leaves of `b`. Materialise any Value for which it isn't.
    b = [_as_a_space(x, operands) for x in b]
    b_leaves, b_slots = flatten(b)
    solve = solve_for(b_slots)
    # The primitive maps a space to itself, so the solution must have the same leaves as `b`.
    hint = "The solution has other leaves."
    # First try to materialise just the parts: a right-hand side with a unit then keeps its unit.
    if not _leaves_agree(solve.out, b_slots) and any(is_value(x) and held(x) for x in b):
        b = [map_parts(lambda part: dense(part, _WHAT, hint=hint), x) if is_value(x) else x for x in b]
        b_leaves, b_slots = flatten(b)
        solve = solve_for(b_slots)
    if not _leaves_agree(solve.out, b_slots):
        b = [dense(x, _WHAT, operands, hint=hint) for x in b]
        b_leaves, b_slots = flatten(b)
        solve = solve_for(b_slots, [slot.dense() for slot in solve_for(b_slots).out])
    x_slots = solve.out

    def other(
        i: int, jaxpr: Any, from_slots: Sequence[LeafLayout], to_slots: Sequence[LeafLayout]
    ) -> Flat | None:
        if jaxpr is None:
            return None
        slots = (*consts[i][1], *from_slots)
        flat = subjaxpr(trace, jaxpr, slots, what=_WHAT)
        if not _leaves_agree(flat.out, to_slots):
            # Although this is dense, it still has e.g. its unit.
            own = [with_dense_parts(slot) if held(slot.like) else slot.dense() for slot in flat.out]
            targets = own if _leaves_agree(own, to_slots) else to_slots
            flat = subjaxpr(trace, jaxpr, slots, targets=targets, what=_WHAT)
        return flat

    flats = [
        other(0, jaxprs.matvec, x_slots, b_slots),
        other(1, jaxprs.vecmat, b_slots, x_slots),
        solve,
        other(3, jaxprs.transpose_solve, x_slots, b_slots),
    ]
    leaves = [[*(flat.consts if flat else ()), *cs[0]] for flat, cs in zip(flats, consts, strict=True)]
    params = params | {
        "const_lengths": type(lengths)(*map(len, leaves)),
        "jaxprs": type(jaxprs)(*(flat and flat.jaxpr for flat in flats)),
    }
    out = primitive.bind(*[leaf for group in leaves for leaf in group], *b_leaves, **params)
    return unflatten(x_slots, out)


def _as_a_space(x: Any, operands: Sequence[Any]) -> Any:
    """Materialises `x`, in parts or as a whole, if it isn't linear in all its leaves."""
    if is_value(x) and x.linear and not is_a_space(x):
        x = map_parts(lambda part: _as_a_space(part, [part]), x)
    return dense(x, _WHAT, operands, hint=_HINT) if is_value(x) and not is_a_space(x) else x


def _leaves_agree(a: Sequence[LeafLayout], b: Sequence[LeafLayout]) -> bool:
    return [x for slot in a for x in slot.strong().avals] == [x for slot in b for x in slot.strong().avals]
