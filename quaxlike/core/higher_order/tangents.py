"""Converts tangents and cotangents of Values between leaves and the form used by users' functions.

The tangent of a linear Value is a Value with the same class and pattern. So is its cotangent, if each leaf
contains elements of the array. Any other Value is first made linear, by materialising its nonlinear parts,
and gets this conversion's tangent (or cotangent).

A pattern (indices, codes, keys) must never be added or scaled. So a derivative with another pattern is either
materialised, or an error. Otherwise elements would silently end up in the wrong positions.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

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
from ..jaxprs.slots import LeafLayout, flatten, has_cotangents, per_slot
from ..jaxprs.unify import StructureError, dense_as, map_parts_as, unify
from ..policy import dense, materialised
from ..values import Value, aval_of, is_value, probing

WHAT = "a custom derivative"
_PLAIN = "It is the derivative of a plain array."
_OTHER = "It is the derivative of a Value of another type or pattern."


def made_linear(x: Any, what: str, hint: str) -> Any:
    """Materialises the nonlinear parts of `x`, under the policy."""
    return linear_part(x, functools.partial(dense, what=what, hint=hint)) if is_value(x) else x


def made_to_take_cotangents(x: Any, what: str, hint: str) -> Any:
    """Materialises parts of `x` such as a number that stands for all elements, if `x` can then hold a
    cotangent.
    """
    if not is_value(x) or has_cotangents(x) or not x.linear:
        return x

    def dense_part(part: Value) -> Any:
        part = made_to_take_cotangents(part, what, hint)
        return part if not is_value(part) or has_cotangents(part) else dense(part, what, hint=hint)

    inside = map_parts(dense_part, x)
    return inside if has_cotangents(inside) else x


def is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero | ad.Zero) or getattr(tangent, "dtype", None) == jax.dtypes.float0


def instantiate(tangent: Any, aval: Any) -> Any:
    return jnp.zeros(aval.shape, aval.dtype) if is_zero(tangent) else tangent


# Tangents


def tangents_in(slots: Sequence[LeafLayout], primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    pairs = zip(per_slot(slots, primals), per_slot(slots, tangents), strict=True)
    return [_tangent_in(slot, p, t) for slot, (p, t) in zip(slots, pairs, strict=True)]


def _tangent_in(slot: LeafLayout, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    if slot.treedef is None:
        return tangents[0]
    if all(map(is_zero, tangents)):
        tangent = slot.aval.to_tangent_aval()
        # The user requested symbolic zeros: their rule couldn't recognise a Value full of zeros.
        if any(isinstance(t, SymbolicZero) for t in tangents):
            return SymbolicZero(tangent)
        if slot.avals or tangent.dtype == jax.dtypes.float0:
            return zeros(tangent)
        # A constant, e.g. a `Zero`, doesn't have any leaves to store a tangent.
        return jtu.tree_map(jnp.zeros_like, _with_leaves(slot.unflatten(primals)))
    if slot.linear and _has_transpose(slot):
        triples = zip(primals, tangents, slot.avals, strict=True)
        # The tangent has the same pattern as the primal, i.e. the same indices or codes.
        return slot.unflatten([instantiate(t, a) if has_tangent(a) else p for p, t, a in triples])
    inexact = [has_tangent(a) for a in slot.avals]
    nonzero = [instantiate(t, a) for t, a, has in zip(tangents, slot.avals, inexact, strict=True) if has]
    # The user's rule is called with the converted Value, so its tangent is the conversion's.
    to_linear = materialised if slot.linear else _linear_part
    y, tangent = jax.jvp(*_on_inexact(to_linear, slot, primals, inexact), nonzero)
    return jtu.tree_map(lambda p, t: t if has_tangent(jax.typeof(p)) else p, y, tangent)


@functools.lru_cache(maxsize=4096)
def _has_transpose(slot: LeafLayout) -> bool:
    """Returns whether JAX can transpose `materialise`.

    JAX can differentiate e.g. a scatter, but not transpose it. Materialising a tangent by it would leave the
    tangent without a gradient.
    """

    def transposed(leaves: Sequence[Any], ct: Any) -> Any:
        fun, moving = _on_inexact(materialised, slot, leaves, list(map(has_tangent, slot.avals)))
        return jax.linear_transpose(fun, *moving)(ct)

    with probing():
        try:
            jax.eval_shape(transposed, *jtu.tree_map(_shape, (list(slot.avals), slot.aval)))
        except NotImplementedError:
            return refuses(slot.like)  # unless the error is the type's own
        except Exception:  # a type may refuse with any error
            return True
    return True


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _with_leaves(constant: Value) -> Any:
    """Materialises a Value without leaves, or the Values inside it."""
    return map_parts(_with_leaves, constant) if held(constant) else materialised(constant)


def zeros(aval: Any) -> Any:
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)


def _linear_part(x: Value) -> Any:
    return linear_part(x, materialised)


def _on_inexact(
    f: Callable[[Value], Any], slot: LeafLayout, leaves: Sequence[Any], inexact: Sequence[bool]
) -> tuple[Callable[..., Any], list[Any]]:
    """`f` as a function on the leaves with tangents, followed by these leaves."""

    def fun(*moving: Any) -> Any:
        leaf = iter(moving)
        return f(slot.unflatten([next(leaf) if has else x for x, has in zip(leaves, inexact, strict=True)]))

    return fun, [x for x, has in zip(leaves, inexact, strict=True) if has]


def is_forwarded(
    slot: LeafLayout, tangent: Any, forwarded: dict[int, tuple[LeafLayout, Sequence[Any]]]
) -> bool:
    """Returns whether a result's tangent is simply an operand's tangent, as in an identity function.

    A branch may have widened the operand to the result's form.
    """
    # Compare by identity: another operand's tangent may have equal values.
    if slot.treedef is None or id(tangent) not in forwarded:
        return False
    operand = forwarded[id(tangent)][0]
    try:
        return operand == slot or (operand.avals == slot.avals and unify(operand, slot, WHAT) == slot)
    except StructureError:
        return False


def has_tangent_of_its_form(x: Any, tangent: Any) -> bool:
    """Returns whether `tangent`, promoted if it is a plain array, is a tangent for the Value `x`."""
    if not is_value(x):
        return False
    # Symbolic zeros are valid tangents for any kind of Value.
    return is_zero(tangent) or (is_linear(x) and is_derivative(_lifted(tangent, x), x))


def _lifted(tangent: Any, x: Value) -> Any:
    like = flatten([x])[1][0].like
    return dense_as(tangent, like, WHAT) if is_value(tangent) else type(x).promote(tangent, like)


def tangent_out(slot: LeafLayout, primals: Sequence[Any], tangent: Any) -> list[Any]:
    if slot.treedef is None:
        return [dense(tangent, "custom_jvp", hint=_PLAIN)]
    if is_zero(tangent):
        return [
            SymbolicZero(a.to_tangent_aval()) if has_tangent(a) else zeros(a.to_tangent_aval())
            for a in slot.avals
        ]
    x = slot.unflatten(primals)
    tangent = _lifted(tangent, x)
    if not is_derivative(tangent, x):
        name = slot.cls.__name__
        raise StructureError(
            f"The jvp rule of a custom_jvp function returns {name}, whose tangent is not of the "
            f"same type and pattern. Return one of that type as the tangent, or define `{name}.promote`."
        )
    leaves, _ = flatten([tangent])
    return [
        x if has_tangent(a) else zeros(a.to_tangent_aval()) for x, a in zip(leaves, slot.avals, strict=True)
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
            for cls in types if not is_zero(ct) else ():
                ct = cls.cotangent(ct)
            out.append(ct)
        elif symbolic_zeros and all(map(is_zero, group)):
            out.append(SymbolicZero(slot.aval.to_tangent_aval()))
        else:
            leaves = [
                instantiate(ct, a) if x is None else x
                for ct, a, x in zip(group, slot.avals, rest, strict=True)
            ]
            out.append(as_cotangent(slot.unflatten(leaves)))
    return out


def _pulled_back(slot: LeafLayout, primals: Sequence[Any], inexact: Sequence[bool], ct: Any) -> Sequence[Any]:
    """Returns the leaves' cotangents, given a cotangent of another form than the Value's."""
    ct = made_linear(ct, "custom_vjp", _OTHER)

    def alike(x: Value) -> Any:
        return map_parts_as(ct, materialised, _linear_part(x))

    fun, at = _on_inexact(alike, slot, primals, inexact)
    y, pull_back = jax.vjp(fun, *at)
    ct = dense_as(ct, y, "custom_vjp")
    # Only under these conditions are the leaves of `ct` the cotangents of the leaves of `y`.
    if is_value(y) and has_cotangents(ct) and is_derivative(ct, y):
        leaves = (
            x if has_tangent(jax.typeof(x)) else zeros(jax.typeof(x).to_ct_aval()) for x in flatten([ct])[0]
        )
        return pull_back(jtu.tree_unflatten(jtu.tree_structure(y), leaves))
    fun, at = _on_inexact(materialised, slot, primals, inexact)
    y, pull_back = jax.vjp(fun, *at)
    ct = materialised(ct) if _has_leaf_of_its_shape(ct) else dense(ct, "custom_vjp", hint=_OTHER)
    return pull_back(jnp.asarray(ct, y.dtype))


def _has_leaf_of_its_shape(ct: Any) -> bool:
    """Returns whether materialising `ct` preserves everything relevant to a cotangent.

    For example, it does for an array with names or a unit, which don't matter here.
    """
    return is_value(ct) and [leaf.shape for leaf in jtu.tree_leaves(ct)] == [aval_of(ct).shape]


def _dense_cotangent(ct: Any) -> Any:
    """Converts a cotangent to an array.

    For a Value that can't be materialised, uses its only leaf instead.
    """
    ct = made_linear(ct, "custom_vjp", _PLAIN)
    by_its_leaf = _has_leaf_of_its_shape(ct) and refuses(ct)
    return jtu.tree_leaves(ct)[0] if by_its_leaf else materialised(ct)


def _leaves_of_cotangent(slot: LeafLayout, primals: Sequence[Any], ct: Any) -> Sequence[Any] | None:
    """Returns the leaf cotangents for a Value that can't be materialised.

    If the cotangent has the same class, these are its leaves, even if its static fields differ. (For example,
    a product has another unit.) Otherwise tries the dense cotangent. None if neither fits the Value's leaves.
    """
    # For a type that can be materialised, pulling back through `materialise` is always correct.
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
            # Materialising a linear Value returns its dense cotangent.
            out.append(_dense_cotangent(ct))
            continue
        primals = [next(kept) for _ in slot.avals]
        inexact = [has_tangent(a) for a in slot.avals]
        if is_zero(ct):
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
