"""The `config.json` entries for a model, along with checks for unsupported values.

These must raise an error: otherwise the model would still load, but compute incorrect logits.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from ..._checked import is_finite
from ...files.errors import ErrorAboutFiles, quoted, shortened

_C = TypeVar("_C", bound="Config")


class UnsupportedConfigError(ErrorAboutFiles):
    """Raised if a checkpoint requires an unsupported feature."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Base class for configurations. The fields are a model's `config.json` entries."""

    @classmethod
    def read(cls: type[_C], config: Mapping[str, Any], label: str = "", **required: Any) -> _C:
        """Reads the fields from `config`. Missing entries have their default values.

        `required` maps additional entries to their only supported value (or to a tuple of values).

        **Raises:** `UnsupportedConfigError` if a value isn't supported, or if an entry without a default is
        missing. The error message includes `label`.
        """
        label = label or cls.__name__
        for name, allowed in required.items():
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            if name in config and config[name] not in allowed:
                raise refused(name, config[name], label, " or ".join(map(repr, allowed)))
        values, hints = {}, typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if (value := config.get(field.name)) is not None:
                needed, fits = _KINDS.get(hints[field.name], ("", lambda x: True))
                if not fits(value):
                    raise UnsupportedConfigError(
                        f"config.json has {field.name}={quoted(value)}; {label} needs {needed}."
                    )
                values[field.name] = value
            elif field.default is dataclasses.MISSING:
                raise UnsupportedConfigError(f"config.json has no {field.name}, which {label} needs.")
        return cls(**values)

    def known_entries(self) -> set[str]:
        """Returns the names of all entries either read or checked."""
        return {field.name for field in dataclasses.fields(self)}


def refused(name: str, found: Any, label: str, supported: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"config.json has {name}={quoted(found)}; {label} supports {supported}.")


def whole(entries: Mapping[str, Any], name: str, default: Any, label: str) -> Any:
    """Reads an optional integer. Raises `UnsupportedConfigError` if the entry has any other value."""
    value = entries.get(name)
    if value is not None and (type(value) is not int or value < 0):
        raise refused(name, value, label, "whole numbers that are not negative")
    return default if value is None else value


#: Whether each kind of attention uses a sliding window.
ATTENTION = {"full_attention": False, "sliding_attention": True}


def kinds_of(types: Any, layers: int, label: str, known: Mapping[str, Any] = ATTENTION) -> tuple[str, ...]:
    """Reads each layer's kind from the entry `layer_types`.

    **Raises:** `UnsupportedConfigError` if the entry is invalid.
    """
    are_known = isinstance(types, list) and all(isinstance(x, str) and x in known for x in types)
    if not are_known or len(types) != layers:
        raise refused("layer_types", types, label, f"{' or '.join(known)} for each of {layers} layers")
    return tuple(types)


def check_numbers(entries: Mapping[str, Any], names: Iterable[str], label: str) -> None:
    """Raises `UnsupportedConfigError` if any of these entries is present but isn't a number."""
    for name in names:
        value = entries.get(name)
        if value is not None and not (is_finite(value) and value >= 0):
            raise refused(name, value, label, "finite numbers that are not negative")


@contextlib.contextmanager
def computing(entries: Mapping[str, Any], kind: str, label: str) -> Iterator[None]:
    """Converts errors from computing with these entries to an `UnsupportedConfigError`."""
    try:
        with np.errstate(divide="raise", invalid="raise", over="raise"):
            yield
    except KeyError as error:
        raise UnsupportedConfigError(
            f"config.json has no {error} among its {kind}: {quoted(entries)}."
        ) from None
    except UnsupportedConfigError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:
        raise UnsupportedConfigError(
            f"config.json has {kind} that {label} cannot compute with: {shortened(str(error))}. "
            f"Found {quoted(entries)}."
        ) from None


_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: (
        "a whole number that is not negative, and below 2**31",
        lambda x: type(x) is int and 0 <= x < 2**31,
    ),
    float | int: ("a finite number", is_finite),
    bool: ("true or false", lambda x: type(x) is bool),
}
