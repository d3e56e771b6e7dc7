"""What happens where a Value has to be materialised: allow, warn or raise; counted in any case."""

import contextlib
import contextvars
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.extend.core as jexc
import numpy as np

from . import compat
from .values import Value, aval_of, is_value, materialise

Mode = Literal["allow", "warn", "error"]
_MODES: tuple[Mode, ...] = ("allow", "warn", "error")

_mode: contextvars.ContextVar[Mode | None] = contextvars.ContextVar("on_materialise", default=None)


class MaterialisationError(RuntimeError):
    """A Value would have been materialised where that is not allowed."""


class MaterialisationWarning(UserWarning):
    """A Value was materialised because no rule covers what was done to it."""


class on_materialise(contextlib.ContextDecorator):
    """Says what happens inside when no rule matches and a Value has to be materialised.

    A context manager and a decorator; the innermost one wins, and all of them win over the class
    attribute `on_materialise` of a type. Local to the thread and the context.

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
        if mode not in _MODES:
            raise ValueError(f"on_materialise takes one of {_MODES}; found {mode!r}.")
        self.mode: Mode = mode
        self._tokens: list[contextvars.Token[Mode | None]] = []

    def _recreate_cm(self) -> "on_materialise":
        return on_materialise(self.mode)  # each decorated call has tokens of its own

    def __enter__(self) -> None:
        self._tokens.append(_mode.set(self.mode))

    def __exit__(self, *_: object) -> None:
        _mode.reset(self._tokens.pop())


def policy_key() -> Any:
    """What a cached retracing depends on, beside its operands."""
    return _mode.get(), None if (events := _recorder.get()) is None else id(events)


# -------------------------------------------------------------------------------------------------
# Materialising under the policy
# -------------------------------------------------------------------------------------------------

_recorder: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("recorder", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Any]]:
    """Collects what is dispatched and materialised inside, one entry an event."""
    events: list[Any] = []
    token = _recorder.set(events)
    try:
        yield events
    finally:
        _recorder.reset(token)


def dense(value: Any, what: str, operands: Sequence[Any] | None = None) -> Any:
    """`value` as a dense array, if it is a Value; under the policy.

    **Arguments:**

    - `what`: what asks for it: the name of a primitive, or a phrase such as "`bool()`".
    - `operands`: all operands of the primitive, for the message. Default: `value` alone.
    """
    if not is_value(value):
        return value
    _enforce(value, what, [value] if operands is None else operands)
    try:
        return materialise(value)
    except Exception as error:
        error.add_note(_message(value, what, [value] if operands is None else operands))
        raise


def note_dispatch(primitive: jexc.Primitive, operands: Sequence[Any], rule: Any) -> None:
    """Tells a recording which rule was followed."""
    if (events := _recorder.get()) is not None:
        events.append(("rule", primitive.name, operands, rule))


def _enforce(value: Value, what: str, operands: Sequence[Any]) -> None:
    mode = _mode.get() or value.on_materialise or "allow"
    if (events := _recorder.get()) is not None:
        events.append(("materialised", what, operands, value))
    if mode == "error":
        raise MaterialisationError(_message(value, what, operands))
    if mode == "warn":
        site = compat.user_source_line()
        with _sites_lock:
            new = (site, what, type(value)) not in _sites
            _sites.add((site, what, type(value)))
        if new:
            warnings.warn(MaterialisationWarning(_message(value, what, operands)), stacklevel=2)


_sites: set[Any] = set()
_sites_lock = threading.Lock()


def _message(value: Value, what: str, operands: Sequence[Any]) -> str:
    aval = aval_of(value)
    size = math.prod(getattr(aval, "shape", ())) * np.dtype(getattr(aval, "dtype", np.uint8)).itemsize
    types = ", ".join(map(_describe, operands))
    return (
        f"{what} of ({types}) has no rule, so {_describe(value)} is materialised: {size:,} bytes, "
        f"at {compat.user_source_line()}. Register a rule with `quaxlike.register({what!r})`, "
        "or allow it with `quaxlike.on_materialise('allow')`."
    )


def _describe(x: Any) -> str:
    aval = aval_of(x) if is_value(x) else jax.typeof(x)
    short = aval.str_short() if isinstance(aval, jax.core.ShapedArray) else str(aval)
    return f"{type(x).__name__}[{short}]" if is_value(x) else short
