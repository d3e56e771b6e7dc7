"""`jax.custom_jvp` and `jax.custom_vjp`: the user's functions run with Values in place.

The primitive is bound again on the leaves. A tangent (or cotangent) of a Value is a Value of the same
class if the class is `linear`; else it is dense: tangents come through the jvp of `materialise`, and
cotangents are pulled back through its vjp.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.extend.linear_util as lu
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .. import compat
from ..evaluate import call_on_values
from ..policy import dense
from ..recording import shown_as
from ..slots import Slot, StructureError, conform, flatten, per_slot, split, spread, unflatten
from ..trace import QuaxTrace, builtin
from ..values import Value, is_value, materialise


@builtin("custom_jvp_call")
@shown_as("custom_jvp")
def _custom_jvp(
    trace: QuaxTrace,
    primitive: jexc.Primitive,
    fun: lu.WrappedFun,
    jvp: lu.WrappedFun,
    operands: Sequence[Any],
    *,
    symbolic_zeros: bool,
) -> list[Any]:
    if compat.is_eval_trace(trace.parent_trace):  # nothing below differentiates
        with jexc.set_current_trace(trace):
            return list(fun.call_wrapped(*operands))
    leaves, slots = flatten([trace.unwrap(x) for x in operands])
    results = _Results()

    def flat_fun(*leaves: Any) -> list[Any]:
        return results.flatten(_call(trace, fun, unflatten(slots, leaves)))

    def flat_jvp(*primals_and_tangents: Any) -> list[Any]:
        primals, tangents = split(primals_and_tangents, len(primals_and_tangents) // 2)
        tangents_in = _tangents_in(slots, primals, tangents)
        outs = _call(trace, jvp, [*unflatten(slots, primals), *tangents_in])
        primals_out, tangents_out = split(outs, len(outs) // 2)
        forwarded = {
            id(t): (slot, leaves)
            for slot, t, leaves in zip(slots, tangents_in, per_slot(slots, tangents), strict=True)
        }
        flat = results.flatten_differentiated(
            primals_out, [forwarded.get(id(t), (None,))[0] for t in tangents_out]
        )
        out = [
            forwarded[id(t)][1] if _is_forwarded(slot, t, forwarded) else _tangent_out(slot, t)
            for slot, t in zip(results.slots, tangents_out, strict=True)
        ]
        return [*flat, *(leaf for leaves in out for leaf in leaves)]

    params = {
        "subfuns": (_wrap(flat_fun, fun), _wrap(flat_jvp, jvp)),
        "symbolic_zeros": symbolic_zeros,
    }
    out = compat.bind_with_trace(primitive, trace.parent_trace, leaves, params)
    return [trace.box(x) for x in unflatten(results.slots, out)]


@builtin("custom_vjp_call")
@shown_as("custom_vjp")
def _custom_vjp(
    trace: QuaxTrace,
    primitive: jexc.Primitive,
    fun: lu.WrappedFun,
    fwd: lu.WrappedFun,
    bwd: lu.WrappedFun,
    operands: Sequence[Any],
    *,
    out_trees: Callable[[], tuple[Any, Any, list[int | None]]],
    symbolic_zeros: bool,
) -> list[Any]:
    if compat.is_eval_trace(trace.parent_trace):
        with jexc.set_current_trace(trace):
            return list(fun.call_wrapped(*operands))
    leaves, slots = flatten([trace.unwrap(x) for x in operands])
    # The leaves of Values among the operands are residuals too: pulling back a dense cotangent needs
    # them. They are forwarded, not stored again.
    is_value_leaf = spread([slot.treedef is not None for slot in slots], slots)
    forwarded = [i for i, kept in enumerate(is_value_leaf) if kept]
    results, residuals = _Results(), _Residuals()

    def flat_fun(*leaves: Any) -> list[Any]:
        return results.flatten(_call(trace, fun, unflatten(slots, leaves)))

    def flat_fwd(*pairs: Any) -> list[Any]:
        primals = unflatten(slots, pairs[::2])
        perturbed = [any(nz) for nz in per_slot(slots, pairs[1::2])]
        outs = _call(trace, fwd, [x for pair in zip(primals, perturbed, strict=True) for x in pair])
        _, res_tree, forwards = out_trees()
        n_stored = res_tree.num_leaves - sum(f is not None for f in forwards)
        stored, primals_out = split(outs, n_stored)
        stored = iter(stored)
        res = [next(stored) if f is None else primals[f] for f in forwards]
        flat = results.flatten_differentiated(primals_out, [None] * len(primals_out))
        constant = [x for x, tangent in zip(flat, _is_inexact(flat), strict=True) if not tangent]
        return [*residuals.flatten(res, constant), *flat]

    def flat_bwd(*args: Any) -> Any:
        n_out = sum(map(len, results.slots))
        stored, kept, cts = split(args, residuals.size, len(forwarded))
        assert len(cts) == n_out
        res, constant = residuals.unflatten(stored)
        types = {slot.cls for slot in (*slots, *results.slots)} - {None}
        cotangents = _cotangents_in(results.slots, cts, constant, symbolic_zeros, types)
        outs = _call(trace, bwd, [*res, *cotangents])
        cts_in, *logs = (outs[0], outs[1:]) if compat.BWD_RETURNS_LOGS else (outs,)
        flat = _cotangents_out(slots, iter(kept), cts_in)
        return (flat, logs[0][0]) if logs else flat

    def flat_out_trees() -> tuple[Any, Any, list[int | None]]:
        n_out = sum(map(len, results.slots))
        n_res = residuals.size + len(forwarded)
        trees = [jtu.tree_structure([0] * n) for n in (n_out, n_res)]
        return trees[0], trees[1], [*[None] * residuals.size, *forwarded]

    params = {
        "subfuns": (_wrap(flat_fun, fun), _wrap(flat_fwd, fwd), _wrap(flat_bwd, bwd)),
        "out_trees": flat_out_trees,
        "symbolic_zeros": symbolic_zeros,
    }
    out = compat.bind_with_trace(primitive, trace.parent_trace, leaves, params)
    return [trace.box(x) for x in unflatten(results.slots, out)]


_WHAT = "a custom derivative"
_PLAIN = "It is the derivative of a plain array."
_HINT = "Its class is not `linear`, so that it has no tangents of its own."


class _Results:
    """The slots of the results: decided by whichever of the user's functions runs first."""

    slots: tuple[Slot, ...] = ()
    decided = False

    def flatten(self, outs: Sequence[Any]) -> list[Any]:
        if self.decided:
            outs = [conform(x, s, _WHAT) for x, s in zip(outs, self.slots, strict=True)]
        leaves, self.slots = flatten(outs)
        self.decided = True
        return leaves

    def flatten_differentiated(self, outs: Sequence[Any], forwarded: Sequence[Slot | None]) -> list[Any]:
        """The same for a function that computes derivatives: a result has tangents of its class, or has
        the tangent of an operand (whose slot is then given), or is dense."""
        if not self.decided:
            outs = [
                dense(x, _WHAT, hint=_HINT)
                if is_value(x) and not (type(x).linear or flatten([x])[1] == (slot,))
                else x
                for x, slot in zip(outs, forwarded, strict=True)
            ]
        for slot, other in zip(self.slots, forwarded, strict=True) if self.decided else ():
            if slot.cls is not None and not (slot.cls.linear or slot == other):
                raise StructureError(
                    f"A custom_jvp or custom_vjp function returned a {slot.cls.__name__} when it was "
                    "staged, and is differentiated now. Its class is not `linear`, so it has no "
                    "tangents of its own: apply `quaxlike.materialise` to the result of the function."
                )
        return self.flatten(outs)


class _Residuals:
    """How the residuals, and the leaves of the results that have no tangents, are laid out."""

    slots: tuple[Slot, ...] = ()
    n_constant = 0

    @property
    def size(self) -> int:
        return sum(map(len, self.slots)) + self.n_constant

    def flatten(self, res: Sequence[Any], constant: Sequence[Any]) -> list[Any]:
        leaves, self.slots = flatten(res)
        self.n_constant = len(constant)
        return [*leaves, *constant]

    def unflatten(self, leaves: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        res, constant = split(leaves, sum(map(len, self.slots)))
        return unflatten(self.slots, res), constant


def _call(trace: QuaxTrace, fun: lu.WrappedFun, operands: Sequence[Any]) -> Any:
    for store in fun.stores:
        if store:
            store.reset()
    return call_on_values(trace, fun.call_wrapped, operands)


def _wrap(flat: Callable[..., Any], original: lu.WrappedFun) -> lu.WrappedFun:
    return lu.wrap_init(flat, debug_info=original.debug_info.with_unknown_names())


def _is_inexact(leaves: Sequence[Any]) -> list[bool]:
    return [_has_tangent(jax.typeof(x)) for x in leaves]


def _has_tangent(aval: Any) -> bool:
    return getattr(aval.to_tangent_aval(), "dtype", None) != jax.dtypes.float0


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero | ad.Zero) or getattr(tangent, "dtype", None) == jax.dtypes.float0


def _instantiate(tangent: Any, aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if _is_zero(tangent) else tangent


# Tangents


def _tangents_in(slots: Sequence[Slot], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    pairs = zip(per_slot(slots, primals), per_slot(slots, tangents), strict=True)
    return [_tangent_in(slot, p, t) for slot, (p, t) in zip(slots, pairs, strict=True)]


def _tangent_in(slot: Slot, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    if slot.treedef is None:
        return tangents[0]
    if all(map(_is_zero, tangents)):
        tangent = slot.aval.to_tangent_aval()
        if any(isinstance(t, SymbolicZero) for t in tangents):
            return SymbolicZero(tangent)
        return _zeros(tangent)
    if slot.cls.linear:
        triples = zip(primals, tangents, slot.avals, strict=True)
        return slot.unflatten([_instantiate(t, a) if _has_tangent(a) else p for p, t, a in triples])
    inexact = [_has_tangent(a) for a in slot.avals]
    nonzero = [_instantiate(t, a) for t, a, has in zip(tangents, slot.avals, inexact, strict=True) if has]
    return jax.jvp(*_materialise_of_inexact(slot, primals, inexact), nonzero)[1]


def _zeros(aval: Any) -> Any:
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


def _materialise_of_inexact(
    slot: Slot, leaves: Sequence[Any], inexact: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
    """`materialise` as a function of the leaves that have tangents, and those leaves."""

    def fun(*moving: Any) -> Any:
        leaf = iter(moving)
        return materialise(
            slot.unflatten([next(leaf) if has else x for x, has in zip(leaves, inexact, strict=True)])
        )

    return fun, [x for x, has in zip(leaves, inexact, strict=True) if has]


def _is_forwarded(slot: Slot, tangent: Any, forwarded: dict[int, tuple[Slot, Sequence[Any]]]) -> bool:
    """Whether the tangent of a Value is the one that an operand came with, as of an identity function."""
    return slot.treedef is not None and id(tangent) in forwarded and forwarded[id(tangent)][0] == slot


def _tangent_out(slot: Slot, tangent: Any) -> list[Any]:
    if slot.treedef is None:
        return [dense(tangent, "custom_jvp", hint=_PLAIN)]
    if _is_zero(tangent):
        return [
            SymbolicZero(a.to_tangent_aval()) if _has_tangent(a) else _zeros(a.to_tangent_aval())
            for a in slot.avals
        ]
    if not is_value(tangent):
        tangent = slot.cls.promote(tangent, slot.like)
    if tangent is NotImplemented or type(tangent) is not slot.cls:
        raise StructureError(
            f"The jvp rule of a custom_jvp function gives a {slot.cls.__name__} with a tangent that is "
            f"not one. Return a {slot.cls.__name__} there too, or define `{slot.cls.__name__}.promote`."
        )
    leaves, _ = flatten([tangent])
    return [
        x if _has_tangent(a) else _zeros(a.to_tangent_aval()) for x, a in zip(leaves, slot.avals, strict=True)
    ]


# Cotangents


def _cotangents_in(
    slots: Sequence[Slot],
    cts: Sequence[Any],
    constant: Sequence[Any],
    symbolic_zeros: bool,
    types: Iterable[type[Value]],
) -> list[Any]:
    fixed = iter(constant)
    out = []
    for slot, group in zip(slots, per_slot(slots, cts), strict=True):
        rest = [None if _has_tangent(a) else next(fixed) for a in slot.avals]
        if slot.treedef is None:
            (ct,) = group
            for cls in types if not _is_zero(ct) else ():
                ct = cls.cotangent(ct)
            out.append(ct)
        elif symbolic_zeros and all(map(_is_zero, group)):
            out.append(SymbolicZero(slot.aval.to_tangent_aval()))
        else:
            leaves = [
                _instantiate(ct, a) if x is None else x
                for ct, a, x in zip(group, slot.avals, rest, strict=True)
            ]
            out.append(slot.cls.cotangent(slot.unflatten(leaves)))
    return out


def _cotangents_out(slots: Sequence[Slot], kept: Any, cotangents: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for slot, ct in zip(slots, cotangents, strict=True):
        if slot.treedef is None:
            linear = is_value(ct) and type(ct).linear  # so that its array is what its leaves come to
            out.append(materialise(ct) if linear else dense(ct, "custom_vjp", hint=_PLAIN))
            continue
        primals = [next(kept) for _ in slot.avals]
        inexact = [_has_tangent(a) for a in slot.avals]
        if _is_zero(ct):
            moving: Any = iter([None] * sum(inexact))
        elif is_value(ct) and type(ct) is slot.cls:
            moving = (x for x, has in zip(flatten([ct])[0], inexact, strict=True) if has)
        else:
            fun, at = _materialise_of_inexact(slot, primals, inexact)
            moving = iter(jax.vjp(fun, *at)[1](dense(ct, "custom_vjp", hint=_PLAIN)))
        leaves = [next(moving) if has else None for has in inexact]
        out += [ad.Zero(a.to_ct_aval()) if x is None else x for x, a in zip(leaves, slot.avals, strict=True)]
    return out
