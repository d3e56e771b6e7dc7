"""Construction of Values (quick, and without arrays in static fields) and of their classes (whose hooks are
named in the errors that they raise)."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._checked import a_or_an


class ValueMeta(type(eqx.Module)):
    """Builds classes whose hooks are named in the errors that they raise, and creates instances quickly.

    Equinox's metaclass would take most of the time of an eager operation. It is bypassed only from the second
    instance on, so that Equinox checks the class once, and only if constructing an instance does nothing but
    set fields: the class has no `__init__`, `__new__`, `__post_init__` or `__check_init__` of its own, no
    converter and no default factory.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], /, **kwargs: Any) -> Any:
        named = {hook: _naming(hook, namespace[hook]) for hook in _HOOKS if hook in namespace}
        if "__new__" in namespace:
            named["__new__"] = _handing_over(namespace["__new__"])
        return super().__new__(mcs, name, bases, namespace | named, **kwargs)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        names = _plain_fields.get(cls)
        if names is None or len(args) != len(names) or kwargs:
            try:
                instance = super().__call__(*args, **kwargs)
            except _NotToInitialise as found:
                return found.instance
            except ValueError as error:
                # Equinox flattens all arguments as pytrees, and JAX refuses dictionaries whose keys cannot
                # be sorted, even in static fields.
                if "sorting pytree dictionary keys" not in str(error) or not _sets_fields(cls):
                    raise
                instance = _made(cls, args, kwargs)
            _check_statics(instance)
            if cls not in _plain_fields:
                _plain_fields[cls] = _fields_if_plain(cls)
            return instance
        instance: Any = object.__new__(cls)
        for i, name in enumerate(names):  # `zip(..., strict=True)` takes twice the time
            object.__setattr__(instance, name, args[i])
        if _static_fields(type(instance)):
            _check_statics(instance)
        return instance


class _NotToInitialise(Exception):
    """Carries what the `__new__` of a class returned past Equinox, which would initialise it."""

    def __init__(self, instance: Any) -> None:
        super().__init__("This `__new__` returns no new instance. Call the class instead.")
        self.instance = instance


def _handing_over(method: Any) -> Any:
    """Wraps a `__new__` that may return an object of another class, or an instance that it made earlier."""
    make = method.__func__ if isinstance(method, staticmethod) else method

    @functools.wraps(make)
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        instance = make(cls, *args, **kwargs)
        if cls.__new__ is new and (not isinstance(instance, cls) or _is_frozen(instance)):
            raise _NotToInitialise(instance)
        return instance  # to be initialised, or to the `__new__` of a subclass

    return new


def _is_frozen(instance: Any) -> bool:
    name = next((f.name for f in dataclasses.fields(instance) if hasattr(instance, f.name)), None)
    if name is None:
        return False
    try:
        setattr(instance, name, getattr(instance, name))
    except dataclasses.FrozenInstanceError:
        return True
    return False


class _Probing:
    """A context for asking the hooks of a type, outside of every trace. What has been registered to set
    itself aside, such as the policy on losses, does not see what the hooks do: the answers are remembered, so
    that it would see it the first time and not again."""

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


# The hooks of a type, and what each is called for.
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
    """Wraps a hook so that its errors carry a note with the names of the type and the hook."""
    if isinstance(method, classmethod | staticmethod):
        return type(method)(_naming(hook, method.__func__))
    if not callable(method):
        return method
    call: Callable[..., Any] = method

    @functools.wraps(call)
    def named(*args: Any, **kwargs: Any) -> Any:
        try:
            out = call(*args, **kwargs)
            return out if hook != "materialise" else as_dense(out, f"{type(args[0]).__qualname__}.{hook}")
        except Exception as error:
            of = args[0] if args and hook != "default" else None
            cls = of if isinstance(of, type) else type(of)
            if isinstance(cls, ValueMeta) and is_derivative_alone(jtu.tree_leaves(of)):
                raise derivative_alone(cls) from error
            name = call.__qualname__ if of is None else f"{cls.__qualname__}.{hook}"
            note = f"Raised by `{name}`, which quaxlike asked for {_HOOKS[hook]}."
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise

    return named


def is_derivative_alone(leaves: Sequence[Any]) -> bool:
    """Whether these leaves, or their avals, are a derivative without what JAX does not differentiate."""
    return any(getattr(leaf, "dtype", None) == jax.dtypes.float0 for leaf in leaves)


def derivative_alone(cls: type) -> ValueError:
    """The error for a derivative as JAX returns it, whose pattern is missing."""
    return ValueError(
        f"The derivative of a function that returns {a_or_an(cls.__qualname__)} was used as an array. JAX "
        "gives leaves that are not inexact, such as indices or codes, no tangents, so it stands for none. "
        "Differentiate a function that returns an array, `quaxlike.materialise(...)`, or use the leaves of "
        "the derivative."
    )


def as_dense(out: Any, hook: str) -> Any:
    """What a hook made of a Value: an array, or another Value. Numbers and NumPy arrays become JAX arrays."""
    if isinstance(out, bool | int | float | complex | np.ndarray | np.generic):
        return jnp.asarray(out)
    if not hasattr(out, "shape") and not isinstance(type(out), ValueMeta):
        raise TypeError(f"{hook}() must return an array; found {out!r}.")
    return out


# For each class that was instantiated: the names of its fields if constructing it only sets them, else None.
# (JAX's registry of pytrees keeps these classes alive in any case.)
_plain_fields: dict[type, tuple[str, ...] | None] = {}


def _fields_if_plain(cls: type) -> tuple[str, ...] | None:
    fields = dataclasses.fields(cls)
    sets_fields_only = (
        _sets_fields(cls)
        and not any("__check_init__" in vars(base) for base in cls.__mro__)
        and all(f.init and f.default_factory is dataclasses.MISSING for f in fields)
        and not any("converter" in f.metadata for f in fields)
    )
    return tuple(f.name for f in fields) if sets_fields_only else None


def _sets_fields(cls: type) -> bool:
    """Whether `__init__` was generated by `dataclasses`, and nothing else runs to make an instance."""
    return (
        # Dataclasses compile the `__init__` that they generate from a string.
        getattr(cls.__init__, "__code__", None) is not None
        and cls.__init__.__code__.co_filename == "<string>"
        and cls.__new__ is eqx.Module.__new__
        and not hasattr(cls, "__post_init__")
    )


def _made(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes an instance as Equinox would."""
    instance = object.__new__(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init]
    given = dict(zip([f.name for f in fields if not f.kw_only], args, strict=False)) | kwargs
    for f in fields:
        part = given.get(f.name, f.default)
        if part is dataclasses.MISSING:
            part = f.default_factory()  # pyright: ignore[reportCallIssue]
        converter = f.metadata.get("converter")
        object.__setattr__(instance, f.name, part if converter is None else converter(part))
    for base in cls.__mro__:
        if "__check_init__" in vars(base):
            vars(base)["__check_init__"](instance)
    return instance


def _check_statics(value: Any) -> None:
    for name in _static_fields(type(value)):
        static = getattr(value, name, None)
        try:
            hash(static)
        except TypeError:
            if any(isinstance(x, jax.Array | np.ndarray) for x in leaves_of(static)):
                raise TypeError(
                    f"{type(value).__name__}.{name} is a static field, so it cannot hold an array; "
                    f"found {static!r}. Leave out `static=True`."
                ) from None


@functools.cache
def _static_fields(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.metadata.get("static", False))


def leaves_of(static: Any) -> list[Any]:
    """The leaves of a static field, whose dictionaries may have keys that cannot be sorted."""
    if isinstance(static, dict):
        return [leaf for part in (*static.keys(), *static.values()) for leaf in leaves_of(part)]
    if isinstance(static, list | tuple | set | frozenset):
        return [leaf for part in static for leaf in leaves_of(part)]
    return jtu.tree_leaves(static)
