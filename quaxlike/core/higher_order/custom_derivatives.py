"""`jax.custom_jvp` and `jax.custom_vjp`: calls the user's functions with Values.

The primitive is bound again, as a custom derivative of a function on leaves. This is subtle, for three
reasons.

- JAX calls the primal function, the forward function and the jvp rule at different times, but all of them
    must return the same leaves. So whichever runs first decides the results' slots (`_Results`), and the
    others must conform. Otherwise leaves would end up in the wrong positions.
- Once a function has been staged, it's too late to change its results' form. So the derivative is traced
    then, too, only to find out which results have tangents of the same form (`decide_by`).
- JAX's `WrappedFun` stores a call's auxiliary outputs in its `stores`, which can only be filled once. We call
    it several times, and reset them in between. A function wrapping another one shares its stores, so that a
    level further down can do the same.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.extend.linear_util as lu
import jax.tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .. import compat, high_level
from ..jaxprs.evaluate import call_on_values
from ..jaxprs.linearity import has_tangent
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
from ..jaxprs.unify import StructureError, convert_to, dense_as
from ..levels import running_rule
from ..policy import dense, on_materialise
from ..recording import active, recording, shown_as
from ..trace import QuaxTrace, builtin
from ..values import is_value
from .tangents import (
    WHAT,
    cotangents_in,
    cotangents_out,
    has_tangent_of_its_form,
    instantiate,
    is_forwarded,
    is_zero,
    made_linear,
    made_to_take_cotangents,
    tangent_out,
    tangents_in,
    zeros,
)


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
        # A plain result always has a plain tangent. If all results are plain, there is nothing to decide or
        # trace.
        if any(map(is_value, outs)) and _may_be_differentiated(compat.current_trace()):
            zero = SymbolicZero if symbolic_zeros else zeros
            results.decide_by(flat_jvp, leaves, zero, fun.debug_info.func_src_info)
            _reset(jvp)
        return results.flatten(outs)

    def flat_jvp(*primals_and_tangents: Any) -> list[Any]:
        primals, tangents = split(primals_and_tangents, len(primals_and_tangents) // 2)
        own = tangents_in(slots, primals, tangents)
        outs = _call(trace, jvp, [*unflatten(slots, primals), *own])
        primals_out, tangents_out = split(outs, len(outs) // 2)
        forwarded = {
            # Some derivatives return a tangent unchanged, e.g. the identity's. Then return the original
            # leaves: creating the Value had to instantiate any symbolic zeros.
            id(t): (slot, leaves)
            for slot, t, leaves in zip(slots, own, per_slot(slots, tangents), strict=True)
        }
        kept = [
            is_zero(t) or is_forwarded(flatten([x])[1][0], t, forwarded)
            for x, t in zip(primals_out, tangents_out, strict=True)
        ]
        primals_out = results.linear(primals_out, tangents_out, kept)
        has_tangents = [
            is_forwarded(flatten([x])[1][0], t, forwarded) or has_tangent_of_its_form(x, t)
            for x, t in zip(primals_out, tangents_out, strict=True)
        ]
        flat = results.flatten_differentiated(primals_out, has_tangents)
        out = [
            forwarded[id(t)][1] if is_forwarded(slot, t, forwarded) else tangent_out(slot, leaves, t)
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
        with running_rule(trace):
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
    # Pulling back a dense cotangent requires the leaves of the Values among the operands, so these are
    # residuals as well. Forward them, rather than store them a second time. If some also occur in the other
    # residuals, preserve object identity, so that their patterns are recognised as equal.
    is_value_leaf = spread([slot.treedef is not None for slot in slots], slots)
    forwarded = [i for i, kept in enumerate(is_value_leaf) if kept]
    results, residuals = _Results(), _Residuals()

    def flat_fun(*leaves: Any) -> list[Any]:
        outs = _call(trace, fun, unflatten(slots, leaves))
        if not _may_be_differentiated(compat.current_trace()):
            return results.flatten(outs)
        outs = results.taking_cotangents(outs)
        return results.flatten_differentiated(outs, list(map(has_cotangents, outs)))

    def flat_fwd(*pairs: Any) -> list[Any]:
        primals = unflatten(slots, pairs[::2])
        perturbed = [any(nz) for nz in per_slot(slots, pairs[1::2])]
        outs = _call(trace, fwd, [x for pair in zip(primals, perturbed, strict=True) for x in pair])
        _, res_tree, forwards = out_trees()
        # If a residual is one of the operands, JAX only returns which one, not its value.
        n_stored = res_tree.num_leaves - sum(f is not None for f in forwards)
        stored, primals_out = split(outs, n_stored)
        stored = iter(stored)
        res = [next(stored) if f is None else primals[f] for f in forwards]
        primals_out = results.taking_cotangents(primals_out)
        flat = results.flatten_differentiated(primals_out, [has_cotangents(x) for x in primals_out])
        # Cotangents don't include the results' pattern, but the backward function may need it: store it.
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
        with running_rule(trace):
            out = compat.bind_with_trace(primitive, trace.parent_trace, leaves, params)
    return [trace.box(x) for x in unflatten(results.slots, out)]


# For hijax: under `jax_custom_jvp3` and `jax_custom_vjp3`, custom derivatives are high-level primitives. A
# custom derivative of functions on leaves is bound in place of the original.


CUSTOM = ("custom_jvp_call", "custom_vjp_call")


def custom_derivative(
    trace: QuaxTrace, primitive: jexc.Primitive, name: str, hi: Any, operands: Sequence[Any]
) -> list[Any]:
    """Calls a `custom_jvp` or `custom_vjp` function, given as the high-level primitive `hi`.

    **Arguments:**

    - `name`: one of `CUSTOM`.
    """

    source = compat.debug_info_of(hi.traced.jaxpr).func_src_info

    def wrapped(fun: Callable[..., Any]) -> lu.WrappedFun:
        return lu.wrap_init(fun, debug_info=jexc.DebugInfo(WHAT, source, None, None))

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
    """Converts a symbolic zero to the kind JAX uses internally."""
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
            cts = [instantiate(ct, ct.aval) if isinstance(ct, SymbolicZero) else ct for ct in cts]
        found, logs = bwd(*residuals, *cts)
        return tuple(None if is_zero(ct) else ct for ct in found), logs

    call.defvjp_with_logs(fwd_of_primals, bwd_of_residuals, symbolic_zeros=True)
    return call(*leaves)


_HINT = "Its derivative is not a Value of its type with the same pattern."

# The sources of functions with derivatives being traced for `decide_by`: most derivatives call the function
# itself.
_deciding: contextvars.ContextVar[frozenset[Any]] = contextvars.ContextVar(
    "deciding_results", default=frozenset()
)


class _Results:
    """The slots of the results, decided by whichever of the user's functions runs first."""

    slots: tuple[LeafLayout, ...] = ()
    decided = False

    def decide_by(
        self, flat_jvp: Callable[..., Any], leaves: Sequence[Any], zero: Callable[[Any], Any], source: Any
    ) -> None:
        """Traces the derivative of a function being staged, to determine its results' form.

        Once the function is differentiated, it's too late to change this. If tracing raises an error, nothing
        is decided: the derivative may never be needed. (Most derivatives call the function itself, as
        detected by its `source`.)
        """
        # Without the second check, a rule calling the function would trace its derivative recursively.
        if self.decided or source in _deciding.get():
            return
        avals = list(map(jax.typeof, leaves))
        moving = [aval.to_tangent_aval() for aval in avals if has_tangent(aval)]

        def on_moving(*flat: Any) -> Any:
            primals, tangents = split(flat, len(avals))
            tangent = iter(tangents)
            every = [next(tangent) if has_tangent(a) else zero(a.to_tangent_aval()) for a in avals]
            return flat_jvp(*primals, *every)

        recorder = active()
        unseen = recording(recorder.unseen()) if recorder else contextlib.nullcontext()
        token = _deciding.set(_deciding.get() | {source})
        try:
            # The program may never actually compute the derivative, so this must neither raise an error nor
            # appear in a report.
            with on_materialise("allow"), unseen:
                debug_info = jexc.DebugInfo(WHAT, "its derivative", None, None)
                compat.trace_to_jaxpr(on_moving, [*avals, *moving], debug_info)
        except Exception:  # the user's rule may raise anything
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
        return [convert_to(x, slot, WHAT) for x, slot in zip(outs, self.slots, strict=True)]

    def linear(
        self, outs: Sequence[Any], tangents: Sequence[Any] | None = None, kept: Sequence[bool] = ()
    ) -> Sequence[Any]:
        """Returns the results of a differentiated function, materialising them if necessary.

        Results marked as `kept` are left unchanged.
        """
        if self.decided:
            return self._conform(outs)
        return [
            x if keep else dense_as(made_linear(x, WHAT, _HINT), t, WHAT)
            for x, t, keep in zip(
                outs, tangents or [None] * len(outs), kept or [False] * len(outs), strict=True
            )
        ]

    def taking_cotangents(self, outs: Sequence[Any]) -> Sequence[Any]:
        """As `linear`, but also materialises parts that can't hold a cotangent: each element has its own."""
        outs = self.linear(outs)
        return outs if self.decided else [made_to_take_cotangents(x, WHAT, _HINT) for x in outs]

    def flatten_differentiated(self, outs: Sequence[Any], has_tangents: Sequence[bool]) -> list[Any]:
        """As `flatten`, but for a differentiated function.

        Materialises any Values with tangents of another form.
        """
        if not self.decided:
            outs = [
                dense(x, WHAT, hint=_HINT) if is_value(x) and not has else x
                for x, has in zip(outs, has_tangents, strict=True)
            ]
        for slot, x, has in zip(self.slots, outs, has_tangents, strict=True) if self.decided else ():
            # When staged, the function wasn't being differentiated, and a nonlinear result was fine.
            if slot.treedef is not None and not (has if is_value(x) else slot.linear):
                raise StructureError(
                    f"A custom_jvp or custom_vjp function returned {slot.cls.__name__} when it was "
                    "staged, and is differentiated now. It is not linear in its leaves, or its tangent has "
                    "another pattern: apply `quaxlike.materialise` to the result of the function."
                )
        return self.flatten(outs)


class _Residuals:
    """The layout of the residuals, and of result leaves without tangents."""

    slots: tuple[LeafLayout, ...] = ()
    # For each leaf: its index if it's a leaf of an operand, otherwise None.
    forwards: tuple[int | None, ...] = ()

    @property
    def size(self) -> int:
        """How many leaves are stored."""
        return self.forwards.count(None)

    def flatten(self, res: Sequence[Any], constant: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
        leaves, self.slots = flatten(res)
        leaves += constant
        # Don't store leaves twice: frozen weights would take up twice as much memory in the backward pass.
        known = {id(x): i for i, x in enumerate(kept)}
        self.forwards = tuple(known.get(id(x)) for x in leaves)
        return [x for x, forward in zip(leaves, self.forwards, strict=True) if forward is None]

    def unflatten(self, stored: Sequence[Any], kept: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        leaf = iter(stored)
        leaves = [next(leaf) if forward is None else kept[forward] for forward in self.forwards]
        res, constant = split(leaves, sum(map(len, self.slots)))
        return unflatten(self.slots, res), constant


def _call(trace: QuaxTrace, fun: lu.WrappedFun, operands: Sequence[Any]) -> Any:
    _reset(fun)
    return call_on_values(trace, fun.call_wrapped, operands)


def _reset(fun: lu.WrappedFun) -> None:
    """Resets the auxiliary outputs stored by a function's call, so that it can be called again."""
    for store in fun.stores:
        if store:
            store.reset()


def _may_be_differentiated(trace: Any) -> bool:
    """Returns whether a function called under `trace` may be differentiated.

    Conservative: only False if there are no transforms other than `vmap` and `quaxify`.
    """
    # These two never differentiate by themselves, but a trace below them may.
    while isinstance(trace, QuaxTrace) or hasattr(trace, "axis_data"):  # a `vmap` trace
        trace = trace.parent_trace
    return not compat.is_eval_trace(trace)


def _without_frozen(slots: Sequence[LeafLayout], leaves: Sequence[Any]) -> list[Any]:
    """Stops the gradient at leaves not contributing to the derivative, such as frozen weights.

    Rules for a linear type may carry along leaves unused by `materialise` (e.g. the uncertainties of its
    elements). Their tangents belong to the results.
    """
    live = [flag or slot.linear for slot in slots for flag in live_leaves(slot)]
    return [x if flag else jax.lax.stop_gradient(x) for x, flag in zip(leaves, live, strict=True)]


def _wrap(flat: Callable[..., Any], original: lu.WrappedFun) -> lu.WrappedFun:
    """Replaces `original` by `flat`, which calls it.

    To JAX, this is a transformation of `original`. The two share the same stores, which are reset after each
    call by a level (or transform) further down.
    """
    return _in_place_of(original.with_unknown_names(), flat)


@lu.transformation2
def _in_place_of(_: Callable[..., Any], flat: Callable[..., Any], *leaves: Any) -> Any:
    return flat(*leaves)
