"""Calls the hooks of a Value. Errors mention the hook raising them, and no trace is active.

A hook runs while a primitive is being bound: without a note, its errors would look like errors in the user's
program. Its results are cached, so they must be the same wherever it's called from. This is what `probing` is
for.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from . import compat
from .construction import QuickMeta
from .derivatives import derivative_alone, is_derivative_alone

# What each hook is used for, as described in the notes on errors.
_HOOKS = {
    "aval": "its shape and dtype",
    "materialise": "its dense array",
    "default": "a result where no rule matches",
    "follows_rules": "whether rules apply to it",
    "promote": "a plain array as a value of its type",
    "widen": "the form that it shares with another Value",
    "cotangent": "the cotangent that a backward function receives",
    "leading_axis": "the axes along which its leaves are cut into rows",
    "shard_spec": "the partition specs of its leaves",
}


def _naming(hook: str, method: Any) -> Any:
    """Wraps a hook, adding a note to its errors with the type and the hook."""
    if isinstance(method, classmethod | staticmethod):
        return type(method)(_naming(hook, method.__func__))
    if not callable(method):
        return method
    call: Callable[..., Any] = _guarded(method) if hook == "materialise" else method

    @functools.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Endless as error:
            raise endless_error(error) from None
        except Exception as error:
            of = args[0] if args and hook != "default" else None
            cls = of if isinstance(of, type) else type(of)
            # Don't blame the hook: it only failed because JAX left out the integer leaves.
            if isinstance(cls, ValueMeta) and is_derivative_alone(jtu.tree_leaves(of)):
                raise derivative_alone(cls) from error
            name = call.__qualname__ if of is None else f"{cls.__qualname__}.{hook}"
            note = f"Raised by `{name}`, which quaxlike asked for {_HOOKS[hook]}."
            # An error may propagate through several nested hooks: add each note only once.
            for line in (note, remedy(of, error)):
                if line and line not in getattr(error, "__notes__", ()):
                    error.add_note(line)
            raise

    return named


def _lacks_tangents(value: Any) -> bool:
    """Returns whether any traced leaf of a Value is a zero substituted by `jax.jacfwd`."""
    # `jax.jacfwd` runs under `vmap`, so this can't happen eagerly: skip looking at the leaves.
    if compat.is_eval_trace(compat.current_trace()):
        return False
    return any(map(compat.is_missing_tangent, jtu.tree_leaves(value)))


def _guarded(materialise: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `materialise`, checking that it returns an array and does not call itself."""

    @functools.wraps(materialise)
    def guarded(self: Any) -> Any:
        running = running_hooks.materialising
        # Compare by identity, not equality: a hook may materialise another Value of its own type.
        for call, value in running:
            if value is self and call is materialise:
                raise Endless(computes_with_itself(inspect.unwrap(materialise).__code__))
        running.append((materialise, self))
        try:
            if _lacks_tangents(self):
                raise derivative_alone(type(self))
            # For anything but an array JAX would raise its own error, but far from this hook.
            return as_dense(materialise(self), f"{type(self).__qualname__}.materialise")
        except RecursionError as error:
            # The identity check above misses a hook creating a new Value each time: count how often it
            # appears on the stack.
            if sum(call is materialise for call, _ in running) < OFTEN:
                raise
            raise Endless(computes_with_itself(inspect.unwrap(materialise).__code__)) from error
        finally:
            running.pop()

    return guarded


class _RunningHooks(threading.local):
    """The hooks running in this thread, outermost first."""

    def __init__(self) -> None:
        self.materialising: list[tuple[Callable[..., Any], Any]] = []  # along with their Values
        # For each aval being inferred: the key under which it's memoised, and the class.
        self.inferring: dict[Any, type] = {}
        self.endless: set[type] = set()  # classes whose aval was found to depend on itself


running_hooks = _RunningHooks()
# At the recursion limit, a hook nested at least this often is considered to be calling itself.
OFTEN = 5


def as_dense(out: Any, hook: str) -> Any:
    """Checks that a hook returned an array or a Value. Converts numbers and NumPy arrays to JAX arrays."""
    if isinstance(out, bool | int | float | complex | np.ndarray | np.generic):
        return jnp.asarray(out)
    if not hasattr(out, "shape") and not isinstance(type(out), ValueMeta):
        raise TypeError(f"{hook}() must return an array; found {out!r}.")
    return out


def remedy(value: Any, error: Exception) -> str:
    """Suggests a fix for a hook that failed because it was traced. Empty for any other failure.

    Hooks aren't only traced to infer shapes, but also whenever the user calls them under `jit`.
    """
    is_numpys = isinstance(error, jax.errors.TracerArrayConversionError)
    if not is_numpys and not compat.wants_concrete(error):
        return ""
    found: list[str] = []
    if is_numpys:
        found.append("NumPy cannot compute with what is traced: use `jax.numpy` in the hook.")
    if names := [f"`{name}`" for name in _numbers(value)]:
        which = f"{' and '.join(names)} of {type(value).__name__} {'is' if len(names) == 1 else 'are'} not"
        found.append(
            "A field that decides a shape, or whose value Python asks for, is declared with "
            f"`eqx.field(static=True)`: {which}."
        )
    if not found:
        found.append(
            "A hook that is traced does not know the numbers in the arrays: compute with `jax.numpy`, as "
            "with `jnp.where` for `if`, and decide shapes by the shapes of the arrays."
        )
    return " ".join(found)


def _numbers(value: Any) -> Iterator[str]:
    """Returns the names of non-static fields containing Python numbers, now or before tracing."""
    try:
        hints = typing.get_type_hints(type(value))
    except (NameError, TypeError):
        hints = {}
    for f in dataclasses.fields(value) if isinstance(value, eqx.Module) else ():
        part = getattr(value, f.name, None)
        if f.metadata.get("static"):
            continue
        if isinstance(part, eqx.Module):
            yield from (f"{f.name}.{name}" for name in _numbers(part))
        else:
            leaves = jtu.tree_leaves(part)
            are_numbers = bool(leaves) and all(type(x) in (bool, int, float) for x in leaves)
            if are_numbers or _is_of_numbers(hints.get(f.name)):
                yield f.name


def _is_of_numbers(hint: Any) -> bool:
    """Returns whether an annotation is `int`, `bool`, or a sequence of these, possibly optional."""
    parts = [x for x in typing.get_args(hint) if x not in (type(None), ...)]
    return hint in (int, bool) or (bool(parts) and all(map(_is_of_numbers, parts)))


class RuleError(TypeError):
    """Raised if a rule can't be used, because its operands or results don't fit its primitive."""

    __module__ = "quaxlike"


class Endless(ValueError):
    """Raised if a hook, or a rule used by a hook, calls itself endlessly.

    Once out of all hooks, it is converted to a `RuleError`. This can't be raised to begin with: it's a
    `TypeError`, and JAX replaces any `TypeError` raised while binding a primitive.
    """


def hook_of_shape(cls: Any) -> types.CodeType:
    """Returns the code determining a class's shape: its own `aval`, or else `materialise`."""
    own = inspect.unwrap(cls.aval)
    is_inherited = own.__module__.partition(".")[0] == __name__.partition(".")[0]
    return inspect.unwrap(cls.materialise if is_inherited else own).__code__


def computes_with_itself(hook: types.CodeType) -> str:
    """Returns the message for endless recursion of a hook."""
    name = hook.co_qualname.rpartition("<locals>.")[2]
    return (
        f"`{name}` at {hook.co_filename}:{hook.co_firstlineno} computes with the Value itself, and so calls "
        "itself endlessly. Compute with the arrays that the Value holds. If it needs the shape or dtype of "
        "the Value, define `aval` by the shapes and dtypes of these arrays."
    )


def endless_error(error: Endless) -> Exception:
    """Converts `error` to a `RuleError` outside all hooks. Inside, it propagates unchanged."""
    return error if running_hooks.inferring or running_hooks.materialising else RuleError(str(error))


def not_an_array(value: Any, leaf: Any) -> ValueError:
    """Returns the error for a field that isn't an array. (JAX would replace a `TypeError` by its own.)"""
    paths = jtu.tree_leaves_with_path(value)
    (name, *_) = (jtu.keystr(path) for path, x in paths if x is leaf)
    return ValueError(
        f"{type(value).__name__}{name} holds {leaf!r} where an array is expected. Declare a field that is "
        "not an array with `eqx.field(static=True)`."
    )


class ValueMeta(QuickMeta):
    """The metaclass of Values. Wraps their hooks, so errors mention the hook raising them."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any) -> Any:
        named = {hook: _naming(hook, namespace[hook]) for hook in _HOOKS if hook in namespace}
        return super().__new__(mcs, name, bases, namespace | named, **kwargs)


class _Probing:
    """A context for calling hooks outside any trace.

    Also enters every context in `asides`, e.g. one suspending the policy. (Hooks' results are cached: a
    policy would only see their operations the first time around.)
    """

    def __init__(self) -> None:
        self.asides: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for aside in self.asides:
                stack.enter_context(aside())
            stack.enter_context(jax.core.eval_context())
            yield


probing = _Probing()


def traced(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Calls `hook` with tracers as the Value's leaves: it can compute with arrays although only their shapes
    are known."""

    def on_shapes(value: Any) -> Any:
        # Store the result here: it may not be an array, and `eval_shape` only returns arrays.
        found: list[Any] = []
        with probing():
            jax.eval_shape(lambda value: found.append(hook(value)), value)
        return found[0]

    return on_shapes
