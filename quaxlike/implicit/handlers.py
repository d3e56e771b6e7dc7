"""`implicit`, `register`, and fallbacks for handlers."""

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax.extend.core as jexc

from .._checked import checked
from ..core import rules as core_rules
from ..core.policy import map_values
from ..core.quaxify import quaxify
from ..core.rules.registry import type_hints
from ..core.values import Value, is_value, materialise
from .array import bind

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

    Like [`quaxlike.register`][], with these differences. A handler that names no type is refused, since it
    would be called for all types. One that can never match, since it takes a parameter of the primitive by
    position, is a [`quaxlike.RuleWarning`][]. The primitive is passed to a handler without an annotation that
    asks for it: if its first parameter is called `primitive` or `prim`, and its annotation is `Any` or
    absent; or if a first parameter of another name has no annotation, and each of the others gets an operand.
    And a parameter that is annotated with a sequence of types (`Sequence[T | jax.Array]`) gets all operands
    from its position on, in a list.

    **Raises:**

    `TypeError` for a handler without a parameter that is annotated with a type of array.
    """

    registering = core_rules.register(primitive, precedence=precedence, rules=rules)

    def decorator(handler: _Fn) -> _Fn:
        parameters = inspect.signature(handler).parameters
        first = next(iter(parameters), "")
        hints = {k: v for k, v in type_hints(handler).items() if k != "return"}
        if not any(map(_names_a_type, hints.values())):
            raise TypeError(
                f"The handler {handler.__qualname__} for {primitive!r} names no type of array, so it would "
                "be called for all types. Annotate a parameter with the type that it is for; `Any` stands "
                f"for anything, also in a union. Found: {hints}."
            )
        is_primitive = first in ("primitive", "prim") and hints.get(first, Any) is Any
        # The number of operands tells an operand from the primitive, unless the handler takes any number.
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        if is_primitive or (first and first not in hints and not variadic):
            registering(_annotated(handler, hints | {first: jexc.Primitive}))
        if not is_primitive:
            registering(_annotated(handler, hints))
        return handler

    return decorator


def _annotated(handler: Callable[..., Any], hints: dict[str, Any]) -> Callable[..., Any]:
    """`handler` with these annotations, and `Any` for parameters without one. A parameter for a sequence of
    operands takes them by position; what follows it comes by keyword."""
    signature = inspect.signature(handler)
    parameters = list(signature.parameters.values())
    at = next((i for i, p in enumerate(parameters) if _element(hints.get(p.name)) is not None), None)

    def annotated(*args: Any, **kwargs: Any) -> Any:
        return handler(*(args if at is None else (*args[:at], list(args[at:]))), **kwargs)

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
    element = _element(hint)
    members = typing.get_args(hint) or (hint,)
    if Any in members:
        return False
    return element is not None or any(isinstance(h, type) and issubclass(h, Value) for h in members)


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
