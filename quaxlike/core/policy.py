"""What happens where a Value has to be materialised: allow, warn or raise; recorded in any case."""

import contextlib
import contextvars
import math
import threading
import typing
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu

from . import recording
from .recording import describe, user_source
from .rules import Rule, active_layers, signature_of
from .values import Value, aval_of, is_value, materialise

Mode = Literal["allow", "warn", "error"]
_MODES: tuple[Mode, ...] = typing.get_args(Mode)  # from the laxest

_mode: contextvars.ContextVar[Mode | None] = contextvars.ContextVar("on_materialise", default=None)

# The mode, as a setting that JAX keeps in the keys of its caches: under another mode than the one in
# which `jax.jit(quaxify(f))` was traced, it is traced again, so that its losses are seen.
_jit_mode = jax.make_user_context(None)


class MaterialisationError(RuntimeError):
    """A Value would have been materialised where that is not allowed."""

    __module__ = "quaxlike"


class MaterialisationWarning(UserWarning):
    """A Value was materialised because no rule covers what was done to it."""

    __module__ = "quaxlike"


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
        self._seen: set[Any] = set()
        self._exits: list[contextlib.ExitStack] = []

    def _recreate_cm(self) -> "on_materialise":
        fresh = on_materialise(self.mode)  # each decorated call enters and leaves on its own
        fresh._seen = self._seen
        return fresh

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(_mode.reset, _mode.set(self.mode))
            stack.callback(_seen.reset, _seen.set(self._seen))
            stack.enter_context(_jit_mode(self.mode))
            self._exits.append(stack.pop_all())

    def __exit__(self, *_: object) -> None:
        self._exits.pop().close()


def policy_key() -> Any:
    """What a cached retracing depends on, beside its operands."""
    return _mode.get()


# -------------------------------------------------------------------------------------------------
# Materialising under the policy
# -------------------------------------------------------------------------------------------------


def dense(value: Any, what: str, operands: Sequence[Any] | None = None, *, hint: str = "") -> Any:
    """`value` as a dense array, if it is a Value; under the policy.

    **Arguments:**

    - `what`: what asks for it: the name of a primitive, or a phrase such as "bool()".
    - `operands`: all operands of the primitive, for the message. Default: `value` alone.
    - `hint`: what the author of the type can do. Default: register a rule for the primitive `what`.
    """
    if not is_value(value):
        return value
    return _densify([value], what, [value] if operands is None else operands, hint)[0]


def dense_operands(primitive: jexc.Primitive, operands: Sequence[Any]) -> list[Any]:
    """The operands of a primitive that no rule covers, each as a dense array; under the policy."""
    made = iter(_densify([x for x in operands if is_value(x)], primitive.name, operands, ""))
    return [next(made) if is_value(x) else x for x in operands]


def _densify(values: Sequence[Value], what: str, operands: Sequence[Any], hint: str) -> list[Any]:
    mode = _mode.get() or _strictest(values)
    loss = _Loss(values, what, operands, hint)
    if (recorder := recording.active()) is not None:
        notes = [] if mode == "allow" else [f'on_materialise "{mode}"']
        recorder.lose(what, operands, loss.size, loss.remedy, notes)
        return [_materialised_or_stand_in(v, recorder) for v in values]
    if mode == "error":
        raise MaterialisationError(loss.message)
    if mode == "warn":
        loss.warn()
    try:
        return [materialise(v) for v in values]
    except Exception as error:
        error.add_note(f"Raised when it had to be materialised, by\n{loss.message}")
        raise


def _strictest(values: Sequence[Value]) -> Mode:
    """What the types say for themselves, those of Values inside of Values included."""
    found: set[Mode] = {"allow"}

    def look(x: Any) -> None:
        if is_value(x):
            if x.on_materialise is not None:
                found.add(x.on_materialise)
            jtu.tree_map(look, x, is_leaf=lambda y: y is not x and is_value(y))

    for value in values:
        look(value)
    return max(found, key=_MODES.index)


def _materialised_or_stand_in(value: Value, recorder: recording.Recorder) -> Any:
    """While shapes are traced, so that the recording goes on past a type that refuses."""
    try:
        return materialise(value)
    except Exception as error:
        aval = aval_of(value)
        recorder.note(f"{type(value).__name__}.materialise raises {type(error).__name__}: {error}")
        if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
            raise
        return jnp.zeros(aval.shape, aval.dtype)


# -------------------------------------------------------------------------------------------------
# Messages
# -------------------------------------------------------------------------------------------------

# Where a warning was given already: for each `on_materialise`, and for those of types.
_seen: contextvars.ContextVar[set[Any]] = contextvars.ContextVar("quaxlike_warned", default=set())  # noqa: B039
_seen_lock = threading.Lock()


class _Loss:
    """One materialisation, in words."""

    def __init__(self, values: Sequence[Value], what: str, operands: Sequence[Any], hint: str) -> None:
        self.values = values
        self.what = what
        self.operands = operands
        self.hint = hint

    @property
    def size(self) -> int:
        return sum(map(_logical_bytes, self.values))

    @property
    def message(self) -> str:
        source, through = user_source()
        types = ", ".join(map(describe, self.operands))
        lost = " and ".join(dict.fromkeys(type(v).__name__ for v in self.values))
        return "\n".join(
            [
                f"{self.what}: no rule for ({types}); {lost} would be made dense, {_in_bytes(self.size)},",
                f"  at {source}" + (f", which calls {through}" if through else ""),
                *(f"  {how}: {rule}" for how, rule in self._nearest()),
                *(f"  {line}" for line in self.remedy.splitlines()),
                '  To let it happen: `with quaxlike.on_materialise("allow")`.',
            ]
        )

    @property
    def remedy(self) -> str:
        """What the author of the type can write."""
        if self.hint:
            return self.hint
        names = [*"xyzuvw", *(f"x{i}" for i in range(6, len(self.operands)))]
        operands = ", ".join(
            f"{name}: {type(x).__name__ if is_value(x) else 'jax.Array'}"
            for name, x in zip(names, self.operands, strict=False)
        )
        return (
            f'To keep the type, write a rule:\n  @quaxlike.register("{self.what}")\n'
            f"  def _({operands}, **params): ..."
        )

    def _nearest(self) -> Iterator[tuple[str, Rule]]:
        """At most two rules of the primitive, those first that fit most of the operands."""
        types = [type(x) if is_value(x) else jax.Array for x in self.operands]

        def misfit(rule: Rule) -> int:
            if not rule.signature.has_varargs and len(rule.signature.types) != len(types):
                return len(types) + 1
            hints = rule.signature.expand_varargs(len(types))
            return sum(not signature_of([t]) <= signature_of([h]) for t, h in zip(types, hints, strict=False))

        rules = [r for layer in active_layers.get() for r in layer if r.primitive.name == self.what]
        for rule in sorted(rules, key=misfit)[:2]:
            yield "nearest rule" if misfit(rule) else "this rule declined (NotImplemented)", rule

    def warn(self) -> None:
        """Once for each call site, primitive and types of operands; shown at the user's own line."""
        source, _ = user_source()
        site = source, self.what, tuple(map(type, self.operands))
        seen = _seen.get()
        with _seen_lock:
            if site in seen:
                return
            seen.add(site)
        warnings.warn_explicit(MaterialisationWarning(self.message), None, source.file, source.line)


def _logical_bytes(value: Value) -> int:
    aval = aval_of(value)
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 0)


def _in_bytes(size: int) -> str:
    """`size` as bytes, and as a number one can read."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size:,} bytes ({size / scale:.1f} {unit})"
    return f"{size} bytes"
