"""Unifies the two sides of branches, loop carries and buffers with Values.

Unification never changes a value: both sides are converted to a form each can have
exactly, or become dense under the policy, or an error names both. It reads only slots (statics and shapes),
never data, so a traced program and an eager one agree on the form.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .. import compat
from ..plain_arrays import either, without_guess
from ..policy import dense, policy_key
from ..recording import user_source
from ..rules import active_layers, resolver
from ..values import Value, is_value, materialised, replace_fields
from .linearity import held, map_parts
from .slots import LeafLayout, flatten


class OperandMismatch(TypeError):
    """Operands are incompatible, such as metres and seconds. For rules to raise.

    If this is raised inside a loop, plain arrays in the loop's carry are tried as placeholders, which one
    iteration turns into Values: see `Value.promote`.

    **Arguments:**

    - `cls`: the Value type whose rule raises this.
    """

    def __init__(self, message: str, cls: type[Value] = Value) -> None:
        super().__init__(message)
        self.cls = cls


class StructureError(OperandMismatch):
    """Branches, or a loop carry before and after an iteration, hold Values with no common form."""


def without_placeholder(x: Any) -> Any:
    """Returns the plain array for which a guess stands (see core/plain_arrays.py); anything else
    unchanged."""
    (slot,) = flatten([x])[1]
    plain = without_guess(slot)
    return x if plain is slot else plain.unflatten(jtu.tree_leaves(x))


def unify(a: LeafLayout, b: LeafLayout, where: str) -> LeafLayout:
    """Returns the slot to which both sides can be converted by `convert_to`."""
    if a.treedef is None and b.treedef is None:
        known = either(a.constant, b.constant)
        a, b = LeafLayout(None, a.avals, known), LeafLayout(None, b.avals, known)
    if a == b:
        return a
    # JAX drops weak types in the same way if one side is strong.
    if a.strong() == b.strong():
        return a.strong()
    if a.treedef is None and b.treedef is None:
        return a  # JAX raises its own error
    if a.treedef is not None and b.treedef is not None:
        # A guessed placeholder must not decide the form of a real Value. Try to widen `b` alone first: in a
        # loop, `a` is the carry so far, and keeping its form avoids one more trace of the body.
        a, b = without_guess(a), without_guess(b)
        if _widened(b, a).has_form_of(a):
            return a.strong()
    orders = ((b, a), (a, b)) if b.treedef is None else ((a, b), (b, a))  # lift a plain array first
    for first, second in orders:
        # Widen one side, then check that the other side can take this form too. `widen` need not be
        # symmetric, so we try both orders.
        form = _widened(first, second)
        if form.treedef is None:
            return second.dense().strong()
        common = _widened(second, form)
        if common.has_form_of(form):
            return common.strong()
    remedy = next((cls.to_unify for cls in (a.cls, b.cls) if cls is not None and cls.to_unify), None)
    remedy = remedy or (
        "Make their static fields and the shapes of their leaves agree, define `widen(like)`, or apply "
        "`quaxlike.materialise` to both."
    )
    raise StructureError(
        f"{where} holds Values that cannot be unified: {a} on one side, {b} on the other. {remedy}\n"
        f"  at {user_source()[0]}"
    )


def widened(x: Any, like: Any) -> Any:
    """Converts `x` to the form of `like`, or to a form `like` can be widened to; else returns `x`.

    **Arguments:**

    - `x`, `like`: an array or a Value each. Only the statics and shapes of `like` are read.
    """
    if not is_value(like):
        return x
    out: Any = NotImplemented
    # We lift an array. We also lift a Value whose class occurs inside `like`, such as one that has dropped
    # its names in a loop.
    if not is_value(x) or (type(x) is not type(like) and type(x) in map(type, held(like))):
        out = type(like).promote(x, like)
    if out is NotImplemented and is_value(x):
        out = x.widen(like)
    if out is not NotImplemented:
        return out
    if type(x) is not type(like):
        return x
    parts = {f.name: (getattr(x, f.name), getattr(like, f.name)) for f in dataclasses.fields(x)}
    return replace_fields(
        x, **{name: widened_part(*pair) for name, pair in parts.items() if any(map(is_value, pair))}
    )


def widened_part(x: Any, like: Any) -> Any:
    """Like `widened`, but for a field: becomes dense if the other side is a plain array.

    This respects the policy. It is not needed if the plain array can be lifted instead.
    """
    x = widened(x, like)
    if not is_value(x) or is_value(like):
        return x
    # We only need to know whether it can be lifted, so nothing is computed here.
    lifted: list[bool] = []
    array = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda array: lifted.append(is_value(widened(array, x))), array)
    hint = "This part of a Value is a dense array in another branch, or before or after an iteration."
    return x if lifted[0] else dense(x, "a part of a Value", hint=hint)


def dense_when_incompatible(x: Any) -> Any:
    """Returns the result of `widen` for a Value without the other's form: dense, under the policy."""
    hint = "Its codes or pattern are laid out otherwise in another branch, or before or after an iteration."
    return dense(x, f"{type(x).__name__}.widen", hint=hint)


def dense_where_it_changes(a: LeafLayout, b: LeafLayout) -> LeafLayout:
    """Makes the parts of `a` dense if they differ in `b`; all of `a` if more than parts differ."""
    return _slot_of(lambda x: _dense_unlike(x, b.like), a)


def _dense_unlike(x: Value, like: Value) -> Any:
    if type(x) is not type(like):
        return materialised(x)
    parts = [f.name for f in dataclasses.fields(x) if is_value(getattr(x, f.name))]
    parts = [name for name in parts if is_value(getattr(like, name))]
    # Compare everything outside the parts that are Values: if this differs, making the parts dense would not
    # help.
    own, other = (replace_fields(v, **dict.fromkeys(parts)) for v in (x, like))
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jtu.tree_leaves(v)] for v in (own, other)]
    if jtu.tree_structure(own) != jtu.tree_structure(other) or shapes[0] != shapes[1]:
        return materialised(x)
    return replace_fields(x, **{name: _dense_unlike(getattr(x, name), getattr(like, name)) for name in parts})


def with_dense_parts(slot: LeafLayout) -> LeafLayout:
    """Returns the slot of a Value after the Values inside it are made dense; an array's slot is unchanged."""
    return slot if slot.treedef is None else _slot_of(lambda x: map_parts(materialised, x), slot)


def can_be_unified(x: Any, like: Any) -> bool:
    """Returns whether there is a form to which both can be converted."""
    slots: list[LeafLayout] = []
    jax.eval_shape(lambda *both: slots.extend(flatten(both)[1]), x, like)
    first, second = slots
    try:
        unify(first, second, "a part")
    except StructureError:
        return False
    return True


def _widened(slot: LeafLayout, like: LeafLayout) -> LeafLayout:
    """Like `widened`, but for slots. Memoised, because each level of nested Values asks for all below it."""
    # `widen` may compute, so its result depends on everything that dispatch depends on.
    context = resolver(active_layers.get()), policy_key(), compat.trace_context()
    return _widened_in(context, slot, like)


@functools.lru_cache(maxsize=4096)
def _widened_in(context: Hashable, slot: LeafLayout, like: LeafLayout) -> LeafLayout:
    return _slot_of(lambda x: widened(x, like.like), slot)


def _slot_of(change: Callable[[Any], Any], slot: LeafLayout) -> LeafLayout:
    """Returns the slot of `change(x)` for the content `x` of a slot."""

    def on_leaves(*leaves: Any) -> None:
        nonlocal out
        _, (out,) = flatten([change(slot.unflatten(leaves))])

    out = slot
    jax.eval_shape(on_leaves, *slot.avals)
    return out


def convert_to(x: Any, slot: LeafLayout, what: str) -> Any:
    """Converts `x` to the form of `slot`: lifts it, materialises it (under the policy), or casts it."""
    (found,) = flatten([x])[1]
    if found == slot:
        return x
    # The content may stand for a plain array. Convert that instead, since the placeholder's type was a guess.
    x = without_placeholder(x)
    (found,) = flatten([x])[1]
    if slot.treedef is None:
        reason = slot.reason or "the other side is a plain array. Define `promote(array, like)` to lift it."
        x = dense(x, what, hint=f"{type(x).__name__}: {reason}")
    elif not found.has_form_of(slot):
        x = dense_as(widened(x, slot.like), slot.like, what)
    leaves, (found,) = flatten([x])
    # A user's `widen` or `promote` may return something else. Without this check, leaves would be assigned to
    # the wrong places.
    if not found.has_structure_of(slot) or [a.shape for a in found.avals] != [a.shape for a in slot.avals]:
        raise StructureError(f"{what} expected {slot}, found {found}.")
    leaves = [
        leaf if have == want else _with_dtype_of(leaf, want)
        for leaf, have, want in zip(leaves, found.avals, slot.avals, strict=True)
    ]
    return slot.unflatten(leaves)


def dense_as(x: Any, like: Any, what: str) -> Any:
    """Makes parts of `x` dense if they are arrays in `like`, under the policy."""
    hint = f"This part of {type(x).__name__} is an array on the other side."
    return map_parts_as(like, functools.partial(dense, what=what, hint=hint), x)


def map_parts_as(like: Any, f: Callable[[Value], Any], x: Any) -> Any:
    """Applies `f` to the Values in `x` which are arrays in `like`."""
    if not is_value(x) or type(x) is not type(like):
        return x
    parts = {
        field.name: (getattr(x, field.name), getattr(like, field.name)) for field in dataclasses.fields(x)
    }

    def change(part: Any, other: Any) -> Any:
        return map_parts_as(other, f, part) if is_value(other) else f(part)

    return replace_fields(x, **{name: change(*both) for name, both in parts.items() if is_value(both[0])})


def _with_dtype_of(leaf: Any, aval: Any) -> Any:
    if getattr(jax.typeof(leaf), "weak_type", False) and not getattr(aval, "weak_type", False):
        return jax.lax.convert_element_type(leaf, aval.dtype)
    return jnp.asarray(leaf)
