"""Dtypes and shapes in annotations, such as jaxtyping's `Float[Array, "n m"]`.

Dispatch orders rules by `implies`, and decides by `excludes` whether two rules can coexist. Both return False
when in doubt: an incorrect True would silently select the wrong rule.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import AbstractDtype, Shaped


class Axis(NamedTuple):
    """An axis of an annotated shape; of any size by default."""

    size: int | None = None
    same_as: int | None = None  # axes with the same number have the same size
    or_one: bool = False

    def implies(self, other: "Axis") -> bool:
        """Returns whether `other` allows every size allowed here. Ignores sizes shared between several
        axes."""
        return other == Axis() or self == other or (other.or_one and self._replace(or_one=True) == other)


@dataclasses.dataclass(frozen=True)
class ArrayKind:
    """The dtypes and shapes of an annotation such as `Float[Array, "n m"]`.

    Kinds are compared by which axes share a name, and not by the names: `"n n"` and `"m m"` are equal.
    """

    dtypes: Any = None
    """The dtypes of a jaxtyping class, as strings and patterns; None for any dtype."""
    first: tuple[Axis, ...] = ()
    last: tuple[Axis, ...] | None = None
    """The axes after `...` or `*name`; None if the annotation doesn't have either."""
    names: tuple[tuple[str, int], ...] = dataclasses.field(default=(), compare=False)
    """The named axes, for comparing them with the axes of other operands (see `shared_axes`)."""

    @staticmethod
    def of(hint: Any) -> "ArrayKind":
        axes: list[Axis] = []
        more: int | None = None
        words = [_read(word) for word in hint.dim_str.split()]
        names = [name for _, name, _ in words if name]
        for variadic, name, or_one in words:
            if variadic:
                more = len(axes)
            elif name.isdecimal():
                axes.append(Axis(size=int(name), or_one=or_one))
            elif name.isidentifier() and names.count(name) > 1:
                axes.append(Axis(same_as=names.index(name), or_one=or_one))
            else:  # this includes an expression in the axes of other operands
                axes.append(Axis())
        last = None if more is None else tuple(axes[more:])
        each = [(name, or_one) for variadic, name, or_one in words if not variadic]
        named = [
            # Count the axes after `...` from the end.
            (name, i if more is None or i < more else i - len(axes))
            for i, (name, or_one) in enumerate(each)
            if name.isidentifier() and not or_one
        ]
        return ArrayKind(hint.dtypes, tuple(axes[:more]), last, tuple(named))

    def takes(self, aval: Any) -> bool:
        shape = getattr(aval, "shape", None)
        if shape is None or not _is_of_dtype(aval.dtype, self.dtypes):
            return False
        axes = self._axes(len(shape))
        if axes is None:
            return False
        sizes: dict[int, Any] = {}
        for axis, size in zip(axes, shape, strict=True):
            if axis is None or (axis.or_one and size == 1):
                continue
            if axis.size not in (None, size):
                return False
            if axis.same_as is not None and sizes.setdefault(axis.same_as, size) != size:
                return False
        return True

    def _axes(self, ndim: int) -> list[Axis | None] | None:
        """Returns the constraint on each axis if there are `ndim` axes, or None if `ndim` doesn't fit."""
        last = self.last or ()
        more = ndim - len(self.first) - len(last)
        return None if more < 0 or (more and self.last is None) else [*self.first, *[None] * more, *last]

    def implies(self, other: "ArrayKind") -> bool:
        """Returns whether every array of this kind is also an `other`. False if in doubt."""
        if not _dtypes(self.dtypes) <= _dtypes(other.dtypes):
            return False
        if (self.first, self.last) == (other.first, other.last):
            return True
        # We accept any number of axes whereas `other` doesn't, so some of our arrays are not of its kind.
        if self.last is not None and other.last is None:
            return False
        theirs = other._axes(len(self.first) + len(self.last or ()))
        if theirs is None or (self.last is not None and not {*theirs} <= {None, Axis()}):
            return False
        same: dict[int, set[Axis]] = {}
        for x, y in zip((*self.first, *(self.last or ())), theirs, strict=True):
            if y is not None and y.same_as is not None:
                same.setdefault(y.same_as, set()).add(x)
            elif y is not None and not x.implies(y):
                return False
        # `other` requires several axes to have equal sizes: only guaranteed if ours have the same fixed size
        # or the same name.
        known = [all(axis != Axis() and not axis.or_one for axis in axes) for axes in same.values()]
        return all(known) and all(len(axes) == 1 for axes in same.values())

    def excludes(self, other: "ArrayKind") -> bool:
        """Returns whether no array is of both kinds. False if in doubt."""
        if _dtypes(self.dtypes).isdisjoint(_dtypes(other.dtypes)):
            return True
        for x, y in ((self, other), (other, self)):
            if x.last is None:
                own, others = x.first, y._axes(len(x.first))
                # Different fixed sizes exclude each other. (Named sizes may always turn out to be equal.)
                return others is None or any(
                    b is not None
                    and None not in (a.size, b.size)
                    and a.size != b.size
                    and not (a.or_one or b.or_one)
                    for a, b in zip(own, others, strict=True)
                )
        return False


def shared_axes(kinds: Sequence["ArrayKind | None"]) -> frozenset[frozenset[tuple[int, int]]]:
    """Returns the sets of axes that have the same name in several operands, and so the same size.

    An axis is given by the index of the operand, and its own.
    """
    groups: dict[str, set[tuple[int, int]]] = {}
    for i, kind in enumerate(kinds):
        for name, axis in () if kind is None else kind.names:
            groups.setdefault(name, set()).add((i, axis))
    return frozenset(frozenset(group) for group in groups.values() if len({i for i, _ in group}) > 1)


def _read(word: str) -> tuple[bool, str, bool]:
    """Parses one axis of a jaxtyping shape. Returns whether it is variadic, its name or size, and whether it
    may also be 1."""
    if word == "...":
        return True, "", False
    rest = word.lstrip("#*_?")
    marks = word[: len(word) - len(rest)]
    before, is_equal, after = rest.partition("=")
    if is_equal and before.isidentifier() and "=" not in after:
        rest = after
    return "*" in marks, "" if "_" in marks else rest, "#" in marks


ANY_ARRAY = ArrayKind.of(cast(Any, Shaped)[jax.Array, "..."])


@functools.lru_cache(maxsize=4096)
def _is_of_dtype(dtype: Any, wanted: Any) -> bool:
    if wanted is None:
        return True
    checker: Any = type("Wanted", (AbstractDtype,), {"dtypes": wanted})
    return isinstance(jax.ShapeDtypeStruct((), dtype), checker[jax.ShapeDtypeStruct, ""])


@functools.lru_cache(maxsize=1024)
def _dtypes(wanted: Any) -> frozenset[Any]:
    """Returns the JAX dtypes for a jaxtyping class."""
    return frozenset(dtype for dtype in _all_dtypes() if _is_of_dtype(dtype, wanted))


@functools.cache
def _all_dtypes() -> list[Any]:
    scalars = [x for x in vars(jnp).values() if isinstance(x, type(jnp.float32))]
    return [*dict.fromkeys(map(np.dtype, scalars)), jax.eval_shape(lambda: jax.random.key(0)).dtype]
