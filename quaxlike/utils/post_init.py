"""Context managers for disabling and enabling the `__post_init__` of dataclasses."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Concatenate, ParamSpec, TypeVar

from .._checked import checked

_P = ParamSpec("_P")
_T = TypeVar("_T")


_enabled: contextvars.ContextVar[bool] = contextvars.ContextVar("post_init", default=True)


@contextlib.contextmanager
def _post_init_set_to(enabled: bool) -> Iterator[None]:
    before = _enabled.get()
    _enabled.set(enabled)
    try:
        yield
    finally:
        _enabled.set(before)


def no_post_init() -> contextlib.AbstractContextManager[None]:
    """Returns a context skipping some `__post_init__` methods.

    This only affects methods decorated with
    [`skip_post_init_if_disabled`][quaxlike.utils.skip_post_init_if_disabled]. For example, use it to
    construct an object with placeholder values that wouldn't pass the usual checks. Contexts can be nested.
    They affect only the current thread or asyncio task, and the previous setting is restored even after an
    error.

    **Returns:**

    A context manager, also usable as a decorator.

    !!! example

        ```python
        from quaxlike.utils import dataclass, no_post_init, skip_post_init_if_disabled

        @dataclass
        class Interval:
            low: float
            high: float

            @skip_post_init_if_disabled
            def __post_init__(self):
                if self.low > self.high:
                    raise ValueError("low must not exceed high.")

        with no_post_init():
            half_built = Interval(low=2.0, high=1.0)
        ```
    """
    return _post_init_set_to(False)


def enable_post_init() -> contextlib.AbstractContextManager[None]:
    """Undoes [`no_post_init`][quaxlike.utils.no_post_init] inside an inner context.

    **Returns:**

    A context manager, also usable as a decorator.

    !!! example

        ```python
        from quaxlike.utils import enable_post_init, no_post_init

        with no_post_init():
            ...  # skipped
            with enable_post_init():
                ...  # not skipped
        ```
    """
    return _post_init_set_to(True)


@checked
def skip_post_init_if_disabled(
    post_init: Callable[Concatenate[_T, _P], None],
) -> Callable[Concatenate[_T, _P], None]:
    """Decorates a `__post_init__` method to be skipped under [`no_post_init`][quaxlike.utils.no_post_init].

    **Arguments:**

    - `post_init`: the `__post_init__` method.

    **Returns:**

    The wrapped method. It has the same name and docstring as the original.

    !!! example

        ```python
        from quaxlike.utils import dataclass, skip_post_init_if_disabled

        @dataclass
        class Probability:
            value: float

            @skip_post_init_if_disabled
            def __post_init__(self):
                if not 0.0 <= self.value <= 1.0:
                    raise ValueError("A probability lies between 0 and 1.")
        ```
    """

    @functools.wraps(post_init)
    def unless_disabled(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if _enabled.get():
            post_init(self, *args, **kwargs)

    return unless_disabled
