"""Array operators, methods and attributes, on types without `ArrayOperators`.

A Value has them all if a level of `quaxify` dispatches on it; so do Values nested inside a rule's operands.
Elsewhere it doesn't have them: `hasattr` returns False, and using one raises an error saying what to write
instead.

`==` never compares Values as pytrees. Equinox does so by default, but this would silently return a single
bool where the user probably meant an elementwise comparison.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import placement
from .levels import has_operators, name_the_mixin, not_dispatched
from .operators import ArrayOperators, anywhere, is_operand
from .trace import ValueTracer
from .values import ArrayValue, Value, on_new_type

# How operators are written in messages: the binary ones (which Python may also look up on the right operand),
# comparisons, and everything else. Not `__index__`: JAX treats anything defining it as a static index.
_SYMBOLS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "divmod": "divmod"},
    **{"pow": "**", "matmul": "@", "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"},
}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_PYTHON = {
    **{"neg": "-", "pos": "+", "invert": "~", "abs": "abs", "round": "round", "bool": "bool", "int": "int"},
    **{"float": "float", "complex": "complex", "getitem": "[...]", "setitem": "[...] =", "len": "len"},
    **{"contains": "in", "dlpack": "__dlpack__", "dlpack_device": "__dlpack_device__"},
    **{"array_namespace": "__array_namespace__"},
}
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


class MissingOperator(TypeError, AttributeError):
    """Raised if Python looks up an operator this Value doesn't have.

    Users expect a `TypeError`. It is also an `AttributeError`, so that `hasattr` returns False.
    """


def _remedy(value: Value, what: str) -> str:
    message = not_dispatched(value, f"`{what}`")
    if isinstance(value, ArrayValue) and not isinstance(value, ArrayOperators):
        message += name_the_mixin(value)
    if what in ("==", "!="):
        message += " To compare Values as pytrees, use `equinox.tree_equal`."
    return message


stand_ins: dict[str, Any] = {}  # array operators and methods, by name


def _hidden(cls: Any, name: str) -> Any:
    """Returns the member defined by a mixin after `ArrayValue`, or `None`.

    Our stand-in comes before it, and is found by `super()`, so it calls the mixin's.
    """
    return cls._hidden_by_stand_ins.get(name)


# Operators with two operands ----------------------------------------------------------------------


def _binary(symbol: str, own: str, others: str | None, member: Callable[..., Any]) -> Callable[..., Any]:
    """Defines the binary operator `own`.

    If it declines, Python goes on to try `others` on the other operand.
    """

    def method(self: Any, other: Any) -> Any:
        if (hidden := _hidden(type(self), own)) is not None:
            return hidden(self, other)
        if own == "__ne__" and type(self).__eq__ is not stand_ins["__eq__"]:
            return object.__ne__(self, other)  # the opposite of the type's own `==`
        if has_operators(self) or not is_operand(other):
            return member(self, other)
        if others is not None and _may_know(self, other, others):
            return NotImplemented
        raise TypeError(_remedy(self, symbol))

    method.__name__ = method.__qualname__ = own
    return method


def _may_know(value: Value, other: Any, name: str) -> bool:
    """Returns whether the other operand has an operator `name` that may handle this Value."""
    if isinstance(other, Value):
        return getattr(type(other), name, None) is not stand_ins[name]
    if isinstance(other, bool | int | float | complex):
        return False
    if isinstance(other, jax.Array | np.ndarray | np.generic):
        cls: Any = type(value)
        return any(
            getattr(cls, hook, None) is not getattr(ArrayValue, hook)
            for hook in ("__jax_array__", "__array__")
        )
    return True


# All else -----------------------------------------------------------------------------------------


class _StandIn:
    """An attribute, method or unary operator.

    Not a data descriptor, so a type can have a field with the same name. For the same reason, accessing it on
    the class raises an error: `dataclasses` would interpret anything else as the field's default.
    """

    def __init__(self, name: str, what: str, error: type[Exception], member: Any) -> None:
        self.name, self.what, self.error, self.member = name, what, error, member

    def __get__(self, value: Any, cls: Any) -> Any:
        if (hidden := _hidden(cls, self.name)) is not None:
            return hidden.__get__(value, cls)
        if value is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {self.name!r}")
        if not has_operators(value):
            raise self.error(_remedy(value, self.what))
        return self.member.__get__(value, cls)


def _iterate(self: Any) -> Any:
    # Not a `_StandIn`: Python would replace an error from looking it up by "not iterable".
    if (hidden := _hidden(type(self), "__iter__")) is not None:
        return hidden(self)
    if not has_operators(self):
        raise TypeError(_remedy(self, "iter"))
    return ArrayOperators.__iter__(self)


def _format(self: Any, spec: str) -> str:
    if (hidden := _hidden(type(self), "__format__")) is not None:
        return hidden(self, spec)
    # Python formats every object without a specification, so messages can show any Value.
    if spec and not has_operators(self):
        raise TypeError(_remedy(self, f"format(..., {spec!r})"))
    return ArrayOperators.__format__(self, spec)


def _format_tracer(self: ValueTracer, spec: str) -> str:
    value = self.quax_value
    if not spec:
        return str(self)
    if type(value).__format__ not in (ArrayOperators.__format__, _format):  # the type's own, e.g. with units
        return format(value, spec)
    return format(self._concrete("format"), spec)  # pyright: ignore[reportPrivateUsage]


class _OfLeaves:
    """An attribute computed from the leaves of any Value. Like `_StandIn`, not a data descriptor."""

    def __init__(self, name: str, read: Callable[[Any], Any]) -> None:
        self.name, self.read = name, read

    def __get__(self, value: Any, cls: Any) -> Any:
        if value is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {self.name!r}")
        return self.read(value)


def _has_no_shards(value: Any) -> Any:
    raise AttributeError(
        f"{type(value).__name__!r} object has no attribute 'addressable_shards': its leaves have shards, of "
        "shapes of their own. Ask each: `[leaf.addressable_shards for leaf in jax.tree.leaves(value)]`."
    )


_OF_LEAVES: dict[str, Callable[[Any], Any]] = {
    "device": placement.device,
    "devices": lambda value: functools.partial(placement.devices, value),
    "sharding": placement.sharding,
    "addressable_shards": _has_no_shards,
}

_NUMPY_HIDES_ERRORS = {f.__name__: anywhere(f) for f in (jnp.array_equal, jnp.array_equiv)}


def _array_function(self: Any, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Called by NumPy for each of its functions. Most then use the dense array returned by
    `__array__`.

    Two NumPy functions would swallow an error from `__array__` and return False, so their `jax.numpy`
    counterparts are called instead.
    """
    # Usually there's just our own type.
    if len(types) > 1 and not all(issubclass(cls, Value | ValueTracer | np.ndarray) for cls in types):
        return NotImplemented
    if (compare := _NUMPY_HIDES_ERRORS.get(function.__name__)) is None:
        return function._implementation(*args, **kwargs)
    for x in (*args, *kwargs.values()):
        if isinstance(x, Value) and not has_operators(x) and not isinstance(x, ArrayOperators):
            raise TypeError(_remedy(x, f"numpy.{function.__name__}"))
    return bool(compare(*args, **kwargs))


def _prefer_mixins(cls: Any) -> None:
    """Gives mixins after `ArrayValue` precedence over our stand-ins, which would hide them."""
    mixins = [base for base in cls.__mro__[cls.__mro__.index(Value) :] if base not in Value.__mro__]
    if not mixins:
        return
    hidden = {
        name: vars(base)[name] for base in reversed(mixins) for name in vars(base).keys() & stand_ins.keys()
    }
    cls._hidden_by_stand_ins = hidden
    for name, member in hidden.items():
        if next(vars(b)[name] for b in cls.__mro__ if name in vars(b)) is stand_ins[name]:
            setattr(cls, name, member)


def _let_numpy_defer(cls: Any) -> None:
    """Makes NumPy arrays defer to us in `array * value`, unless the type says how it becomes one."""
    bases = cls.__mro__
    if ArrayValue in bases and ArrayOperators not in bases:
        converts = cls.__array__ is not ArrayValue.__array__
        cls.__array_priority__ = 0 if converts else ArrayOperators.__array_priority__


def _install() -> None:
    for name, member in vars(ArrayOperators).items():
        if not name.startswith("_"):
            stand_ins[name] = _StandIn(name, f"jax.Array.{name}", AttributeError, member)
        elif (base := name.strip("_")) in _COMPARISONS:
            stand_ins[name] = _binary(_COMPARISONS[base], name, f"__{_SWAPPED[base]}__", member)
        elif base in _SYMBOLS:
            stand_ins[name] = _binary(_SYMBOLS[base], name, f"__r{base}__", member)
        elif base.startswith("r") and base[1:] in _SYMBOLS:
            stand_ins[name] = _binary(_SYMBOLS[base[1:]], name, None, member)
        elif base in _PYTHON:
            stand_ins[name] = _StandIn(name, _PYTHON[base], MissingOperator, member)
    stand_ins.update(__iter__=_iterate, __format__=_format)
    for name, stand_in in stand_ins.items():
        setattr(Value if name in ("__eq__", "__ne__", "__bool__") else ArrayValue, name, stand_in)
    stand_ins["__hash__"] = Value.__hash__  # belongs to `==`
    for name, read in _OF_LEAVES.items():
        setattr(ArrayValue, name, _OfLeaves(name, read))
        # `Tracer` also defines these names, and always raises an error.
        setattr(ValueTracer, name, property(operator.attrgetter(f"quax_value.{name}")))
    of_numpy: tuple[Any, ...] = (ArrayValue, ValueTracer)
    for cls in of_numpy:
        cls.__array_function__ = _array_function
    ValueTracer.__format__ = _format_tracer
    base_of_all: Any = Value
    base_of_all._hidden_by_stand_ins = {}
    on_new_type.append(_prefer_mixins)
    on_new_type.append(_let_numpy_defer)


_install()
