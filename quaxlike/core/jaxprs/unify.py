"""Making one side look like the other: branches, loop carries and buffers that hold Values."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ..known_constants import has_placeholders
from ..policy import dense
from ..values import Value, is_value, materialise, replace_fields
from .linearity import map_parts
from .slots import Slot, flatten


class OperandMismatch(TypeError):
    """Operands that do not fit each other, such as metres and seconds; for rules to raise.

    Where it is raised inside a loop, the plain arrays among the loop's carry may be placeholders of which
    an iteration makes Values: see `Value.promote`.

    **Arguments:**

    - `cls`: the type of Values whose rule raises it.
    """

    def __init__(self, message: str, cls: type[Value] = Value) -> None:
        super().__init__(message)
        self.cls = cls


class StructureError(OperandMismatch):
    """Branches, or a loop carry before and after an iteration, hold Values that cannot be unified."""


def placeholder(slot: Slot, cls: type[Value]) -> Slot:
    """A loose slot as one of `cls` of which nothing is known yet; another slot as it is."""
    if not slot.loose:
        return slot
    (aval,) = slot.avals
    value = cls.promote(jax.ShapeDtypeStruct(aval.shape, aval.dtype), None)
    return slot if value is NotImplemented else Slot(jtu.tree_structure(value), slot.avals)


def settled(slot: Slot) -> Slot:
    """The plain slot that a placeholder stands for; another slot as it is."""
    if len(slot.avals) != 1 or slot.treedef is None or not has_placeholders(slot.cls):
        return slot
    plain = Slot(None, slot.avals, loose=1)
    return plain if placeholder(plain, slot.cls) == slot else slot


def without_placeholder(x: Any) -> Any:
    """The array of a placeholder; anything else as it is."""
    (slot,) = flatten([x])[1]
    return x if settled(slot) is slot else settled(slot).unflatten(jtu.tree_leaves(x))


def unify(a: Slot, b: Slot, where: str) -> Slot:
    """The slot that both sides can be brought to with `conform`."""
    if a.treedef is None and b.treedef is None and a.loose != b.loose:
        known = min(a.loose, b.loose)
        a, b = Slot(None, a.avals, known), Slot(None, b.avals, known)
    if a == b:
        return a
    if a.strong() == b.strong():
        return a.strong()
    if a.treedef is None and b.treedef is None:
        return a  # left to JAX, which has a message for it
    if a.treedef is not None and b.treedef is not None:
        a, b = settled(a), settled(b)
        if _widened(b, a).has_form_of(a):
            return a.strong()
    orders = ((b, a), (a, b)) if b.treedef is None else ((a, b), (b, a))  # a plain array first, to be lifted
    for first, second in orders:
        form = _widened(first, second)
        if form.treedef is None:
            return second.dense().strong()
        common = _widened(second, form)
        if common.has_form_of(form):
            return common.strong()
    raise StructureError(
        f"{where} holds Values that cannot be unified: {a} on one side, {b} on the other. Make their "
        "static fields and the shapes of their leaves agree, define `widen(like)`, or apply "
        "`quaxlike.materialise` to both."
    )


def widened(x: Any, like: Any) -> Any:
    """`x` in a form that `like` has or can be brought to; as it is if it has no such form.

    **Arguments:**

    - `x`, `like`: an array or a Value each. Of `like` only statics and shapes are read.
    """
    if not is_value(like):
        return x
    out = x.widen(like) if is_value(x) else type(like).promote(x, like)
    if out is not NotImplemented:
        return out
    if type(x) is not type(like):
        return x
    parts = {f.name: (getattr(x, f.name), getattr(like, f.name)) for f in dataclasses.fields(x)}
    return replace_fields(
        x, **{name: widened_part(*pair) for name, pair in parts.items() if any(map(is_value, pair))}
    )


def widened_part(x: Any, like: Any) -> Any:
    """The same for a part of a Value: dense (under the policy) beside an array that is not lifted."""
    x = widened(x, like)
    if not is_value(x) or is_value(like):
        return x
    lifted: list[bool] = []
    array = jax.ShapeDtypeStruct(like.shape, like.dtype)
    jax.eval_shape(lambda array: lifted.append(is_value(widened(array, x))), array)
    hint = "A part of a Value meets a dense array, in another branch or before or after an iteration."
    return x if lifted[0] else dense(x, "a part of a Value", hint=hint)


def dense_apart(x: Any) -> Any:
    """What `widen` gives for a Value that cannot have the form of the other: dense, under the policy."""
    hint = "Its codes or pattern are laid out otherwise in another branch, or before or after an iteration."
    return dense(x, f"{type(x).__name__}.widen", hint=hint)


def dense_where_it_changes(a: Slot, b: Slot) -> Slot:
    """`a` with those parts dense that have another form in `b`; all of it, if it is not only parts."""
    return _slot_of(lambda x: _dense_unlike(x, b.like), a)


def _dense_unlike(x: Value, like: Value) -> Any:
    if type(x) is not type(like):
        return materialise(x)
    parts = [f.name for f in dataclasses.fields(x) if is_value(getattr(x, f.name))]
    parts = [name for name in parts if is_value(getattr(like, name))]
    own, other = (replace_fields(v, **dict.fromkeys(parts)) for v in (x, like))
    shapes = [[(leaf.shape, leaf.dtype) for leaf in jtu.tree_leaves(v)] for v in (own, other)]
    if jtu.tree_structure(own) != jtu.tree_structure(other) or shapes[0] != shapes[1]:
        return materialise(x)
    return replace_fields(x, **{name: _dense_unlike(getattr(x, name), getattr(like, name)) for name in parts})


def with_dense_parts(slot: Slot) -> Slot:
    """The slot of a Value with arrays for the Values that it holds; that of an array as it is."""
    return slot if slot.treedef is None else _slot_of(lambda x: map_parts(materialise, x), slot)


def can_be_unified(x: Any, like: Any) -> bool:
    """Whether there is a form that both can be brought to."""
    slots: list[Slot] = []
    jax.eval_shape(lambda *both: slots.extend(flatten(both)[1]), x, like)
    first, second = slots
    try:
        unify(first, second, "a part")
    except StructureError:
        return False
    return True


def _widened(slot: Slot, like: Slot) -> Slot:
    """The slot of `widened`."""
    return _slot_of(lambda x: widened(x, like.like), slot)


def _slot_of(change: Callable[[Any], Any], slot: Slot) -> Slot:
    """The slot of what a function returns for what is in a slot."""

    def on_leaves(*leaves: Any) -> None:
        nonlocal out
        _, (out,) = flatten([change(slot.unflatten(leaves))])

    out = slot
    jax.eval_shape(on_leaves, *slot.avals)
    return out


def conform(x: Any, slot: Slot, what: str) -> Any:
    """`x` brought to the form of `slot`: lifted, materialised (under the policy), or given its dtypes."""
    (found,) = flatten([x])[1]
    if found == slot:
        return x
    x = without_placeholder(x)
    (found,) = flatten([x])[1]
    if slot.treedef is None:
        other = "the other side is a plain array that it does not lift; `promote(array, like)` can."
        x = dense(x, what, hint=f"{type(x).__name__}: {other}")
    elif not found.has_form_of(slot):
        x = dense_as(widened(x, slot.like), slot.like, what)
    leaves, (found,) = flatten([x])
    if not found.has_structure_of(slot) or [a.shape for a in found.avals] != [a.shape for a in slot.avals]:
        raise StructureError(f"{what} expected {slot}, found {found}.")
    leaves = [
        leaf if have == want else _with_dtype_of(leaf, want)
        for leaf, have, want in zip(leaves, found.avals, slot.avals, strict=True)
    ]
    return slot.unflatten(leaves)


def dense_as(x: Any, like: Any, what: str) -> Any:
    """`x` with those parts dense, under the policy, that are arrays in `like`."""
    hint = f"This part of a {type(x).__name__} is an array on the other side."
    return map_parts_as(like, functools.partial(dense, what=what, hint=hint), x)


def map_parts_as(like: Any, f: Callable[[Value], Any], x: Any) -> Any:
    """`x` with the results of `f` for those Values in it that are arrays in `like`."""
    if not is_value(x) or type(x) is not type(like):
        return x
    parts = {
        field.name: (getattr(x, field.name), getattr(like, field.name)) for field in dataclasses.fields(x)
    }
    change = lambda p, q: map_parts_as(q, f, p) if is_value(q) else f(p)
    return replace_fields(x, **{name: change(*both) for name, both in parts.items() if is_value(both[0])})


def _with_dtype_of(leaf: Any, aval: Any) -> Any:
    if getattr(jax.typeof(leaf), "weak_type", False) and not getattr(aval, "weak_type", False):
        return jax.lax.convert_element_type(leaf, aval.dtype)
    return jnp.asarray(leaf)
