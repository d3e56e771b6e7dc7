"""The function behind a registered function's wrappers, and its annotations."""

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any, cast


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
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    around: dict[str, Any] = {}
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=True):
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
