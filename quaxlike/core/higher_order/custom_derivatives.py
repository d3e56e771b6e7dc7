"""`jax.custom_jvp` and `jax.custom_vjp`: the user's functions, called with Values.

The primitive is bound again on the leaves. A tangent of a Value that is linear in its leaves is a Value of
the same class and pattern; so is a cotangent, if each leaf is an element. Other Values are first converted to
a linear form, by making parts that are not linear dense; the tangent (cotangent) is that of the conversion.
"""

import contextlib
import contextvars
import functools
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

from ..._checked import a_or_an
from .. import compat, high_level
from ..jaxprs.evaluate import call_on_values
from ..jaxprs.linearity import (
    as_cotangent,
    has_tangent,
    have_leaves_alike,
    held,
    is_derivative,
    is_linear,
    linear_part,
    map_parts,
    refuses,
)
from ..jaxprs.slots import (
    LeafLayout,
    flatten,
    has_cotangents,
    live_leaves,
    per_slot,
    split,
    spread,
    unflatten,
)
from ..jaxprs.unify import StructureError, convert_to, dense_as, map_parts_as, unify
from ..policy import dense, on_materialise
from ..recording import Recorder, active, recording, shown_as
from ..trace import QuaxTrace, builtin
from ..values import Value, aval_of, is_value, materialised


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
    if not _may_be_differentiated(trace.parent_trace):
        with jexc.set_current_trace(trace):
            return list(fun.call_wrapped(*operands))
    leaves, slots = flatten([trace.unwrap(x) for x in operands])
    results = _Results()

    def flat_fun(*leaves: Any) -> list[Any]:
        outs = _call(trace, fun, unflatten(slots, leaves))
        if any(map(is_value, outs)) and _may_be_differentiated(compat.current_trace()):
            zero = SymbolicZero if symbolic_zeros else _zeros
            results.decide_by(flat_jvp, leaves, zero, fun.debug_info.func_src_info)
            _reset(jvp)
        return results.flatten(outs)

    def flat_jvp(*primals_and_tangents: Any) -> list[Any]:
        primals, tangents = split(primals_and_tangents, len(primals_and_tangents) // 2)
        tangents_in = _tangents_in(slots, primals, tangents)
        outs = _call(trace, jvp, [*unflatten(slots, primals), *tangents_in])
        primals_out, tangents_out = split(outs, len(outs) // 2)
        forwarded = {
            id(t): (slot, leaves)
            for slot, t, leaves in zip(slots, tangents_in, per_slot(slots, tangents), strict=True)
        }
        kept = [
            _is_zero(t) or _is_forwarded(flatten([x])[1][0], t, forwarded)
            for x, t in zip(primals_out, tangents_out, strict=True)
        ]
        primals_out = results.linear(primals_out, tangents_out, kept)
        has_tangents = [
            _is_forwarded(flatten([x])[1][0], t, forwarded) or _has_tangent_of_its_form(x, t)
            for x, t in zip(primals_out, tangents_out, strict=True)
        ]
        flat = results.flatten_differentiated(primals_out, has_tangents)
        out = [
            forwarded[id(t)][1] if _is_forwarded(slot, t, forwarded) else _tangent_out(slot, leaves, t)
            for slot, leaves, t in zip(
                results.slots, per_slot(results.slots, flat), tangents_out, strict=True
            )
        ]
        return [*flat, *(leaf for leaves in out for leaf in leaves)]

    leaves = _without_frozen(slots, leaves)
    if primitive.name == high_level.NAME:
        out = _call_custom_jvp(flat_fun, flat_jvp, leaves, symbolic_zeros)
    else:
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
    if not _may_be_differentiated(trace.parent_trace):
        with jexc.set_current_trace(trace):
            return list(fun.call_wrapped(*operands))
    leaves, slots = flatten([trace.unwrap(x) for x in operands])
    # The leaves of Values among the operands are residuals too: pulling back a dense cotangent needs
    # them. They are forwarded instead of stored again. Where other residuals hold them too, they stay
    # identical, so that patterns are recognised as equal.
    is_value_leaf = spread([slot.treedef is not None for slot in slots], slots)
    forwarded = [i for i, kept in enumerate(is_value_leaf) if kept]
    results, residuals = _Results(), _Residuals()

    def flat_fun(*leaves: Any) -> list[Any]:
        outs = _call(trace, fun, unflatten(slots, leaves))
        if not _may_be_differentiated(compat.current_trace()):
            return results.flatten(outs)
        outs = results.linear(outs)
        return results.flatten_differentiated(outs, list(map(has_cotangents, outs)))

    def flat_fwd(*pairs: Any) -> list[Any]:
        primals = unflatten(slots, pairs[::2])
        perturbed = [any(nz) for nz in per_slot(slots, pairs[1::2])]
        outs = _call(trace, fwd, [x for pair in zip(primals, perturbed, strict=True) for x in pair])
        _, res_tree, forwards = out_trees()
        n_stored = res_tree.num_leaves - sum(f is not None for f in forwards)
        stored, primals_out = split(outs, n_stored)
        stored = iter(stored)
        res = [next(stored) if f is None else primals[f] for f in forwards]
        primals_out = results.linear(primals_out)
        flat = results.flatten_differentiated(primals_out, [has_cotangents(x) for x in primals_out])
        constant = [x for x in flat if not has_tangent(jax.typeof(x))]
        return [*residuals.flatten(res, constant, [pairs[::2][i] for i in forwarded]), *flat]

    def flat_bwd(*args: Any) -> Any:
        n_out = sum(map(len, results.slots))
        stored, kept, cts = split(args, residuals.size, len(forwarded))
        assert len(cts) == n_out
        res, constant = residuals.unflatten(stored, kept)
        types = {cls for slot in (*slots, *results.slots) for cls in slot.classes}
        cotangents = cotangents_in(results.slots, cts, constant, symbolic_zeros, types)
        outs = _call(trace, bwd, [*res, *cotangents])
        cts_in, *logs = (outs[0], outs[1:]) if compat.BWD_RETURNS_LOGS else (outs,)
        flat = cotangents_out(slots, iter(kept), cts_in)
        return (flat, logs[0][0]) if logs else flat

    def flat_out_trees() -> tuple[Any, Any, list[int | None]]:
        n_out = sum(map(len, results.slots))
        n_res = residuals.size + len(forwarded)
        trees = [jtu.tree_structure([0] * n) for n in (n_out, n_res)]
        return trees[0], trees[1], [*[None] * residuals.size, *forwarded]

    leaves = _without_frozen(slots, leaves)
    if primitive.name == high_level.NAME:
        out = _call_custom_vjp(flat_fun, flat_fwd, flat_bwd, flat_out_trees, leaves, symbolic_zeros)
    else:
        params = {
            "subfuns": (_wrap(flat_fun, fun), _wrap(flat_fwd, fwd), _wrap(flat_bwd, bwd)),
            "out_trees": flat_out_trees,
            "symbolic_zeros": symbolic_zeros,
        }
        out = compat.bind_with_trace(primitive, trace.parent_trace, leaves, params)
    return [trace.box(x) for x in unflatten(results.slots, out)]


# Hijax: with `jax_custom_jvp3` and `jax_custom_vjp3`, custom derivatives are high-level primitives. What is
# bound instead is a custom derivative again, of functions of the leaves.


CUSTOM = ("custom_jvp_call", "custom_vjp_call")


def custom_derivative(
    trace: QuaxTrace, primitive: jexc.Primitive, name: str, hi: Any, operands: Sequence[Any]
) -> list[Any]:
    """A call of a `custom_jvp` or `custom_vjp` function, which is the high-level primitive `hi`; `name` is
    one of `CUSTOM`."""

    source = compat.debug_info_of(hi.traced.jaxpr).func_src_info

    def wrapped(fun: Callable[..., Any]) -> lu.WrappedFun:
        return lu.wrap_init(fun, debug_info=jexc.DebugInfo(_WHAT, source, None, None))

    arguments = functools.partial(jtu.tree_unflatten, hi.in_tree)
    fun = wrapped(lambda *flat: hi.out_tree.flatten_up_to(hi.expand(*arguments(flat))))
    operands = list(map(trace.box, operands))
    if name == CUSTOM[0]:

        def jvp(*flat: Any) -> list[Any]:
            primals, tangents = split(flat, hi.in_tree.num_leaves)
            out = hi.jvp(arguments(primals), arguments(map(_zero_of_jax, tangents)))
            return [x for tree in out for x in hi.out_tree.flatten_up_to(tree)]

        return _unboxed(trace, _custom_jvp(
            trace, primitive, fun, wrapped(jvp), operands, symbolic_zeros=hi.symbolic_zeros
        ))  # fmt: skip
    structure: Any = None

    def fwd(*pairs: Any) -> list[Any]:
        nonlocal structure
        out, residuals = hi.vjp_fwd(arguments(pairs[1::2]), *arguments(pairs[::2]))
        leaves, structure = jtu.tree_flatten(residuals)
        return [*leaves, *hi.out_tree.flatten_up_to(out)]

    def bwd(*flat: Any) -> Any:
        residuals, cts = split(flat, structure.num_leaves)
        cts = jtu.tree_unflatten(hi.out_tree, list(map(_zero_of_jax, cts)))
        found, logs = hi.vjp_bwd_retval_logs(jtu.tree_unflatten(structure, residuals), cts)
        return hi.in_tree.flatten_up_to(found), logs

    def out_trees() -> tuple[Any, Any, list[None]]:
        return hi.out_tree, structure, [None] * structure.num_leaves

    return _unboxed(trace, _custom_vjp(
        trace, primitive, fun, wrapped(fwd), wrapped(bwd), operands,
        out_trees=out_trees, symbolic_zeros=hi.symbolic_zeros,
    ))  # fmt: skip


def _unboxed(trace: QuaxTrace, outs: Sequence[Any]) -> list[Any]:
    return list(map(trace.unwrap, outs))


def _zero_of_jax(x: Any) -> Any:
    """A tangent or cotangent with a zero in JAX's own form."""
    return ad.Zero(x.aval) if isinstance(x, SymbolicZero) else x


def _call_custom_jvp(
    fun: Callable[..., Any], jvp: Callable[..., Any], leaves: Sequence[Any], symbolic_zeros: bool
) -> Any:
    call = jax.custom_jvp(fun)

    @functools.partial(call.defjvp, symbolic_zeros=symbolic_zeros)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        out = jvp(*primals, *tangents)
        return split(out, len(out) // 2)

    return call(*leaves)


def _call_custom_vjp(
    fun: Callable[..., Any],
    fwd: Callable[..., Any],
    bwd: Callable[..., Any],
    out_trees: Callable[[], tuple[Any, Any, Sequence[int | None]]],
    leaves: Sequence[Any],
    symbolic_zeros: bool,
) -> Any:
    call = jax.custom_vjp(fun)

    def fwd_of_primals(*primals: Any) -> Any:
        values = [x.value for x in primals]
        out = fwd(*[y for x in primals for y in (x.value, x.perturbed)])
        forwards = out_trees()[2]
        stored, out = split(out, forwards.count(None))
        return out, [*stored, *[values[i] for i in forwards if i is not None]]

    def bwd_of_residuals(residuals: Sequence[Any], cts: Sequence[Any]) -> Any:
        if not symbolic_zeros:
            cts = [_instantiate(ct, ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in cts]
        found, logs = bwd(*residuals, *cts)
        return tuple(None if _is_zero(ct) else ct for ct in found), logs

    call.defvjp_with_logs(fwd_of_primals, bwd_of_residuals, symbolic_zeros=True)
    return call(*leaves)


_WHAT = "a custom derivative"
_PLAIN = "It is the derivative of a plain array."
_HINT = "Its derivative is not a Value of its type with the same pattern."
_OTHER = "It is the derivative of a Value of another type or pattern."


def _linear(x: Any, what: str, hint: str) -> Any:
    """`x` with the parts that are not linear made dense, under the policy."""
    return linear_part(x, functools.partial(dense, what=what, hint=hint)) if is_value(x) else x


_deciding: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar(
    "deciding_results", default=frozenset()
)


class _Results:
    """The slots of the results, which whichever of the user's functions runs first decides."""

    slots: tuple[LeafLayout, ...] = ()
    decided = False

    def decide_by(
        self, flat_jvp: Callable[..., Any], leaves: Sequence[Any], zero: Callable[[Any], Any], source: Any
    ) -> None:
        """Traces the derivative of a function that is staged: once it is differentiated, it is too late to
        give the results another form. If it raises, it decides nothing: it may never be needed. Most
        derivatives call the function itself, which is known by its `source`."""
        if self.decided or source in _deciding.get():
            return
        avals = list(map(jax.typeof, leaves))
        moving = [aval.to_tangent_aval() for aval in avals if has_tangent(aval)]

        def on_moving(*flat: Any) -> Any:
            primals, tangents = split(flat, len(avals))
            tangent = iter(tangents)
            every = [next(tangent) if has_tangent(a) else zero(a.to_tangent_aval()) for a in avals]
            return flat_jvp(*primals, *every)

        unseen = recording(Recorder()) if active() else contextlib.nullcontext()
        token = _deciding.set(_deciding.get() | {source})
        try:
            with on_materialise("allow"), unseen:
                debug_info = jexc.DebugInfo(_WHAT, "its derivative", None, None)
                compat.trace_to_jaxpr(on_moving, [*avals, *moving], debug_info)
        except Exception:  # whatever the user's rule raises
            self.decided = False
        finally:
            _deciding.reset(token)

    def flatten(self, outs: Sequence[Any]) -> list[Any]:
        leaves, self.slots = flatten(self._conform(outs))
        self.decided = True
        return leaves

    def _conform(self, outs: Sequence[Any]) -> Sequence[Any]:
        if not self.decided:
            return outs
        return [convert_to(x, slot, _WHAT) for x, slot in zip(outs, self.slots, strict=True)]

    def linear(
        self, outs: Sequence[Any], tangents: Sequence[Any] | None = None, kept: Sequence[bool] = ()
    ) -> Sequence[Any]:
        """The results of a differentiated function, dense where they are not linear or their tangents are
        dense, but for those whose tangents are kept as they are."""
        if self.decided:
            return self._conform(outs)
        return [
            x if keep else dense_as(_linear(x, _WHAT, _HINT), t, _WHAT)
            for x, t, keep in zip(
                outs, tangents or [None] * len(outs), kept or [False] * len(outs), strict=True
            )
        ]

    def flatten_differentiated(self, outs: Sequence[Any], has_tangents: Sequence[bool]) -> list[Any]:
        """As `flatten`, for a function that is differentiated: a Value whose tangents do not have its form is
        made dense."""
        if not self.decided:
            outs = [
                dense(x, _WHAT, hint=_HINT) if is_value(x) and not has else x
                for x, has in zip(outs, has_tangents, strict=True)
            ]
        for slot, x, has in zip(self.slots, outs, has_tangents, strict=True) if self.decided else ():
            if slot.treedef is not None and not (has if is_value(x) else slot.linear):
                raise StructureError(
                    f"A custom_jvp or custom_vjp function returned {a_or_an(slot.cls)} when it was "
                    "staged, and is differentiated now. It is not linear in its leaves, or its tangent has "
                    "another pattern: apply `quaxlike.materialise` to the result of the function."
                )
        return self.flatten(outs)


class _Residuals:
    """The layout of the residuals, and of the leaves of the results that have no tangents."""

    slots: tuple[LeafLayout, ...] = ()
    places: tuple[int | None, ...] = ()  # for each leaf, its index if it is a leaf of the operands

    @property
    def size(self) -> int:
        """The number of leaves that are stored."""
        return self.places.count(None)

    def flatten(self, res: Sequence[Any], constant: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        leaves, self.slots = flatten(res)
        leaves += constant
        known = {id(x): i for i, x in enumerate(kept)}
        self.places = tuple(known.get(id(x)) for x in leaves)
        return [x for x, place in zip(leaves, self.places, strict=True) if place is None]

    def unflatten(self, stored: Sequence[Any], kept: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        leaf = iter(stored)
        leaves = [next(leaf) if place is None else kept[place] for place in self.places]
        res, constant = split(leaves, sum(map(len, self.slots)))
        return unflatten(self.slots, res), constant


def _call(trace: QuaxTrace, fun: lu.WrappedFun, operands: Sequence[Any]) -> Any:
    _reset(fun)
    return call_on_values(trace, fun.call_wrapped, operands)


def _reset(fun: lu.WrappedFun) -> None:
    """Forgets what a function stored when it was called, so that it can be called again."""
    for store in fun.stores:
        if store:
            store.reset()


def _may_be_differentiated(trace: Any) -> bool:
    """Whether a function that is called under `trace` may be differentiated: always, but for `vmap` and
    `quaxify` alone."""
    while isinstance(trace, QuaxTrace) or hasattr(trace, "axis_data"):  # that of a `vmap`
        trace = trace.parent_trace
    return not compat.is_eval_trace(trace)


def _without_frozen(slots: Sequence[LeafLayout], leaves: Sequence[Any]) -> list[Any]:
    """The leaves, without the tangents of those that the array does not depend on, such as frozen weights."""
    live = [flag for slot in slots for flag in live_leaves(slot)]
    return [x if flag else jax.lax.stop_gradient(x) for x, flag in zip(leaves, live, strict=True)]


def _wrap(flat: Callable[..., Any], original: lu.WrappedFun) -> lu.WrappedFun:
    """`flat`, which calls `original`, in its place. It counts as a transformation of `original`, so that it
    has the stores of that as well: a level below, or a transform between them, calls it and resets it."""
    return _in_place_of(original.with_unknown_names(), flat)


@lu.transformation2
def _in_place_of(_: Callable[..., Any], flat: Callable[..., Any], *leaves: Any) -> Any:
    return flat(*leaves)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero | ad.Zero) or getattr(tangent, "dtype", None) == jax.dtypes.float0


def _instantiate(tangent: Any, aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if _is_zero(tangent) else tangent


# Tangents


def _tangents_in(slots: Sequence[LeafLayout], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    pairs = zip(per_slot(slots, primals), per_slot(slots, tangents), strict=True)
    return [_tangent_in(slot, p, t) for slot, (p, t) in zip(slots, pairs, strict=True)]


def _tangent_in(slot: LeafLayout, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    if slot.treedef is None:
        return tangents[0]
    if all(map(_is_zero, tangents)):
        tangent = slot.aval.to_tangent_aval()
        if any(isinstance(t, SymbolicZero) for t in tangents):
            return SymbolicZero(tangent)
        if slot.avals or tangent.dtype == jax.dtypes.float0:
            return _zeros(tangent)
        return jtu.tree_map(jnp.zeros_like, _with_leaves(slot.unflatten(primals)))
    if slot.linear:
        triples = zip(primals, tangents, slot.avals, strict=True)
        return slot.unflatten([_instantiate(t, a) if has_tangent(a) else p for p, t, a in triples])
    inexact = [has_tangent(a) for a in slot.avals]
    nonzero = [_instantiate(t, a) for t, a, has in zip(tangents, slot.avals, inexact, strict=True) if has]
    y, tangent = jax.jvp(*_of_inexact(_linear_part, slot, primals, inexact), nonzero)
    return jtu.tree_map(lambda p, t: t if has_tangent(jax.typeof(p)) else p, y, tangent)


def _with_leaves(constant: Value) -> Any:
    """Makes a Value without leaves dense, or those that it holds."""
    return map_parts(_with_leaves, constant) if held(constant) else materialised(constant)


def _zeros(aval: Any) -> Any:
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


def _linear_part(x: Value) -> Any:
    return linear_part(x, materialised)


def _of_inexact(
    f: Callable[[Value], Any], slot: LeafLayout, leaves: Sequence[Any], inexact: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
    """`f` as a function of the leaves that have tangents, together with those leaves."""

    def fun(*moving: Any) -> Any:
        leaf = iter(moving)
        return f(slot.unflatten([next(leaf) if has else x for x, has in zip(leaves, inexact, strict=True)]))

    return fun, [x for x, has in zip(leaves, inexact, strict=True) if has]


def _is_forwarded(
    slot: LeafLayout, tangent: Any, forwarded: dict[int, tuple[LeafLayout, Sequence[Any]]]
) -> bool:
    """Whether the tangent of a Value is that of an operand, forwarded, as in an identity function. A branch
    may have widened the operand to the form of the Value."""
    if slot.treedef is None or id(tangent) not in forwarded:
        return False
    operand = forwarded[id(tangent)][0]
    try:
        return operand == slot or (operand.avals == slot.avals and unify(operand, slot, _WHAT) == slot)
    except StructureError:
        return False


def _has_tangent_of_its_form(x: Any, tangent: Any) -> bool:
    """Whether `tangent`, promoted if it is a plain array, is a tangent for the Value `x`."""
    if not is_value(x):
        return False
    return _is_zero(tangent) or (is_linear(x) and is_derivative(_lifted(tangent, x), x))


def _lifted(tangent: Any, x: Value) -> Any:
    like = flatten([x])[1][0].like
    return dense_as(tangent, like, _WHAT) if is_value(tangent) else type(x).promote(tangent, like)


def _tangent_out(slot: LeafLayout, primals: Sequence[Any], tangent: Any) -> list[Any]:
    if slot.treedef is None:
        return [dense(tangent, "custom_jvp", hint=_PLAIN)]
    if _is_zero(tangent):
        return [
            SymbolicZero(a.to_tangent_aval()) if has_tangent(a) else _zeros(a.to_tangent_aval())
            for a in slot.avals
        ]
    x = slot.unflatten(primals)
    tangent = _lifted(tangent, x)
    if not is_derivative(tangent, x):
        name = slot.cls.__name__
        raise StructureError(
            f"The jvp rule of a custom_jvp function returns {a_or_an(name)} whose tangent is not of the "
            f"same type and pattern. Return one of that type as the tangent, or define `{name}.promote`."
        )
    leaves, _ = flatten([tangent])
    return [
        x if has_tangent(a) else _zeros(a.to_tangent_aval()) for x, a in zip(leaves, slot.avals, strict=True)
    ]


# Cotangents


def cotangents_in(
    slots: Sequence[LeafLayout],
    cts: Sequence[Any],
    constant: Sequence[Any],
    symbolic_zeros: bool,
    types: Iterable[type[Value]],
) -> list[Any]:
    fixed = iter(constant)
    out = []
    for slot, group in zip(slots, per_slot(slots, cts), strict=True):
        rest = [None if has_tangent(a) else next(fixed) for a in slot.avals]
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
            out.append(as_cotangent(slot.unflatten(leaves)))
    return out


def _pulled_back(slot: LeafLayout, primals: Sequence[Any], inexact: Sequence[bool], ct: Any) -> Sequence[Any]:
    """The cotangents of the leaves that have any, from a cotangent whose form is not that of the Value."""
    ct = _linear(ct, "custom_vjp", _OTHER)
    alike = lambda x: map_parts_as(ct, materialised, _linear_part(x))
    fun, at = _of_inexact(alike, slot, primals, inexact)
    y, pull_back = jax.vjp(fun, *at)
    ct = dense_as(ct, y, "custom_vjp")
    if is_value(y) and has_cotangents(ct) and is_derivative(ct, y):
        leaves = (
            x if has_tangent(jax.typeof(x)) else _zeros(jax.typeof(x).to_ct_aval()) for x in flatten([ct])[0]
        )
        return pull_back(jtu.tree_unflatten(jtu.tree_structure(y), leaves))
    fun, at = _of_inexact(materialised, slot, primals, inexact)
    y, pull_back = jax.vjp(fun, *at)
    ct = materialised(ct) if _has_leaf_of_its_shape(ct) else dense(ct, "custom_vjp", hint=_OTHER)
    return pull_back(jnp.asarray(ct, y.dtype))


def _has_leaf_of_its_shape(ct: Any) -> bool:
    """Whether nothing is lost if `ct` is made dense: it is an array with names, say, or a unit, which is that
    of a cotangent and means nothing here."""
    return is_value(ct) and [leaf.shape for leaf in jtu.tree_leaves(ct)] == [aval_of(ct).shape]


def _dense_cotangent(ct: Any) -> Any:
    """A cotangent as an array: if it is a Value that refuses to materialise, its only leaf."""
    ct = _linear(ct, "custom_vjp", _PLAIN)
    by_its_leaf = _has_leaf_of_its_shape(ct) and refuses(ct)
    return jtu.tree_leaves(ct)[0] if by_its_leaf else materialised(ct)


def _leaves_of_cotangent(slot: LeafLayout, primals: Sequence[Any], ct: Any) -> Sequence[Any] | None:
    """The cotangents of the leaves of a Value that refuses to materialise, which is differentiated by its
    leaves: those of a cotangent of its class, whatever its static fields are (a product is in another unit),
    or a dense one. None if they do not correspond."""
    if not refuses(slot.like):
        return None
    x = slot.unflatten(primals)
    if not isinstance(ct, slot.cls):
        ct = _dense_cotangent(ct)
    leaves = jtu.tree_leaves(ct)
    return leaves if have_leaves_alike(leaves, jtu.tree_leaves(x)) else None


def cotangents_out(slots: Sequence[LeafLayout], kept: Any, cotangents: Sequence[Any]) -> list[Any]:
    out: list[Any] = []
    for slot, ct in zip(slots, cotangents, strict=True):
        if slot.treedef is None:
            # A linear Value materialises to the dense cotangent.
            out.append(_dense_cotangent(ct))
            continue
        primals = [next(kept) for _ in slot.avals]
        inexact = [has_tangent(a) for a in slot.avals]
        if _is_zero(ct):
            moving: Any = iter([None] * sum(inexact))
        elif has_cotangents(ct) and is_derivative(ct, slot.unflatten(primals)):
            moving = (x for x, has in zip(flatten([ct])[0], inexact, strict=True) if has)
        elif (own := _leaves_of_cotangent(slot, primals, ct)) is not None:
            moving = (x for x, has in zip(own, inexact, strict=True) if has)
        else:
            moving = iter(_pulled_back(slot, primals, inexact, ct))
        leaves = [next(moving) if has else None for has in inexact]
        out += [ad.Zero(a.to_ct_aval()) if x is None else x for x, a in zip(leaves, slot.avals, strict=True)]
    return out
