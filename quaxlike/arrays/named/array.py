"""`NamedArray`: an array with named axes.

Names are counted from the last axis, and so remain correct if a transform adds or removes a leading axis. (A
plain tuple with one name for every axis would be wrong under any `vmap`.)
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import wadler_lindig as wl
from jaxtyping import ArrayLike

from ..._checked import checked
from ...core.jaxprs.unify import OperandMismatch, widened_part
from ...core.operators import ArrayOperators, run
from ...core.quaxify import quaxify
from ...core.values import ArrayValue, is_value, replace_fields
from .. import precedence
from ..annotated import AnnotatedArray

Name = str | None


class AxisError(OperandMismatch):
    """Raised if axis names don't match, or if an array has no axis with a given name."""

    @checked
    def __init__(self, message: str) -> None:
        super().__init__(message, NamedArray)


# Any array can have named axes, with or without a unit, so this type has the highest precedence.


class NamedArray(AnnotatedArray):
    """An array with named axes.

    Operators broadcast by name: `x + y` has `x`'s axes, followed by any further axes of `y`. Reductions
    accept names. Under [`quaxlike.quaxify`][] names are propagated by any code: transposing permutes them,
    reducing removes them, and new axes are unnamed. Products can only contract axes with the same name, and
    arrays can only be added if they have the same names in the same order. An unnamed axis (None) matches any
    name. Primitives without a rule, such as decompositions, are applied to the array without its names.

    **Arguments:**

    - `array`: any array or `ArrayValue`.
    - `names`: a name (or None) for each axis. Names are counted from the last axis: if a transform
        (`jax.vmap`, `jax.lax.scan`) adds a leading axis then this is unnamed, and removing one also removes
        its name.

    **Raises:** [`quaxlike.arrays.named.AxisError`][], with the names on both sides.

    !!! example

        ```python
        import jax.numpy as jnp
        from quaxlike.arrays.named import NamedArray

        x = NamedArray(jnp.ones((2, 3)), ("batch", "feature"))
        w = NamedArray(jnp.ones((3, 4)), ("feature", "hidden"))
        y = x.contract(w, "feature") - x.mean("feature")
        y.names  # ("batch", "hidden")
        ```
    """

    _names: tuple[Name, ...] = eqx.field(static=True)

    default_precedence = precedence.NAMED

    @checked
    def __init__(self, array: ArrayLike | ArrayValue, names: Sequence[Name]) -> None:
        self.array = array if is_value(array) else jnp.asarray(array)
        self._names = tuple(names)
        if len(self._names) != self.array.ndim:
            raise AxisError(f"An array of shape {self.array.shape} takes as many names; found {self._names}.")

    @property
    def names(self) -> tuple[Name, ...]:
        """Each axis's name, or None."""
        missing = self.array.ndim - len(self._names)
        return (None,) * missing + self._names[max(-missing, 0) :]

    def widen(self, like: Any) -> Any:
        """Removes the name of an axis that was sliced away, but still occurs in the static field."""
        if not isinstance(like, NamedArray) or like.names != self.names:
            return NotImplemented
        return replace_fields(self, array=widened_part(self.array, like.array), _names=self.names)

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        try:
            sizes = zip(self.names, self.array.shape, strict=True)
            axes = ", ".join(f"{name or '_'}={size}" for name, size in sizes)
            return wl.TextDoc(f"NamedArray({self.dtype.name}[{axes}])")
        except (AttributeError, IndexError, TypeError, ValueError):
            # The field may not be an array, e.g. after partitioning a model, or in a tree of specs.
            return wl.bracketed(
                begin=wl.TextDoc("NamedArray("),
                docs=wl.named_objs([("array", self.array), ("names", self._names)], **kwargs),
                sep=wl.comma,
                end=wl.TextDoc(")"),
                indent=kwargs.get("indent", 2),
            )

    # By name

    def axis(self, name: str) -> int:
        """Returns the index of the axis with this name."""
        found = [i for i, n in enumerate(self.names) if n == name]
        if len(found) != 1:
            problem = "several axes" if found else "no axis"
            raise AxisError(f"An array with axes {self.names} has {problem} called {name!r}.")
        return found[0]

    def rename(self, names: dict[str, Name]) -> "NamedArray":
        """Renames some axes, as in `x.rename({"time": "step"})`."""
        # This raises an error for unknown names.
        for name in names:
            self.axis(name)
        return NamedArray(self.array, [names.get(n, n) if n else n for n in self.names])

    def ordered(self, *names: str) -> Any:
        """Transposes the axes to this order."""
        if len(names) != self.ndim:
            raise AxisError(f"An order of the axes {self.names} names each of them; found {names}.")
        return self.transpose([self.axis(name) for name in names])

    def isel(self, **indices: Any) -> Any:
        """Indexes axes by name, as in `x.isel(time=0, batch=slice(2))`."""
        index: list[Any] = [slice(None)] * self.ndim
        for name, i in indices.items():
            index[self.axis(name)] = i
        return self[tuple(index)]

    def contract(self, other: Any, *names: str) -> Any:
        """Multiplies by another named array, and sums over the axes with these names.

        Any other shared axes are paired. These come first in the result, followed by the remaining axes of
        this array, and then of the other one.
        """
        contract = (tuple(map(self.axis, names)), tuple(map(other.axis, names)))
        shared = [n for n in self.names if n and n in other.names and n not in names]
        batch = (tuple(map(self.axis, shared)), tuple(map(other.axis, shared)))
        return run(jax.lax.dot_general, self, other, (contract, batch))


def _by_name(method: str) -> Any:
    positional = getattr(ArrayOperators, method)

    def operator(self: NamedArray, other: Any) -> Any:
        if isinstance(other, NamedArray):
            return positional(*align(self, other))
        return positional(self, other)

    return operator


for _name in "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge".split():  # noqa: SIM905
    setattr(NamedArray, f"__{_name}__", _by_name(f"__{_name}__"))


def _reduction(name: str) -> Any:
    positional = getattr(ArrayOperators, name)

    def method(self: NamedArray, axis: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(axis, str):
            axis = self.axis(axis)
        elif isinstance(axis, list | tuple):
            axis = tuple(self.axis(a) if isinstance(a, str) else a for a in axis)
        return positional(self, axis, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As `jax.Array.{name}`; `axis` may be a name, or several of them."
    return method


_REDUCTIONS = "all any argmax argmin argsort cumprod cumsum max mean min prod ptp sort squeeze std sum var"
for _name in _REDUCTIONS.split():
    setattr(NamedArray, _name, _reduction(_name))


def align(x: NamedArray, y: NamedArray) -> tuple[Any, Any]:
    """Transposes and expands two named arrays to have the same axes in the same order.

    These are `x`'s axes, followed by any further axes of `y`. Missing axes are added with size 1. If any
    axis is unnamed then both arrays are returned unchanged.
    """
    if None in (*x.names, *y.names):
        return x, y
    names = (*x.names, *(n for n in y.names if n not in x.names))
    return _spread(x, names), _spread(y, names)


def _spread(x: NamedArray, names: Sequence[Name]) -> Any:
    if tuple(names) == x.names:
        return x
    present = [n for n in names if n in x.names]
    array = quaxify(jnp.transpose)(x.array, [x.axis(str(n)) for n in present])
    absent = [i for i, n in enumerate(names) if n not in x.names]
    return NamedArray(quaxify(jnp.expand_dims)(array, absent), names)
