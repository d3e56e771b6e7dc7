"""Fast construction of Values, with a check for arrays in static fields.

The fast path must create the same instance as Equinox, so it's only for classes constructed by just setting
their fields.

The check makes every Value usable as a cache key. Arrays aren't hashable: without it, an array in a static
field would make `jit` fail, with an error unrelated to the actual mistake.
"""

import copyreg
import dataclasses
import functools
import typing
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from . import compat


class _Making(type):
    """Runs `__new__` and `__init__` for Equinox's metaclass, but skips `__init__` if Python would skip it.

    `__new__` may return an object of another class, for which `__init__` mustn't run at all, or an instance
    it created earlier, for which it mustn't run again.
    """

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__new__ is eqx.Module.__new__:
            return super().__call__(*args, **kwargs)
        instance = cls.__new__(cls, *args, **kwargs)
        if cls not in type(instance).__mro__ or _is_frozen(instance):
            raise _NotToInitialise(instance)
        instance.__init__(*args, **kwargs)
        return instance


class QuickMeta(type(eqx.Module), _Making):
    """Quickly creates Values.

    Equinox's metaclass would dominate the cost of an eager operation, so we bypass it from the second
    instance onwards. (Equinox still checks each class once.) This is only for classes constructed by just
    setting their fields: the class doesn't define `__init__`, `__new__`, `__post_init__` or `__check_init__`,
    and no field has a converter or a default factory.
    """

    def __new__(mcs, *args: Any, **kwargs: Any) -> Any:
        if hasattr(mcs, "__concrete_class__"):  # `plum.parametric` creates a metaclass for each class
            copyreg.pickle(mcs, _pickled)
        return super().__new__(mcs, *args, **kwargs)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        names = _plain_fields.get(cls)
        if names is None or len(args) != len(names) or kwargs:
            try:
                instance = super().__call__(*args, **kwargs)
            except _NotToInitialise as found:
                return found.instance
            except ValueError as error:
                # Equinox flattens all arguments as pytrees, even for static fields, but JAX refuses to
                # flatten a dictionary with unsortable keys.
                if not compat.has_unsortable_keys(error) or not _sets_fields(cls):
                    raise
                instance = _made(cls, args, kwargs)
            _check_statics(instance)
            if cls not in _plain_fields:
                _plain_fields[cls] = _fields_if_plain(cls)
            return instance
        instance: Any = object.__new__(cls)
        for i, name in enumerate(names):  # `zip(..., strict=True)` would take twice as long
            object.__setattr__(instance, name, args[i])
        if _static_fields(type(instance)):
            _check_statics(instance)
        return instance


def _pickled(cls: Any) -> Any:
    """Pickles a class created by `plum.parametric`.

    `P["m"]` is not an attribute of any module, so it's pickled as `P` and the parameter. All other classes
    are pickled by name.
    """
    if not vars(cls).get("_concrete"):
        return cls.__qualname__
    return _of_parameter, (cls.__bases__[0], cls.type_parameter)


def _of_parameter(cls: Any, parameter: Any) -> Any:
    return cls.__new__(cls, *(parameter if isinstance(parameter, tuple) else (parameter,)))


class _NotToInitialise(Exception):
    """Passes the result of `__new__` through Equinox, which would otherwise go on to initialise it."""

    def __init__(self, instance: Any) -> None:
        super().__init__(instance)
        self.instance = instance


def _is_frozen(instance: Any) -> bool:
    name = next((f.name for f in dataclasses.fields(instance) if hasattr(instance, f.name)), None)
    if name is None:
        return False
    try:
        setattr(instance, name, getattr(instance, name))
    except dataclasses.FrozenInstanceError:
        return True
    return False


# For each class instantiated so far: its field names if construction only sets these, otherwise None. (This
# leaks no memory: JAX's pytree registry keeps these classes alive in any case.)
_plain_fields: dict[type, tuple[str, ...] | None] = {}


def _fields_if_plain(cls: type) -> tuple[str, ...] | None:
    fields = dataclasses.fields(cls)
    sets_fields_only = (
        _sets_fields(cls)
        and not any("__check_init__" in vars(base) for base in cls.__mro__)
        and all(f.init and not f.kw_only and f.default_factory is dataclasses.MISSING for f in fields)
        and not any("converter" in f.metadata for f in fields)
    )
    return tuple(f.name for f in fields) if sets_fields_only else None


def _sets_fields(cls: type) -> bool:
    """Returns whether `__init__` was generated by `dataclasses`, and nothing else runs on construction."""
    return (
        # `dataclasses` compiles a generated `__init__` from a string.
        getattr(cls.__init__, "__code__", None) is not None
        and cls.__init__.__code__.co_filename == "<string>"
        and cls.__new__ is eqx.Module.__new__
        and not hasattr(cls, "__post_init__")
    )


def _made(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Creates an instance like Equinox, but without flattening any arguments."""
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
        if isinstance(type(static), QuickMeta) and any(map(eqx.is_array_like, jtu.tree_leaves(static))):
            raise TypeError(
                f"{type(value).__name__}.{name} is a static field, so it cannot hold a Value with arrays; "
                f"found {type(static).__name__}. Leave out `static=True`."
            )
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
    """Returns the leaves of a static field, even if its dictionaries have unsortable keys."""
    if isinstance(static, dict):
        return [leaf for part in (*static.keys(), *static.values()) for leaf in leaves_of(part)]
    if isinstance(static, list | tuple | set | frozenset):
        return [leaf for part in static for leaf in leaves_of(part)]
    return jtu.tree_leaves(static)


# The hooks and properties of Values, by name; core/values.py fills them in.
HOOKS: dict[str, Any] = {}


def check_field_names(cls: Any) -> None:
    """Raises a `TypeError` if a field of a new class has the name of a hook or a property of Values.

    It would be read in place of the hook, or couldn't be set. A hook with an annotation, such as
    `linear: bool = True`, is no field of data, having a value.
    """
    if (annotations := vars(cls).get("__annotations__")) is None:
        return
    for name, annotation in annotations.items():
        if typing.get_origin(annotation) is typing.ClassVar or "ClassVar" in str(annotation):
            continue
        if name not in HOOKS or name.startswith("_"):
            continue
        given = vars(cls).get(name, dataclasses.MISSING)
        given = given.default if isinstance(given, dataclasses.Field) else given
        hook = HOOKS[name]
        has_value = isinstance(hook, property) or not isinstance(hook, bool | int | str | None)
        if isinstance(given, bool | int | str | None) and not has_value:
            continue
        what = "property" if isinstance(hook, property) else "hook"
        raise TypeError(
            f"{cls.__name__} has a field {name!r}, which is the name of a {what} that every Value has. "
            "Give the field another name."
        )
