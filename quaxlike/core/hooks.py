"""Calls the hooks of a Value. Errors mention the hook that raised them, and no trace is active.

A hook runs whilst a primitive is being bound. Without a note, any error that it raises would look like an
error in the user's program. In addition, a hook must return the same result no matter where it's called from,
because we cache its results. This is what `probing` is for.
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
from .derivatives import derivative_alone, is_derivative_alone, lacks_tangents

# For each hook, a description of what we use it for. This appears in the notes on errors.
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
    """Wraps a hook, so that any error that it raises has a note that mentions the type and the hook."""
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
            # An error might propagate through several nested hooks. Make sure that each note is only added
            # once.
            for line in (note, remedy(of, error)):
                if line and line not in getattr(error, "__notes__", ()):
                    error.add_note(line)
            raise

    return named


def _guarded(materialise: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `materialise`, checking that it returns an array and does not call itself."""

    @functools.wraps(materialise)
    def guarded(self: Any) -> Any:
        running = running_hooks.materialising
        # Compare by identity rather than equality. It's perfectly fine for a hook to materialise another
        # Value of its own type.
        for call, value in running:
            if value is self and call is materialise:
                raise Endless(computes_with_itself(inspect.unwrap(materialise).__code__))
        running.append((materialise, self))
        try:
            if lacks_tangents(self):
                raise derivative_alone(type(self))
            # JAX would raise its own error for anything that isn't an array, but far from the hook that
            # returned it.
            return as_dense(materialise(self), f"{type(self).__qualname__}.materialise")
        except RecursionError as error:
            # If a hook creates a new Value each time then it isn't caught by the identity check above. For
            # this case, count how often it appears on the stack.
            if sum(call is materialise for call, _ in running) < OFTEN:
                raise
            raise Endless(computes_with_itself(inspect.unwrap(materialise).__code__)) from error
        finally:
            running.pop()

    return guarded


class _RunningHooks(threading.local):
    """The hooks that this thread is currently running, outermost first."""

    def __init__(self) -> None:
        self.materialising: list[tuple[Callable[..., Any], Any]] = []  # along with their Values
        # For each aval that is currently being inferred: the key under which it's memoised, and the class.
        self.inferring: dict[Any, type] = {}
        self.endless: set[type] = set()  # classes whose aval was found to depend on itself


running_hooks = _RunningHooks()
# At the recursion limit, a hook that's nested at least this often is considered to be calling itself.
OFTEN = 5


def as_dense(out: Any, hook: str) -> Any:
    """Checks that a hook returned an array or a Value. Converts numbers and NumPy arrays to JAX arrays."""
    if isinstance(out, bool | int | float | complex | np.ndarray | np.generic):
        return jnp.asarray(out)
    if not hasattr(out, "shape") and not isinstance(type(out), ValueMeta):
        raise TypeError(f"{hook}() must return an array; found {out!r}.")
    return out


def remedy(value: Any, error: Exception) -> str:
    """Suggests a fix for a hook that failed because it was traced. Empty if it failed for any other reason.

    Note that hooks aren't only traced in order to infer shapes, but also whenever the user calls them under
    `jit`.
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
    """Returns the names of non-static fields that contain Python numbers, or that did so before tracing."""
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

    Once this has propagated out of all hooks, it is converted to a `RuleError`. We can't raise a `RuleError`
    to begin with, because it's a `TypeError`, and JAX replaces any `TypeError` that is raised while binding a
    primitive.
    """


def hook_of_shape(cls: Any) -> types.CodeType:
    """Returns the code that determines a class's shape, which is its own `aval` or `materialise`."""
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
    """Returns the error for a field that isn't an array.

    (For a `TypeError`, JAX would substitute its own.)
    """
    return error if running_hooks.inferring or running_hooks.materialising else RuleError(str(error))


def not_an_array(value: Any, leaf: Any) -> ValueError:
    """Returns the error for a field that isn't an array. (This isn't a `TypeError`, as JAX would replace it
    by its own.)"""
    paths = jtu.tree_leaves_with_path(value)
    (name, *_) = (jtu.keystr(path) for path, x in paths if x is leaf)
    return ValueError(
        f"{type(value).__name__}{name} holds {leaf!r} where an array is expected. Declare a field that is "
        "not an array with `eqx.field(static=True)`."
    )


class ValueMeta(QuickMeta):
    """The metaclass of Values. It wraps their hooks, so that any errors that they raise mention the hook."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any) -> Any:
        named = {hook: _naming(hook, namespace[hook]) for hook in _HOOKS if hook in namespace}
        return super().__new__(mcs, name, bases, namespace | named, **kwargs)


class _Probing:
    """A context for calling hooks outside any trace.

    This also enters every context in `asides`, for example one that suspends the policy. (We cache the
    results of hooks, so a policy would otherwise only see their operations the first time around.)
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
    """Calls `hook` with a Value whose leaves are tracers. This allows the hook to compute with arrays
    although we only have their shapes."""

    def on_shapes(value: Any) -> Any:
        # We store the result here because it isn't necessarily an array, whereas `eval_shape` can only return
        # arrays.
        found: list[Any] = []
        with probing():
            jax.eval_shape(lambda value: found.append(hook(value)), value)
        return found[0]

    return on_shapes
