"""Array operators, methods and functions for Values, both inside and outside `quaxify`.

Outside `quaxify`, an operator opens a new level for itself. Inside, it must use the running level: a new one
would treat the running one's Values as plain arrays, and skip their rules.
"""

import functools
import importlib
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu

from . import placement
from .levels import level_of
from .quaxify import quaxify
from .trace import check_complete, stage
from .values import Value, is_value

_P = ParamSpec("_P")
_T = TypeVar("_T")


def run(fn: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `fn(value, ...)` at the level dispatching on `value`, or at a new level."""
    check_complete(value)
    level = level_of(value)
    # Don't open a new level here: it would treat the Values of the running one as arrays.
    if level is not None and level.holds(value):
        return fn(level.enter_late(value), *args, **kwargs)
    if level is not None and any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
        # The arrays of `value` belong to a transform. Other tracers inside this transform may represent
        # Values, but only the level outside it knows.
        return fn(stage(value), *args, **kwargs)
    return quaxify(fn)(value, *args, **kwargs)


def anywhere(fn: Callable[_P, _T]) -> Callable[_P, _T]:
    """Wraps a jax.numpy function to accept Values, both inside and outside `quaxify`.

    Uses the running level dispatching on the Values, if any, so they can be combined with its other Values.
    """
    quaxified = quaxify(fn)

    @functools.wraps(fn)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if level_of() is None:
            return quaxified(*args, **kwargs)
        leaves, structure = jtu.tree_flatten((args, kwargs), is_leaf=is_value)
        # No running level dispatches on one of them.
        if any(is_value(x) and level_of(x) is None for x in leaves):
            return quaxified(*args, **kwargs)
        operands = [level_of(x).adopt(x) if is_value(x) else x for x in leaves]
        args, kwargs = jtu.tree_unflatten(structure, operands)
        return fn(*args, **kwargs)

    return call


def _unary(fn: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        return run(fn, self, *args)

    return method


def _binary(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return run(fn, self, other) if is_operand(other) else NotImplemented

    return method


def _reflected(fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def swapped(x: Any, y: Any) -> Any:
        return fn(y, x)

    return _binary(swapped)


def is_operand(x: Any) -> bool:
    return is_value(x) or eqx.is_array_like(x)


def _method(name: str) -> Callable[..., Any]:
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(call, self, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"As [jax.Array.{name}](https://docs.jax.dev/en/latest/jax.numpy.html)."
    return method


def _nbytes(value: Any) -> int:
    """Returns the leaves' total size in bytes. (Not the dense array's size.)"""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))


def _dlpack(x: Any, **options: Any) -> Any:
    return x.__dlpack__(**options)


def _to_device(x: Any, device: Any, *, stream: Any) -> Any:
    return x.to_device(device, stream=stream)


def _attribute(name: str) -> property:
    return property(lambda self: run(operator.attrgetter(name), self))


class ArrayOperators:
    """The operators, methods and indexing of `jax.Array`, all implemented with [`quaxlike.quaxify`][].

    A mixin for array types. It must come *before* [`quaxlike.ArrayValue`][] in the bases, so that `==` is
    elementwise. As for a `jax.Array`, values then can't be hashed.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql

        class Doubled(ql.ArrayOperators, ql.ArrayValue):
            array: jax.Array

            def materialise(self):
                return 2 * self.array

        x = Doubled(jnp.arange(3.0))
        y = jnp.ones(3) @ x + x.sum() - x[1]
        ```
    """

    # Makes NumPy arrays defer to us in `array + value`.
    __array_priority__ = 100

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__eq__ is Value.__eq__:
            raise TypeError(
                f"{cls.__name__} must name ArrayOperators before ArrayValue among its bases: "
                f"`class {cls.__name__}(ArrayOperators, ArrayValue)`."
            )

    __add__ = _binary(operator.add)
    __radd__ = _reflected(operator.add)
    __sub__ = _binary(operator.sub)
    __rsub__ = _reflected(operator.sub)
    __mul__ = _binary(operator.mul)
    __rmul__ = _reflected(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__ = _binary(operator.mod)
    __rmod__ = _reflected(operator.mod)
    __divmod__ = _binary(divmod)
    __rdivmod__ = _reflected(divmod)
    __pow__ = _binary(operator.pow)
    __rpow__ = _reflected(operator.pow)
    __matmul__ = _binary(operator.matmul)
    __rmatmul__ = _reflected(operator.matmul)
    __and__ = _binary(operator.and_)
    __rand__ = _reflected(operator.and_)
    __or__ = _binary(operator.or_)
    __ror__ = _reflected(operator.or_)
    __xor__ = _binary(operator.xor)
    __rxor__ = _reflected(operator.xor)
    __lshift__ = _binary(operator.lshift)
    __rlshift__ = _reflected(operator.lshift)
    __rshift__ = _binary(operator.rshift)
    __rrshift__ = _reflected(operator.rshift)

    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __lt__ = _binary(operator.lt)
    __le__ = _binary(operator.le)
    __gt__ = _binary(operator.gt)
    __ge__ = _binary(operator.ge)
    # Otherwise type checkers complain that None is incompatible with the `__hash__` of the other base.
    if TYPE_CHECKING:

        def __hash__(self) -> int: ...
    else:
        __hash__ = None

    __neg__ = _unary(operator.neg)
    __pos__ = _unary(operator.pos)
    __abs__ = _unary(operator.abs)
    __invert__ = _unary(operator.invert)
    __round__ = _unary(round)

    # Python requires concrete values for these, so they materialise (under the policy).
    __bool__ = _unary(bool)
    __int__ = _unary(int)
    __float__ = _unary(float)
    __complex__ = _unary(complex)
    __index__ = _unary(operator.index)
    __array__ = _method("__array__")

    def __format__(self, spec: str) -> str:
        # Without a specification, like `str(self)`: the elements may not be needed.
        return run(format, self, spec) if spec else str(self)

    item = _method("item")
    tolist = _method("tolist")

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return run(_dlpack, self, **options)

    def __dlpack_device__(self) -> Any:
        return placement.dlpack_device(self)  # pyright: ignore[reportArgumentType]

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Returns `quaxlike.numpy`, for the array API standard. Its functions accept Values."""
        # Raises an error for unknown versions.
        jnp.zeros(()).__array_namespace__(api_version=api_version)
        return importlib.import_module("quaxlike.numpy")  # imported here, as it depends on the core

    __getitem__ = _unary(operator.getitem)
    __contains__ = _unary(operator.contains)

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be changed in place, like a jax.Array. "
            "Write `x = x.at[index].set(y)` in place of `x[index] = y`."
        )

    def __len__(self) -> int:
        shape = self.shape  # pyright: ignore[reportAttributeAccessIssue]
        if not shape:
            raise TypeError(f"{type(self).__name__} of shape () has no len().")
        return shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def to_device(self, device: Any, *, stream: Any = None) -> Any:
        """As `jax.Array.to_device`.

        Moves to a device, or applies a sharding to the logical array.
        """
        return run(_to_device, self, device, stream=stream)

    def block_until_ready(self) -> Any:
        """As `jax.Array.block_until_ready`, for all leaves."""
        return jax.block_until_ready(self)

    @property
    def at(self) -> "_At":
        """As `jax.Array.at`, i.e. `x.at[index].set(y)` and so on."""
        return _At(self)

    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(_nbytes)
    T = _attribute("T")
    mT = _attribute("mT")
    real = _attribute("real")
    imag = _attribute("imag")

    all = _method("all")
    any = _method("any")
    argmax = _method("argmax")
    argmin = _method("argmin")
    argpartition = _method("argpartition")
    argsort = _method("argsort")
    astype = _method("astype")
    choose = _method("choose")
    clip = _method("clip")
    compress = _method("compress")
    conj = _method("conj")
    conjugate = _method("conjugate")
    copy = _method("copy")
    cumprod = _method("cumprod")
    cumsum = _method("cumsum")
    diagonal = _method("diagonal")
    dot = _method("dot")
    flatten = _method("flatten")
    max = _method("max")
    mean = _method("mean")
    min = _method("min")
    nonzero = _method("nonzero")
    prod = _method("prod")
    ptp = _method("ptp")
    ravel = _method("ravel")
    repeat = _method("repeat")
    reshape = _method("reshape")
    round = _method("round")
    searchsorted = _method("searchsorted")
    sort = _method("sort")
    squeeze = _method("squeeze")
    std = _method("std")
    sum = _method("sum")
    swapaxes = _method("swapaxes")
    take = _method("take")
    trace = _method("trace")
    transpose = _method("transpose")
    var = _method("var")
    view = _method("view")


class _At:
    """Either `value.at`, or `value.at[index]`."""

    __slots__ = ("_index", "_value")

    def __init__(self, value: Any, *index: Any) -> None:
        self._value = value
        self._index = index  # this is `()` or `(index,)`

    def __getitem__(self, index: Any) -> "_At":
        return _At(self._value, index)

    def __repr__(self) -> str:
        return f"{self._value!r}.at" + "".join(f"[{i!r}]" for i in self._index)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or not self._index:
            raise AttributeError(f"Index first: `x.at[index].{name}(...)`.")

        def call(x: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(x.at[index], name)(*args, **kwargs)

        return lambda *args, **kwargs: run(call, self._value, *self._index, *args, **kwargs)
