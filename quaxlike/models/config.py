"""A checkpoint's `config.json`: the entries that a model reads, and what it refuses."""

import dataclasses
import sys
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

_C = TypeVar("_C", bound="Config")


class UnsupportedConfigError(ValueError):
    """A checkpoint asks for something that the models of this library do not do."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The entries of `config.json` that shape a model; subclasses name them."""

    @classmethod
    def read(cls: type[_C], config: Mapping[str, Any], label: str = "", **required: Any) -> _C:
        """Takes its fields from `config`, with their defaults where absent.

        **Arguments:**

        - `config`: the entries by name.
        - `label`: what error messages call the model. Default: the name of the class.
        - `required`: values that other entries must have where they are given. A tuple lists several.

        **Raises:**

        `UnsupportedConfigError` for an entry with another value, or a missing one without a default.
        """
        label = label or cls.__name__
        for name, allowed in required.items():
            allowed = allowed if isinstance(allowed, tuple) else (allowed,)
            if name in config and config[name] not in allowed:
                raise refused(name, config[name], label, " or ".join(map(repr, allowed)))
        values, hints = {}, typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if (value := config.get(field.name)) is not None:
                if not _fits(value, hint := hints[field.name]):
                    raise UnsupportedConfigError(
                        f"config.json has {field.name}={value!r}; {label} needs {_NEEDS[hint]}."
                    )
                values[field.name] = value
            elif field.default is dataclasses.MISSING:
                raise UnsupportedConfigError(f"config.json has no {field.name}, which {label} needs.")
        return cls(**values)


def refused(name: str, found: Any, label: str, supported: str) -> UnsupportedConfigError:
    """The error for an entry whose value no model supports."""
    return UnsupportedConfigError(f"config.json has {name}={found!r}; {label} supports {supported}.")


_NEEDS: dict[Any, str] = {
    int: "a whole number that is not negative, and below 2**31",
    float | int: "a finite number",
    bool: "true or false",
}


def _fits(value: Any, hint: Any) -> bool:
    if hint is int:
        return type(value) is int and 0 <= value < 2**31
    if hint is bool:
        return type(value) is bool
    return hint != float | int or (type(value) in (int, float) and abs(value) <= sys.float_info.max)
