"""Values in force inside a `with` block."""

import contextlib
import contextvars
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

import jax

_T = TypeVar("_T")


class Scoped(Generic[_T]):
    """A context variable that is also part of JAX's cache keys.

    Without the keys, a function traced under one value would be reused under another. The setting in the keys
    alone won't do: JAX's settings are thread-local, so all asyncio tasks in a thread share them.
    """

    def __init__(self, name: str, default: _T) -> None:
        self._variable = contextvars.ContextVar(name, default=default)
        self._in_keys: Any = jax.make_user_context(default)
        self.get = self._variable.get

    @contextlib.contextmanager
    def use(self, value: _T, key: Hashable = None) -> Iterator[_T]:
        """Uses a value inside this block. In cache keys, `key` stands for it. Default: the value."""
        token = self._variable.set(value)
        try:
            with self._in_keys(value if key is None else key):
                yield value
        finally:
            self._variable.reset(token)
