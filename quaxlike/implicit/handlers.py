"""`implicit`, `register`, and the default handlers."""

import functools
import inspect
import operator
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.extend.core as jexc

from .._checked import checked
from ..core import rules as core_rules
from ..core.functions import type_hints
from ..core.policy import map_values
from ..core.quaxify import quaxify
from ..core.rules.annotations import annotation_of
from ..core.rules.registry import as_primitives, can_match
from ..core.values import is_value, materialise
from .array import bind, lent

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Fn = TypeVar("_Fn", bound=Callable[..., Any])


class _Implicit:
    """Computes with ImplicitArrays, by dispatching each primitive to its handlers.

    `implicit(fn)` is equivalent to [`quaxlike.quaxify`][] and can also be used as a decorator. In this case
    `fn` can use any JAX function. Inside `with implicit:`, you can only use the operators and methods of
    ImplicitArrays, and the functions in `quaxlike.numpy`.

    !!! example

        ```python
        import jax, jax.numpy as jnp
        from quaxlike.implicit import ImplicitArray, implicit

        class Negated(ImplicitArray, warn_on_materialize=False):
            array: jax.Array

            def materialize(self):
                return -self.array

        x = Negated(jnp.arange(3.0))
        assert (implicit(jnp.sum)(x) == -3.0).all()
        with implicit:
            assert ((x + 1.0) * 2.0).shape == (3,)
        ```
    """

    def __call__(self, fn: Callable[_P, _T]) -> Callable[_P, _T]:
        return quaxify(fn)

    # The operators of ImplicitArrays are already quaxified, so there is nothing left to do for `with
    # implicit:`.

    def __enter__(self) -> "_Implicit":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return "implicit"


implicit = use_implicit = _Implicit()


@checked
def register(
    primitive: jexc.Primitive | str | Sequence[jexc.Primitive | str],
    /,
    *,
    precedence: int = 0,
    rules: core_rules.RuleSet | None = None,
) -> Callable[[_Fn], _Fn]:
    """Registers a handler of a primitive for operands with the annotated types.

    This is just like [`quaxlike.register`][], except for the following differences.

    - A handler without any types would match everything. It is ignored, and a [`quaxlike.RuleWarning`][] is
        raised.
    - In a union with another type (`T | Any`), `Any` is interpreted as arrays.
    - A [`quaxlike.RuleWarning`][] is also raised if a handler can never match (because it accepts a parameter
        of the primitive by position), or if it replaces another handler for the same types.
    - The handler may be passed the primitive as its first argument even without the corresponding annotation.
        This happens if the first parameter is called `primitive` or `prim` and annotated with `Any` or not at
        all. It also happens if the first parameter has another name and no annotation, and there is one more
        parameter than operands.
    - A parameter annotated with a sequence (`Sequence[T | jax.Array]`) receives a list of all remaining
        operands.
    - A handler may set the `dtype` of any ImplicitArrays amongst its operands: these are copies.
    """

    primitives = as_primitives(primitive)
    registering = [core_rules.register(p, precedence=precedence, rules=rules) for p in primitives]

    def decorator(handler: _Fn) -> _Fn:
        parameters = inspect.signature(handler).parameters
        first = next(iter(parameters), "")
        hints = {k: _closed(v) for k, v in type_hints(handler).items() if k != "return"}
        if not any(map(_names_a_type, hints.values())):
            code = inspect.unwrap(handler).__code__
            message = (
                f"The handler {handler.__qualname__} for {primitive!r} names no type of array, so it would "
                "be called for all types, and is left out. Annotate a parameter with the type that it is "
                f"for; others may be `Any`. Found: {hints}."
            )
            warnings.warn_explicit(message, core_rules.RuleWarning, code.co_filename, code.co_firstlineno)
            return handler
        is_primitive = first in ("primitive", "prim") and hints.get(first, Any) is Any
        # Without an annotation, the first parameter could be either the primitive or an operand. So try both,
        # and pick whichever matches the number of operands.
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        readings: list[Callable[..., Any]] = []
        if is_primitive or (first and first not in hints and not variadic):
            readings.append(_annotated(handler, hints | {first: jexc.Primitive}))
        if not is_primitive:
            readings.append(_annotated(handler, hints))
        for p, registered in zip(primitives, registering, strict=True):
            for reading in [each for each in readings if can_match(p, each)] or readings[-1:]:
                registered(reading)
        return handler

    return decorator


def _closed(hint: Any) -> Any:
    """Replaces `Any` with arrays in a union with another type, including inside a sequence."""
    if (element := _element(hint)) is not None:
        closed = _closed(element)
        return hint if closed is element else Sequence[closed]
    members = typing.get_args(hint)
    if Any not in members or not _names_a_type(hint):
        return hint
    return functools.reduce(operator.or_, (jax.Array if member is Any else member for member in members))


def _annotated(handler: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., Any]:
    """Annotates a handler, using `Any` for any missing annotations.

    If a parameter is a sequence of operands then it is converted to `*args`. Any parameters after it become
    keyword-only.
    """
    signature = inspect.signature(handler)
    parameters = list(signature.parameters.values())
    at = next((i for i, p in enumerate(parameters) if _element(hints.get(p.name)) is not None), None)

    def annotated(*args: Any, **kwargs: Any) -> Any:
        with lent(args) as operands:
            return handler(*(operands if at is None else (*operands[:at], operands[at:])), **kwargs)

    functools.update_wrapper(annotated, handler)
    annotated.__annotations__ = {p.name: hints.get(p.name, Any) for p in parameters}
    annotated.may_never_match = True  # pyright: ignore[reportFunctionMemberAccess]
    if at is not None:
        name, last = parameters[at].name, inspect.Parameter.VAR_KEYWORD
        annotated.__annotations__[name] = _element(hints[name])
        after = [p for p in parameters[at + 1 :] if p.kind is not p.VAR_POSITIONAL]
        several = [
            *parameters[:at],
            parameters[at].replace(kind=inspect.Parameter.VAR_POSITIONAL),
            *(p if p.kind is last else p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in after),
        ]
        annotated.__signature__ = signature.replace(parameters=several)
    return annotated


def _names_a_type(hint: Any) -> bool:
    return _element(hint) is not None or annotation_of(hint).names_value


def _element(hint: Any) -> Any:
    """Returns the element type of a hint such as `Sequence[T | jax.Array]`, or None if it isn't a
    sequence.
    """
    origin = typing.get_origin(hint)
    elements = [x for x in typing.get_args(hint) if x is not ...]
    if not (isinstance(origin, type) and issubclass(origin, Sequence)) or not any(
        map(_names_a_type, elements)
    ):
        return None
    return functools.reduce(operator.or_, elements)


@checked
def default_handler(primitive: jexc.Primitive, *args: Any, **params: Any) -> Any:
    """Applies a primitive to plain arrays."""
    return bind(primitive, args, params)


@checked
def materialize_handler(primitive: jexc.Primitive, *vals: Any, params: dict[str, Any] | None = None) -> Any:
    """Materialises a primitive's operands and then applies the primitive.

    This works for ImplicitArrays, and for any other objects with a `materialize` method.
    """
    arrays = [x if is_value(x) or not hasattr(x, "materialize") else x.materialize() for x in vals]
    return bind(primitive, map_values(materialise, arrays), params or {})
