"""Types that refuse to be materialised, which makes it possible to detect if a program drops the type."""

import contextlib
import contextvars
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from ..core.values import Value, materialise

_V = TypeVar("_V", bound=Value)

_revealing: contextvars.ContextVar[bool] = contextvars.ContextVar("quaxlike_revealing", default=False)


@functools.cache
def refuses(cls: type[_V]) -> type[_V]:
    """Creates a subclass that refuses to be materialised. You can use this to test whether programs preserve
    the type.

    [`quaxlike.testing.check_type`][] can still access the underlying array. Note that if a rule explicitly
    constructs the original class, then the result won't be an instance of the subclass. In contrast
    `dataclasses.replace`, `tree_map` and `type(x)(...)` all preserve the subclass.

    **Arguments:**

    - `cls`: a Value type.

    **Returns:** a subclass with the same name. (This means that you can also use `refuses` as a class
    decorator.)

    **Raises:** `materialise` raises a `RuntimeError` that includes the type's name.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.testing import refuses

        w = refuses(ql.LoraArray)(jnp.ones((4, 3)), jnp.ones((1, 3)), jnp.ones((4, 1)))
        ql.quaxify(jnp.matmul)(w, jnp.ones(3))  # has a rule; jnp.tanh(w) would raise
        ```
    """

    class Refusing(cls):
        def materialise(self) -> Any:
            if not is_revealing():
                raise RuntimeError(f"{cls.__name__} refuses to materialise: no rule kept the type.")
            return super().materialise()

        def aval(self) -> Any:
            with revealing():  # `aval` might be inferred from `materialise`
                return super().aval()

        def __reduce_ex__(self, protocol: Any) -> Any:
            if found_by_name(type(self)) is type(self):  # this was used as a class decorator
                return super().__reduce_ex__(protocol)
            fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            return _rebuilt, (cls, fields)

    # We make additional assumptions about types that can't be materialised. So declare these explicitly to be
    # the same as in the original class.
    Refusing.linear = cls.linear
    Refusing.own_shapes = bool(cls.own_shapes)
    Refusing.__name__, Refusing.__qualname__ = cls.__name__, cls.__qualname__
    Refusing.__module__, Refusing.__doc__ = cls.__module__, cls.__doc__
    return cast(type[_V], Refusing)


def found_by_name(cls: type) -> Any:
    """Looks up the object that you get when you import a class by its name."""
    at: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        at = getattr(at, name, None)
    return at


def _rebuilt(cls: type, fields: dict[str, Any]) -> Any:
    new = object.__new__(refuses(cls))
    for name, part in fields.items():
        object.__setattr__(new, name, part)
    return new


@contextlib.contextmanager
def revealing() -> Iterator[None]:
    """Returns a context manager, inside which types that refuse to be materialised can be materialised
    anyway.
    """
    token = _revealing.set(True)
    try:
        yield
    finally:
        _revealing.reset(token)


def is_revealing() -> bool:
    """Returns whether we are inside `revealing`."""
    return _revealing.get()


def reveal(tree: Any) -> Any:
    """Materialises every Value in a tree, including any that refuse to be materialised."""
    with revealing():
        return materialise(tree)
