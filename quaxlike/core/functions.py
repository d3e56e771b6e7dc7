"""The function behind a registered function's wrappers, its annotations, and their names."""

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, TypeVar, cast

from jaxtyping import AbstractArray, ArrayLike


def names_in(function: Callable[..., Any]) -> Callable[[str], Any]:
    """Returns a function for evaluating names in quotes, as in the bound of a type variable."""

    def evaluate(name: str) -> Any:
        def quoted() -> None: ...

        quoted.__annotations__ = {"it": name}
        return type_hints(written_function(function), quoted)["it"]

    return evaluate


def written_function(function: Any) -> Callable[..., Any]:
    """Returns the function as its author wrote it: behind decorators, `functools.partial`, and `__call__`."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return written_function(cast(Any, function).func)
    if not inspect.isroutine(function) and not isinstance(function, type):
        return written_function(type(function).__call__)
    return function


def type_hints(function: Callable[..., Any], of: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Evaluates a rule's annotations. They may name what the rule closes over, such as a local class.

    **Arguments:**

    - `of`: another function whose annotations to evaluate, using the names visible in `function`.
    """
    if not inspect.isroutine(inspect.unwrap(function)):  # it has no annotations of its own
        function = written_function(function)
    around: dict[str, Any] = {}
    for each in (function, inspect.unwrap(function)):  # a decorator's function has cells of its own
        names = getattr(getattr(each, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, getattr(each, "__closure__", None) or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                around[name] = cell.cell_contents
    try:
        if of is not None:
            return typing.get_type_hints(of, getattr(function, "__globals__", {}), around)
        return typing.get_type_hints(function, localns=around)
    except NameError as error:
        raise TypeError(
            f"The annotations of the rule {function} cannot be evaluated: {error}. They select the "
            "rule, so their names must be importable at run time."
        ) from error


def expanded_alias(alias: Any, args: Sequence[Any]) -> Any:
    """Expands a generic alias (such as `type A[T] = T | jax.Array`), by substituting its parameters.

    **Raises:** `TypeError` if a parameter is the array type of a jaxtyping class, which does not keep it.
    """
    given = dict(zip(alias.__type_params__, args, strict=False))
    value: Any = alias.__value__
    if isinstance(value, TypeVar):
        return given.get(value, value)
    parameters = getattr(value, "__parameters__", ())
    if given and isinstance(value, type) and issubclass(value, AbstractArray):
        names = ", ".join(map(type_name, args))
        raise TypeError(
            f"The alias `{alias}[{names}]` is a class of jaxtyping, in which type variables count as `Any`. "
            f'Write the type itself, as in `{value.__name__.partition("[")[0]}[{names}, "{value.dim_str}"]`.'
        )
    return cast(Any, value)[tuple(given.get(p, p) for p in parameters)] if parameters else value


_ARRAY_LIKE = frozenset(typing.get_args(ArrayLike))


def type_name(hint: Any) -> str:
    """Returns a type's name for messages."""
    members = typing.get_args(hint)
    if members and typing.get_origin(hint) in (typing.Union, UnionType):
        short = ["ArrayLike"] if {*members} >= _ARRAY_LIKE else []
        others = [m for m in members if not short or m not in _ARRAY_LIKE]
        return " | ".join([*map(type_name, others), *short])
    return hint.__name__ if isinstance(hint, type) and not members else str(hint).replace("typing.", "")
