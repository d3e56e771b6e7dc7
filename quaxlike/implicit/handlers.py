"""`implicit`, `register`, and fallbacks for handlers."""

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
from ..core.policy import map_values
from ..core.quaxify import quaxify
from ..core.rules.annotations import annotation_of
from ..core.rules.registry import as_primitives, can_match, type_hints
from ..core.values import is_value, materialise
from .array import bind, lent

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Fn = TypeVar("_Fn", bound=Callable[..., Any])


class _Implicit:
    """Computes with ImplicitArrays: a primitive that meets one is dispatched to its handler.

    `implicit(fn)`, also as a decorator, is [`quaxlike.quaxify`][]: `fn` may use all of JAX. Inside
    `with implicit:`, the operators and methods of ImplicitArrays and the functions of `quaxlike.numpy`
    dispatch.

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

    # Operators of ImplicitArrays quaxify themselves, so a block has nothing to set up.

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
    """Registers a handler of a primitive for operands of the annotated types.

    Like [`quaxlike.register`][], with these differences. A handler that names no type would be called for
    all types: it is left out, with a [`quaxlike.RuleWarning`][]. In a union that names one (`T | Any`), `Any`
    stands for arrays. One that can never match, since it takes a parameter of the primitive by position, is a
    [`quaxlike.RuleWarning`][], and so is a second one for the same types, which replaces the first.

    The primitive is passed to a handler without an annotation that asks for it: if its first parameter is
    called `primitive` or `prim`, and its annotation is `Any` or absent; or if a first parameter of another
    name has no annotation, and each of the others gets an operand. A parameter that is annotated with a
    sequence of types (`Sequence[T | jax.Array]`) gets all operands from its position on, in a list. While a
    handler runs, it may set the `dtype` of an ImplicitArray that it is given, which is a copy.
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
        # The number of operands tells an operand from the primitive, unless the handler takes any number.
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
    """A union that names a type beside `Any`, with arrays for the latter; the same of the elements of a
    sequence."""
    if (element := _element(hint)) is not None:
        closed = _closed(element)
        return hint if closed is element else Sequence[closed]
    members = typing.get_args(hint)
    if Any not in members or not _names_a_type(hint):
        return hint
    return functools.reduce(operator.or_, (jax.Array if member is Any else member for member in members))


def _annotated(handler: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., Any]:
    """`handler` with these annotations, and `Any` for parameters without one. A parameter for a sequence of
    operands takes them by position; what follows it comes by keyword."""
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
    """The type of the elements if a hint describes a sequence of arrays that names a type, such as
    `Sequence[T | jax.Array]`; else None."""
    origin = typing.get_origin(hint)
    elements = [x for x in typing.get_args(hint) if x is not ...]
    if not (isinstance(origin, type) and issubclass(origin, Sequence)) or not any(
        map(_names_a_type, elements)
    ):
        return None
    return functools.reduce(operator.or_, elements)


@checked
def default_handler(primitive: jexc.Primitive, *args: Any, **params: Any) -> Any:
    """Applies the primitive to plain arrays."""
    return bind(primitive, args, params)


@checked
def materialize_handler(primitive: jexc.Primitive, *vals: Any, params: dict[str, Any] | None = None) -> Any:
    """Applies the primitive after materialising every ImplicitArray, and any other object with a method
    `materialize`, among its operands."""
    arrays = [x if is_value(x) or not hasattr(x, "materialize") else x.materialize() for x in vals]
    return bind(primitive, map_values(materialise, arrays), params or {})
