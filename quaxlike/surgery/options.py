"""Checks of options for functions on models, whose errors name function, option and accepted values."""

import math
import numbers
from collections.abc import Iterable, Mapping, Sized
from typing import Any


def check_rank(function: str, option: str, value: Any) -> None:
    """Raises unless the value is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{function} takes a whole number as {option}; found {value!r}.")
    if int(value) < 1:
        raise ValueError(f"{function} takes a {option} of at least 1; found {value}.")


def check_scale(function: str, option: str, value: Any) -> None:
    """Raises unless the value is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{function} takes a number as {option}; found {value!r}.")
    if not (math.isfinite(value) and float(value) > 0):
        raise ValueError(f"{function} takes a finite {option} above 0; found {value}.")


def check_flags(function: str, **flags: Any) -> None:
    """Raises unless all values are booleans: a string such as "no" counts as true elsewhere."""
    for option, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function} takes True or False as {option}; found {value!r}.")


def check_choice(function: str, option: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises unless the value is one of the choices."""
    if value not in choices:
        listed = ", ".join(map(repr, choices))
        raise ValueError(f"{function} takes one of {listed} as {option}; found {value!r}.")


def check_mapping(function: str, option: str, value: Any) -> None:
    """Raises unless the value is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{function} takes a mapping as {option}; found {value!r}.")


def check_several(function: str, option: str, value: Any) -> None:
    """Raises unless the value is a list or another sequence."""
    if not isinstance(value, Iterable) or not isinstance(value, Sized) or isinstance(value, str):
        raise TypeError(f"{function} takes a sequence as {option}; found {value!r}.")


def check_names(function: str, option: str, value: Any) -> None:
    """Raises unless the value is a sequence of names; a string would be a sequence of letters."""
    if isinstance(value, str):
        raise TypeError(
            f"{function} takes a sequence of names as {option}; found {value!r}. Write [{value!r}]."
        )
    if not isinstance(value, Iterable) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{function} takes a sequence of names as {option}; found {value!r}.")
