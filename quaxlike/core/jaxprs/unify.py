"""Unifies the two sides of branches, loop carries and buffers containing Values.

Unification must never change the array represented by a Value. If possible, both sides are converted exactly
to a common form. Otherwise they are materialised (under the policy), and as a last resort we raise an error.
This decision only depends on slots, i.e. on statics and shapes but not on any data, so it's the same when
tracing as when running eagerly.
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
from ..statics import are_of_same_types
from ..values import Value, is_value, materialised, replace_fields
from .linearity import held, map_parts
from .slots import LeafLayout, flatten, strong


class OperandMismatch(TypeError):
    """An error for rules to raise if operands are incompatible, e.g. metres and seconds.

    Raised inside a loop, this leads to a retry with placeholders for any plain arrays in the loop's carry.
    The first iteration then determines their actual types. See `Value.promote`.

    **Arguments:**

    - `cls`: the Value type whose rule raises this.
    """

    def __init__(self, message: str, cls: type[Value] = Value) -> None:
        super().__init__(message)
        self.cls = cls


class StructureError(OperandMismatch):
    """Raised if there is no common form for the Values in several branches, or in a loop carry before and
    after an iteration."""


def without_placeholder(x: Any) -> Any:
    """Converts a placeholder (see core/plain_arrays.py) to a plain array.

    Anything else is returned unchanged.
    """
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
    # If one side is strong, drop weak types. JAX does the same for plain arrays.
    if a.strong() == b.strong():
        return _weak_where_both(a, b)
    if a.treedef is None and b.treedef is None:
        return a  # JAX raises its own error
    if a.treedef is not None and b.treedef is not None:
        # The type of a placeholder is just a guess, so it mustn't determine the form of an actual Value.
        # First try to only widen `b`: in a loop `a` is the current carry, and keeping its form saves tracing
        # the body again.
        a, b = without_guess(a), without_guess(b)
        if (as_a := _widened(b, a)).has_form_of(a):
            return _weak_where_both(a, as_a)
    # If there is a plain array, lift it first.
    orders = ((b, a), (a, b)) if b.treedef is None else ((a, b), (b, a))
    for first, second in orders:
        # Widen one side, then check that the other can be converted to the same form. `widen` isn't
        # necessarily symmetric, so try both orders.
        form = _widened(first, second)
        if form.treedef is None:
            return _weak_where_both(second.dense(), form)
        common = _widened(second, form)
        if common.has_form_of(form):
            return _weak_where_both(common, form)
    remedy = next((cls.to_unify for cls in (a.cls, b.cls) if cls is not None and cls.to_unify), None)
    sides = f"{a} on one side, {b} on the other"
    if None not in (a.cls, b.cls) and a.cls is not b.cls:  # they may print alike
        remedy, sides = None, f"{a.cls.__name__} {a} on one side, {b.cls.__name__} {b} on the other"
    elif a.treedef == b.treedef and not are_of_same_types(a.statics, b.statics):
        sides += " (with static fields that are equal but of different types, such as 1 and 1.0)"
    remedy = remedy or (
        "Make their static fields and the shapes of their leaves agree, define `widen(like)`, or apply "
        "`quaxlike.materialise` to both."
    )
    raise StructureError(
        f"{where} holds Values that cannot be unified: {sides}. {remedy}\n  at {user_source()[0]}"
    )


def _weak_where_both(slot: LeafLayout, other: LeafLayout) -> LeafLayout:
    """Drops the weak types of `slot` where the other one's are strong. (This is what JAX does.)"""
    pairs = zip(slot.avals, other.avals, strict=True)
    return slot.with_avals([a if getattr(b, "weak_type", False) else strong(a) for a, b in pairs])


def widened(x: Any, like: Any) -> Any:
    """Converts `x` to `like`'s form, or to one `like` can be widened to. If neither is possible, returns `x`
    unchanged.

    **Arguments:**

    - `x`, `like`: each can be an array or a Value. Only the statics and shapes of `like` are used.
    """
    if not is_value(like):
        return x
    out: Any = NotImplemented
    # Arrays have to be lifted. So does a Value of a class occurring inside `like`: e.g. it may have lost its
    # names in a loop.
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
    """As `widened`, but for a field. Materialises it if it's a plain array on the other side.

    Materialising is under the policy, and only happens if the plain array can't be lifted instead.
    """
    x = widened(x, like)
    if not is_value(x) or is_value(like):
        return x
    # Use `eval_shape`, just to find out whether it can be lifted.
    lifted: list[bool] = []
    array = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda array: lifted.append(is_value(widened(array, x))), array)
    hint = "This part of a Value is a dense array in another branch, or before or after an iteration."
    return x if lifted[0] else dense(x, "a part of a Value", hint=hint)


def dense_when_incompatible(x: Any) -> Any:
    """Returns the result of `widen` for a Value that can't be converted to the other one's form.

    This is the dense array, materialised under the policy.
    """
    hint = "Its codes or pattern are laid out otherwise in another branch, or before or after an iteration."
    return dense(x, f"{type(x).__name__}.widen", hint=hint)


def dense_where_it_changes(a: LeafLayout, b: LeafLayout) -> LeafLayout:
    """Materialises the parts of `a` that differ in `b`.

    If anything else differs, the whole `a` is materialised.
    """
    return _slot_of(lambda x: _dense_unlike(x, b.like), a)


def _dense_unlike(x: Value, like: Value) -> Any:
    if type(x) is not type(like):
        return materialised(x)
    parts = [f.name for f in dataclasses.fields(x) if is_value(getattr(x, f.name))]
    parts = [name for name in parts if is_value(getattr(like, name))]
    # Compare everything but the parts that are Values. If it differs, materialising the parts isn't enough.
    own, other = (replace_fields(v, **dict.fromkeys(parts)) for v in (x, like))
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jtu.tree_leaves(v)] for v in (own, other)]
    if jtu.tree_structure(own) != jtu.tree_structure(other) or shapes[0] != shapes[1]:
        return materialised(x)
    return replace_fields(x, **{name: _dense_unlike(getattr(x, name), getattr(like, name)) for name in parts})


def with_dense_parts(slot: LeafLayout) -> LeafLayout:
    """Returns the slot of a Value after materialising the Values inside it. Arrays are left unchanged."""
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
    """As `widened`, but for slots.

    Memoised: otherwise nested Values would be slow, every level repeating the calls for all levels below it.
    """
    # `widen` may bind primitives, so its result depends on everything dispatch depends on.
    context = resolver(active_layers.get()), policy_key(), compat.trace_context()
    return _widened_in(context, slot, like)


@functools.lru_cache(maxsize=4096)
def _widened_in(context: Hashable, slot: LeafLayout, like: LeafLayout) -> LeafLayout:
    return _slot_of(lambda x: widened(x, like.like), slot)


def _slot_of(change: Callable[[Any], Any], slot: LeafLayout) -> LeafLayout:
    """Returns the slot of `change(x)`, where `x` is the given slot's content."""

    def on_leaves(*leaves: Any) -> None:
        nonlocal out
        _, (out,) = flatten([change(slot.unflatten(leaves))])

    out = slot
    jax.eval_shape(on_leaves, *slot.avals)
    return out


def convert_to(x: Any, slot: LeafLayout, what: str) -> Any:
    """Converts `x` to the form of `slot`, by lifting it, materialising it (under the policy), or casting
    it."""
    (found,) = flatten([x])[1]
    if found == slot:
        return x
    # This may be a placeholder. Its type is just a guess, so convert the plain array instead.
    x = without_placeholder(x)
    (found,) = flatten([x])[1]
    if slot.treedef is None:
        reason = slot.reason or "the other side is a plain array. Define `promote(array, like)` to lift it."
        x = dense(x, what, hint=f"{type(x).__name__}: {reason}")
    elif not found.has_form_of(slot):
        x = dense_as(widened(x, slot.like), slot.like, what)
    leaves, (found,) = flatten([x])
    # Check what the user's `widen` or `promote` returned: in another form, leaves would be assigned to the
    # wrong positions.
    if not found.has_structure_of(slot) or [a.shape for a in found.avals] != [a.shape for a in slot.avals]:
        raise StructureError(f"{what} expected {slot}, found {found}.")
    leaves = [
        leaf if have == want else _with_dtype_of(leaf, want)
        for leaf, have, want in zip(leaves, found.avals, slot.avals, strict=True)
    ]
    return slot.unflatten(leaves)


def dense_as(x: Any, like: Any, what: str) -> Any:
    """Materialises (under the policy) the parts of `x` that are arrays in `like`."""
    hint = f"This part of {type(x).__name__} is an array on the other side."
    return map_parts_as(like, functools.partial(dense, what=what, hint=hint), x)


def map_parts_as(like: Any, f: Callable[[Value], Any], x: Any) -> Any:
    """Applies `f` to the Values in `x` that are arrays in `like`."""
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
