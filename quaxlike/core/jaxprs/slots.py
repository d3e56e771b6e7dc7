"""Values as flat arrays: the layout for operands and results of primitives carrying code.

A *slot* describes a single logical operand or result: a Value's treedef and leaf avals, or a plain array's
aval, without a treedef. Slots are hashable and don't contain any data, so they can be used as cache keys.

Two slots must only be equal if a compiled program can use either one's content in place of the other's. So
`LeafLayout.__eq__` is written by hand: treedefs compare statics by `==`, and can't be compared with None.
"""

import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from types import NotImplementedType
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .. import compat
from ..construction import leaves_of
from ..plain_arrays import either, hooks
from ..rules import RuleWarning
from ..shapes import as_shapes
from ..statics import are_of_same_types, statics_of
from ..values import (
    Value,
    aval_of,
    is_value,
    materialised,
    not_an_array,
    probing,
    refuses,
)
from .linearity import has_pattern, has_tangent, held, is_linear, memoised


@dataclasses.dataclass(frozen=True, eq=False)
class LeafLayout:
    treedef: Any  # the treedef of a Value, or None for a plain array
    avals: tuple[Any, ...]
    # For a plain array: the constant it's filled with, if known (see core/plain_arrays.py).
    constant: Any = None
    reason: str = ""  # why this is a plain array, for use in messages
    statics: tuple[Any, ...] = ()  # those of the treedef, to compare their types

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafLayout) or self.avals != other.avals:
            return False
        return self._has_constant(other.constant) and self.has_structure_of(other)

    def __hash__(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:  # a cached property would take longer than the hash
            known = self.__dict__["_hash"] = hash((self.treedef, self.avals))
        return known

    def __len__(self) -> int:
        return len(self.avals)

    @property
    def cls(self) -> Any:
        """The class of the Value in this slot, or None for a plain array."""
        return None if self.treedef is None else self.treedef.node_data()[0]

    @functools.cached_property
    def classes(self) -> tuple[Any, ...]:
        """The class of the Value in this slot, followed by the classes of any Values inside it."""
        return () if self.treedef is None else _classes(self.treedef)

    @functools.cached_property
    def like(self) -> Any:
        """The Value in this slot, with shapes in place of its leaves. For a plain array, this is its aval."""
        if self.treedef is None:
            return self.avals[0]
        return as_shapes(jtu.tree_unflatten(self.treedef, self.avals))

    @functools.cached_property
    def linear(self) -> bool:
        """Whether this slot contains a Value linear in its leaves."""
        return self.treedef is not None and is_linear(self.like)

    @functools.cached_property
    def aval(self) -> Any:
        """The aval of the logical array, rather than of its leaves."""
        return self.avals[0] if self.treedef is None else aval_of(self.like)

    def has_structure_of(self, other: "LeafLayout") -> bool:
        """Returns whether both are plain arrays, or both are Values with the same class and statics."""
        if self.treedef is None or other.treedef is None:  # because a treedef can't be compared with None
            return self.treedef is other.treedef
        return self.treedef == other.treedef and are_of_same_types(self.statics, other.statics)

    def has_form_of(self, other: "LeafLayout") -> bool:
        """As `has_structure_of`, but also requires the leaves to have the same shapes and dtypes."""
        form = [(a.shape, a.dtype) for a in self.avals]
        return self.has_structure_of(other) and form == [(a.shape, a.dtype) for a in other.avals]

    def admits(self, other: "LeafLayout") -> bool:
        """Returns whether the other slot's content can be used for this one without any conversion."""
        known = self._has_constant(either(self.constant, other.constant))
        return known and self.avals == other.avals and self.has_structure_of(other)

    def _has_constant(self, constant: Any) -> bool:
        return self.constant is constant or self.constant == constant

    def with_avals(self, avals: Iterable[Any]) -> "LeafLayout":
        return LeafLayout(self.treedef, tuple(avals), self.constant, statics=self.statics)

    def strong(self) -> "LeafLayout":
        """This slot, without any weak types."""
        return self.with_avals([strong(a) for a in self.avals])

    def dense(self, reason: str = "") -> "LeafLayout":
        """Returns the slot for the materialised array."""
        return self if self.treedef is None else LeafLayout(None, (self.aval,), reason=reason)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        if self.treedef is not None:
            return jtu.tree_unflatten(self.treedef, leaves)
        if hooks.placeholders and self.constant is not None:
            hooks.placeholders.note(leaves[0], self.constant)
        return leaves[0]

    def __str__(self) -> str:
        if self.treedef is None:
            return f"a plain array {self.avals[0].str_short()}"
        return eqx.tree_pformat(self.like, struct_as_array=True)


def has_cotangents(x: Any) -> bool:
    """Returns whether `x` is a Value with cotangents of the same type."""
    if not is_value(x) or not is_linear(x):
        return False
    leaves, (slot,) = flatten([x])
    if all(map(has_tangent, slot.avals)):
        return _gives_leaves_back(slot)
    # A pattern can't just be made up: e.g. indices have to be distinct and in bounds.
    if all(part.stores_elements or not _has_own_pattern(part) for part in (x, *held(x))):
        return True
    pattern = [None if has_tangent(a) else leaf for leaf, a in zip(leaves, slot.avals, strict=True)]
    if any(isinstance(leaf, jax.core.Tracer) for leaf in pattern):
        return refuses(x)
    return _gives_leaves_back.__wrapped__(slot, pattern)


def _has_own_pattern(value: Value) -> bool:
    """Returns whether a Value has a pattern itself, rather than the Values inside it."""
    leaves = jtu.tree_leaves(value, is_leaf=lambda x: x is not value and is_value(x))
    return not all(is_value(leaf) or has_tangent(jax.typeof(leaf)) for leaf in leaves)


def is_a_space(x: Any) -> bool:
    """Returns whether `x` is linear in its leaves, and stays valid with arbitrary numbers in them.
    (Mathematically, these values form a vector space.)"""
    return has_cotangents(x) and not has_pattern(x)


def is_read_by_its_leaf(slot: LeafLayout, what: str) -> bool:
    """Returns whether a Value's only leaf takes its place as a predicate in control flow.

    It does if the Value can't be materialised and the leaf has the same shape and dtype. (Types written for
    quax rely on this.)
    """
    # A leaf with a different shape or dtype can't be used in place of the array.
    form = [(a.shape, a.dtype) for a in slot.avals]
    if slot.treedef is None or form != [(slot.aval.shape, slot.aval.dtype)] or not refuses(slot.like):
        return False
    if slot.cls not in _warned:
        _warned.add(slot.cls)
        name = slot.cls.__name__
        warnings.warn(
            f"{name} decides about {what} and refuses to materialise, so its only "
            f"leaf is taken for it. Let the comparisons of {name} return arrays.",
            RuleWarning,
            stacklevel=2,
        )
    return True


_warned: weakref.WeakSet[type] = weakref.WeakSet()


@functools.lru_cache(maxsize=4096)
def _gives_leaves_back(slot: LeafLayout, pattern: Sequence[Any] | None = None) -> bool:
    """Returns whether `materialise`, followed by its transpose, is the identity on the leaves.

    If not, the leaves' cotangents aren't just elements of the dense cotangent. (For example, if each element
    of a leaf is repeated, its cotangent is a sum of several elements.) Assumed of types that can't be
    materialised.

    **Arguments:**

    - `pattern`: the leaves without tangents, and None in place of all others.
    """
    # When exporting, sizes may be symbolic. Any small ones will do.
    shapes = [[n if isinstance(n, int) else 3 + i for i, n in enumerate(a.shape)] for a in slot.avals]
    # These are exact in every dtype.
    numbers = [(np.arange(1, math.prod(shape) + 1) % 5 - 2).reshape(shape) for shape in shapes]
    constant = [None] * len(slot) if pattern is None else pattern
    free = [i for i, leaf in enumerate(constant) if leaf is None]

    def dense_of(own: Sequence[Any]) -> Any:
        given = dict(zip(free, own, strict=True))
        return materialised(slot.unflatten([given.get(i, leaf) for i, leaf in enumerate(constant)]))

    with probing():
        leaves = [jnp.asarray(numbers[i], slot.avals[i].dtype) for i in free]
        try:
            dense, transpose = jax.vjp(dense_of, leaves)
        except Exception:  # a type may refuse with any error
            return True
        return all(map(np.array_equal, leaves, transpose(dense)[0]))


@functools.lru_cache(maxsize=4096)
def live_leaves(slot: LeafLayout) -> tuple[bool, ...]:
    """Returns, for each leaf, whether the array can have a nonzero derivative with respect to it.

    If not, the leaf is frozen. Types that can't be materialised count as having no frozen leaves.
    """
    moving = [has_tangent(a) for a in slot.avals]

    def tangent(leaves: Sequence[Any], tangents: Sequence[Any]) -> Any:
        def dense(xs: Sequence[Any]) -> Any:
            x = iter(xs)
            return materialised(
                slot.unflatten([next(x) if has else y for has, y in zip(moving, leaves, strict=True)])
            )

        return jax.jvp(dense, ([x for x, has in zip(leaves, moving, strict=True) if has],), (tangents,))[1]

    if slot.treedef is None or not any(moving):
        return (True,) * len(slot)
    with jax.core.eval_context():
        try:
            tangents = [a.to_tangent_aval() for a, has in zip(slot.avals, moving, strict=True) if has]
            # Dead code elimination determines this exactly: it removes the unused tangents of frozen leaves.
            jaxpr = jax.make_jaxpr(tangent)(slot.avals, tangents)
            _, used = compat.dce(jaxpr, [True])
        except Exception:  # a type may refuse with any error
            return (True,) * len(slot)
    of_tangents = iter(used[len(slot) :])
    return tuple(not has or next(of_tangents) for has in moving)


def has_rows_in_leaves(slot: LeafLayout) -> bool:
    """Returns whether the rows of a Value without `leading_axis` are made up of the leaves' rows.

    Never if some static field has one entry per axis: it would be too long for a row.
    """
    ndim = len(slot.aval.shape)
    return (
        ndim > 0
        and slot.cls.leading_axis is Value.leading_axis
        and not any(_is_per_axis(static, ndim) for static in _statics(slot.like))
        and _is_cut_with_leaves(slot, 0, rows=True)
    )


def axes_of_rows(slot: LeafLayout) -> Sequence[int | None] | NotImplementedType:
    """Returns the axis along which to slice each leaf into rows. If the type doesn't specify this, inspects
    the leaves."""
    axes = slot.like.leading_axis()
    if axes is NotImplemented and has_rows_in_leaves(slot):
        return [0] * len(slot)
    return axes


def row_aval(aval: Any) -> Any:
    """Returns the aval for a single row of an array."""
    return jexc.mapped_aval(aval.shape[0], 0, aval)


def has_in_leaves(slot: LeafLayout, ndim: int) -> bool:
    """Returns whether the first `ndim` axes of the array are also the first axes of every leaf."""
    for _ in range(0 if slot.treedef is None else ndim):
        axes = axes_of_rows(slot)
        if axes is NotImplemented or any(axis != 0 for axis in axes):
            return False
        slot = slot.with_avals(map(row_aval, slot.avals))
    return True


@functools.lru_cache(maxsize=4096)
def _is_cut_with_leaves(slot: LeafLayout, axis: int, *, rows: bool = False) -> bool:
    """Returns whether slicing the leaves along an axis (into halves, or into rows) slices the Value.

    For this, each leaf must have the same shape as the array, whatever the array's size. In addition, the
    parts must materialise to the array's parts, which is checked numerically. For a type that can't be
    materialised, the shapes have to suffice.
    """
    shape = slot.aval.shape
    # A leaf with a different shape may still be sliceable, but only the type itself knows along which axis.
    if any(a.shape != shape for a in slot.avals):
        return False
    # Check this for small sizes of our own choosing. The actual arrays may be large, and the parts may only
    # agree at one particular size. A static number may be a length or a limit, so go beyond it as well.
    beyond = max([abs(x) for x in _static_numbers(slot.like) if abs(x) < np.inf], default=0)
    tried = [(0, 1.0), (min(int(beyond), _LONGEST_PROBE), 10.0 * (1 + beyond))] if beyond else [(0, 1.0)]
    return all(_is_cut_at(slot, axis, longer, scale, rows) for longer, scale in tried)


_LONGEST_PROBE = 4096


def _static_numbers(value: Value) -> list[Any]:
    """Returns the numbers in the static fields of a Value and of the Values inside it."""
    statics = [static for part in (value, *held(value)) for static in _statics(part)]
    return [x for static in statics for x in leaves_of(static) if type(x) in (int, float)]


def _is_cut_at(slot: LeafLayout, axis: int, longer: int, scale: float, rows: bool) -> bool:
    """Checks `_is_cut_with_leaves` for small arrays, `longer` than usual along `axis`, of numbers of about
    the size `scale`."""
    sizes = [2 + i for i in range(len(slot.aval.shape))]  # these are all different, to tell the axes apart
    sizes[axis] += longer
    half = [*sizes[:axis], *([] if rows else [sizes[axis]]), *sizes[axis + 1 :]]
    if not rows:
        sizes[axis] *= 2
    whole, part = (
        slot.with_avals(jax.core.ShapedArray(tuple(own), a.dtype) for a in slot.avals)
        for own in (sizes, half)
    )
    try:
        found = [(x.aval.shape, x.aval.dtype) for x in (whole, part)]
    except Exception:  # e.g. the type has a fixed shape
        return False
    if found != [(tuple(own), slot.aval.dtype) for own in (sizes, half)]:
        return False
    n = sizes[axis]
    chosen = sorted({*range(min(n, 4)), n // 2, n - 2, n - 1}) if rows else range(2)

    def cut(x: Any) -> list[Any]:
        if rows:
            return [jnp.take(x, i, axis) for i in chosen]
        return jnp.split(x, 2, axis)

    with probing():
        try:
            leaves = [_irregular(a.dtype, sizes, i, scale) for i, a in enumerate(slot.avals)]
            dense = materialised(whole.unflatten(leaves))
        except Exception:  # a type may refuse with any error, or fail at sizes other than its own
            return refuses(slot.like)
        try:
            parts = [materialised(part.unflatten(own)) for own in zip(*map(cut, leaves), strict=True)]
        except Exception:  # e.g. a static field names the axis that was cut
            return False
        pairs = list(zip(cut(dense), parts, strict=True))
        return all(np.shape(x) == np.shape(y) and np.allclose(x, y, rtol=1e-3) for x, y in pairs)


def _irregular(dtype: Any, shape: Sequence[int], seed: int, scale: float) -> Any:
    """Returns an array of irregular numbers. Otherwise incorrect parts may happen to equal the correct
    ones."""
    count = math.prod(shape)
    steps = np.arange(seed * count, (seed + 1) * count)
    if jnp.issubdtype(dtype, jnp.bool_):
        numbers = np.sin(steps * steps) > 0
    elif jnp.issubdtype(dtype, jnp.integer):
        numbers = steps * steps * 7 % 11
    else:
        numbers = scale * np.sin(steps)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            numbers = numbers + 1j * scale * np.cos(steps * steps)
    return jnp.asarray(numbers.reshape(shape), dtype)


def _statics(value: Value) -> list[Any]:
    return [getattr(value, f.name) for f in dataclasses.fields(value) if f.metadata.get("static")]


def _is_per_axis(static: Any, ndim: int) -> bool:
    return isinstance(static, tuple | list) and len(static) == ndim


def strong(aval: Any) -> Any:
    return aval.update(weak_type=False) if getattr(aval, "weak_type", False) else aval


def flatten(operands: Sequence[Any]) -> tuple[list[Any], tuple[LeafLayout, ...]]:
    """Returns a list with all operand leaves, and a slot for each operand."""
    leaves: list[Any] = []
    slots: list[LeafLayout] = []
    for x in operands:
        if is_value(x):
            parts, treedef = jtu.tree_flatten(x)
            slots.append(LeafLayout(treedef, _leaf_avals(x, parts), statics=statics_of(x)))
            leaves += parts
        else:
            slots.append(LeafLayout(None, (jax.typeof(x),)))
            leaves.append(x)
    return leaves, hooks.placeholders.marked(slots, operands) if hooks.placeholders else tuple(slots)


def _leaf_avals(value: Value, leaves: Sequence[Any]) -> tuple[Any, ...]:
    avals: list[Any] = []
    try:
        avals.extend(map(jax.typeof, leaves))
    except TypeError:  # of the leaf after the last one added
        raise not_an_array(value, leaves[len(avals)]) from None
    return tuple(avals)


@memoised
def _classes(treedef: Any) -> tuple[Any, ...]:
    # Any shape will do. (But not None: a Value with missing parts doesn't count as a Value.)
    leaf = jax.ShapeDtypeStruct((), np.float32)
    value = jtu.tree_unflatten(treedef, [leaf] * treedef.num_leaves)
    return tuple(map(type, (value, *held(value))))


def unflatten(slots: Sequence[LeafLayout], leaves: Sequence[Any]) -> list[Any]:
    out, at = [], 0
    for slot in slots:
        out.append(slot.unflatten(leaves[at : at + len(slot)]))
        at += len(slot)
    return out


def split(items: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    """Splits `items` into pieces of the given sizes, followed by the remainder."""
    out, at = [], 0
    for size in sizes:
        out.append(items[at : at + size])
        at += size
    return [*out, items[at:]]


def leading_axes(parts: Iterable[tuple[Any, bool]]) -> list[int | None] | NotImplementedType:
    """Computes `leading_axis` for a Value containing several `parts`.

    **Arguments:**

    - `parts`: each array or Value inside it, in the order of its leaves, and whether its first axis is the
        leading one. If not, it's shared by all rows.
    """
    axes: list[int | None] = []
    for part, has_rows in parts:
        if not has_rows:
            axes += [None] * len(jtu.tree_leaves(part))
        elif is_value(part):
            inner = axes_of_rows(flatten([part])[1][0])
            if inner is NotImplemented:
                return NotImplemented
            axes += inner
        else:
            axes.append(0)
    return axes


def part_specs(parts: Iterable[tuple[Any, jax.P]]) -> list[jax.P] | NotImplementedType:
    """Computes `shard_spec` for a Value containing several `parts`.

    **Arguments:**

    - `parts`: each array or Value inside it, in the order of its leaves, along with its spec.
    """
    specs: list[jax.P] = []
    for part, spec in parts:
        own = part.shard_spec(spec) if is_value(part) else [spec]
        if own is NotImplemented:
            return NotImplemented
        specs += own
    return specs


def spread(items: Sequence[Any], slots: Sequence[LeafLayout]) -> tuple[Any, ...]:
    """Takes one item per logical operand, and repeats it for each operand leaf."""
    return tuple(x for x, slot in zip(items, slots, strict=True) for _ in slot.avals)


def per_slot(slots: Sequence[LeafLayout], items: Sequence[Any]) -> list[Sequence[Any]]:
    """Takes one item per leaf, and groups these by logical operand."""
    return split(items, *map(len, slots))[:-1]


def leaf_specs(slot: LeafLayout, spec: jax.P) -> tuple[jax.P, ...]:
    """Derives a partition spec for each leaf from the logical array's spec."""
    if slot.treedef is None or len(slot) == 0:
        return (spec,) * len(slot)
    specs = slot.like.shard_spec(spec)
    if specs is not NotImplemented:
        specs = tuple(specs)
        if len(specs) != len(slot):
            raise ValueError(
                f"{slot.cls.__name__}.shard_spec({spec}) must return one spec for each of its "
                f"{len(slot)} array leaves; found {len(specs)}."
            )
        return specs
    # The type doesn't specify how to do this. It can only be done if slicing the leaves along these axes also
    # slices the array.
    sharded = [axis for axis, names in enumerate(spec) if names is not None]
    if not sharded:
        return tuple(spec if len(spec) <= a.ndim else jax.P() for a in slot.avals)
    if all(_is_cut_with_leaves(slot, axis) for axis in sharded):
        return (spec,) * len(slot)
    raise ValueError(
        f"Cannot tell how {spec}, a spec for the array of shape {slot.aval.shape} that a "
        f"{slot.cls.__name__} stands for, shards its leaves of shapes "
        f"{[a.shape for a in slot.avals]}. Define `{slot.cls.__name__}.shard_spec(spec)`."
    )
