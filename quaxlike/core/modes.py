"""What is in force in a context: the policy for Values that have to be materialised, and the recorder of
`explain`."""

import contextlib
import contextvars
import threading
import typing
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.core

from . import compat

Mode = Literal["allow", "warn", "error"]
MODES: tuple[Mode, ...] = typing.get_args(Mode)  # from the laxest


class on_materialise(contextlib.ContextDecorator):
    """Sets what happens inside when no rule matches and a Value has to be materialised.

    A context manager and a decorator. The innermost one wins, and any of them overrides the class
    attribute `on_materialise` of a type. It is local to the thread and the context, so that each asyncio
    task has its own. (A thread that runs in a copy of a context, as with `asyncio.to_thread`, has to enter
    its own.)

    A jitted function is traced once under each mode, and materialises, warns or raises while it is traced.

    **Arguments:**

    - `mode`: `"allow"`, `"warn"` (a [`quaxlike.MaterialisationWarning`][], once per call site) or
        `"error"` (a [`quaxlike.MaterialisationError`][]).

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        with ql.on_materialise("error"):
            ql.quaxify(jnp.sum)(jnp.ones(3))  # nothing to materialise
        ```
    """

    def __init__(self, mode: Mode) -> None:
        if mode not in MODES:
            raise ValueError(f"on_materialise takes one of {MODES}; found {mode!r}.")
        self.mode: Mode = mode
        self.warned: set[Any] = set()  # the call sites that have been warned about

    def __enter__(self) -> None:
        _enter((*_entered.get(), self), 1)

    def __exit__(self, *_: object) -> None:
        # Not always the innermost: an abandoned generator exits when it is garbage collected.
        stack = _entered.get()
        at = max((i for i, entered in enumerate(stack) if entered is self), default=len(stack))
        _enter(stack[:at] + stack[at + 1 :], -1)


_entered: contextvars.ContextVar[tuple[on_materialise, ...]] = contextvars.ContextVar(
    "on_materialise", default=()
)


def innermost() -> on_materialise | None:
    """The innermost `on_materialise` that was entered."""
    stack = _entered.get()
    return stack[-1] if stack else None


def policy_key() -> Mode | None:
    """The mode in force, which is part of the keys of cached jaxprs."""
    entered = innermost()
    return entered.mode if entered else None


# The mode, as a setting that is part of the keys of JAX's caches: `jax.jit(quaxify(f))` is traced again
# under another mode, so that its losses are reported.
_jit_mode = jax.make_user_context(None)
_n_entered = 0  # in all contexts
_enter_lock = threading.Lock()


def _enter(stack: tuple[on_materialise, ...], entered: int) -> None:
    global _n_entered
    _entered.set(stack)
    with _enter_lock:
        _n_entered += entered
        compat.set_user_context(_jit_mode, _ModeOfContext() if _n_entered else None)


class _ModeOfContext:
    """The mode of the context in which one of JAX's caches first looks at it, as part of a cache key.

    JAX's settings belong to a thread, which tasks share, so the mode itself cannot be set. This is set
    instead; when it is first looked at, it decides, and sets a new, undecided one. It equals the mode.
    """

    __slots__ = ("_decided",)

    @property
    def mode(self) -> Mode | None:
        try:
            return self._decided
        except AttributeError:
            self._decided: Mode | None = policy_key()
            compat.set_user_context(_jit_mode, _ModeOfContext())
            return self._decided

    def __eq__(self, other: object) -> bool:
        return self.mode == (other.mode if isinstance(other, _ModeOfContext) else other)

    def __hash__(self) -> int:
        return hash(self.mode)


recorder: contextvars.ContextVar[Any] = contextvars.ContextVar("quaxlike_recorder", default=None)

# A setting that is part of the keys of JAX's caches, so that what they hold is traced again, and recorded.
jit_recording = jax.make_user_context(None)


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """For asking the hooks of a type, outside of every trace. Whatever they make dense is no loss, and is
    neither reported nor recorded: the answer is remembered, so that it would be once and not again."""
    token = recorder.set(None)
    try:
        with on_materialise("allow"), jit_recording(None), jax.core.eval_context():
            yield
    finally:
        recorder.reset(token)
