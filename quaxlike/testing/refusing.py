"""Types that refuse to be materialised, for detecting if a program drops the type."""

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
    """Creates a subclass that refuses to be materialised. Use this to test if programs preserve the type.

    [`quaxlike.testing.check_type`][] can still access the underlying array. If a rule explicitly constructs
    the original class, then the result isn't an instance of the subclass. In contrast `dataclasses.replace`,
    `tree_map` and `type(x)(...)` all preserve the subclass.

    **Arguments:**

    - `cls`: a Value type.

    **Returns:** a subclass with the same name. (So `refuses` can also be used as a class decorator.)

    **Raises:** `materialise` raises a `RuntimeError` with the type's name.

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
            with revealing():  # `aval` may be inferred from `materialise`
                return super().aval()

        def __reduce_ex__(self, protocol: Any) -> Any:
            if found_by_name(type(self)) is type(self):  # this was used as a class decorator
                return super().__reduce_ex__(protocol)
            fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
            return _rebuilt, (cls, fields)

    # Additional assumptions are made about types that can't be materialised. So declare these explicitly, as
    # in the original class.
    Refusing.linear = cls.linear
    Refusing.own_shapes = bool(cls.own_shapes)
    Refusing.__name__, Refusing.__qualname__ = cls.__name__, cls.__qualname__
    Refusing.__module__, Refusing.__doc__ = cls.__module__, cls.__doc__
    return cast(type[_V], Refusing)


def found_by_name(cls: type) -> Any:
    """Looks up the object found when importing a class by its name."""
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
    """Returns a context for materialising types even if they refuse to be materialised."""
    token = _revealing.set(True)
    try:
        yield
    finally:
        _revealing.reset(token)


def is_revealing() -> bool:
    """Returns whether this is called inside `revealing`."""
    return _revealing.get()


def reveal(tree: Any) -> Any:
    """Materialises every Value in a tree, including any that refuse to be materialised."""
    with revealing():
        return materialise(tree)
