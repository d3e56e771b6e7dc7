"""Better error messages for public functions called with invalid arguments.

The messages are derived from the function's annotations. To avoid slowing down tracing and successful calls,
arguments are only checked once a call has failed. (Errors raised by quaxlike itself are passed on unchanged:
they are more specific than anything derived from an annotation.)
"""

import difflib
import dis
import functools
import inspect
import math
import numbers
import re
import reprlib
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import jax
import numpy as np
from jax.typing import ArrayLike

if TYPE_CHECKING:
    PyTree = Any  # pyright doesn't understand jaxtyping's PyTree
else:
    from jaxtyping import PyTree as PyTree

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_HERE = str(Path(__file__).parent)
_RAISE = dis.opmap["RAISE_VARARGS"]


@overload
def checked(fn: Callable[_P, _T]) -> Callable[_P, _T]: ...
@overload
def checked(*, options: Sequence[str]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def checked(fn: Any = None, *, options: Sequence[str] = ()) -> Any:
    """Wraps a function, so its errors name the argument not matching its annotation.

    There is no overhead if the call succeeds. Errors raised by quaxlike itself are passed on unchanged.

    **Arguments:**

    - `options`: the names of arguments to check before the call. Use this if the call wouldn't fail for an
        invalid value (for example, `"no"` is truthy), or would only fail much later. See `check_option`.
    """
    if fn is None:
        return functools.partial(checked, options=options)

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if options:
            _check_options(fn, options, args, kwargs)
        try:
            return fn(*args, **kwargs)
        except Exception as error:
            message = None if _is_ours(error.__traceback__) else _wrong_argument(fn, args, kwargs)
            if message is None:
                raise
            cause = error
        raise TypeError(message) from cause

    return wrapper


def _check_options(fn: Callable[..., Any], options: Sequence[str], args: Any, kwargs: Any) -> None:
    try:
        given = inspect.signature(fn).bind(*args, **kwargs).arguments
    except TypeError:  # arguments don't match the signature: the call itself will raise
        return
    hints = typing.get_type_hints(fn)
    for option in options:
        if option in given and not (given[option] is None and type(None) in typing.get_args(hints[option])):
            check_option(fn.__name__, option, given[option], hints[option])


def check_option(function: str, option: str, value: Any, hint: Any) -> None:
    """Raises an error if an option's value doesn't match its annotation.

    The range is also checked: integers must be at least 1, and all other numbers finite and positive. In a
    mapping to numbers, this applies to each value.
    """
    origin, kinds = typing.get_origin(hint), typing.get_args(hint)
    given: Any = value
    is_several = isinstance(value, Iterable) and not isinstance(value, str)
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if origin is typing.Literal:
        if value not in kinds:
            listed = ", ".join(map(repr, kinds))
            raise ValueError(f"{function} takes one of {listed} as {option}; found {value!r}.")
        return
    if hint is bool:
        wanted, fits = "True or False", isinstance(value, bool)
    elif origin is Mapping:
        wanted, fits = "a mapping", isinstance(value, Mapping)
    elif origin is Sequence and kinds == (str,):
        wanted, fits = "a sequence of names", is_several and all(isinstance(x, str) for x in given)
    elif origin is Sequence:
        wanted, fits = "a sequence", is_several and hasattr(value, "__len__")
    elif float in kinds:
        wanted, fits = "a number", is_number
    else:
        wanted, fits = "a whole number", is_number and isinstance(value, numbers.Integral)
    if not fits:
        example = f" Write [{value!r}]." if kinds == (str,) and isinstance(value, str) else ""
        raise TypeError(f"{function} takes {wanted} as {option}; found {value!r}.{example}")
    if origin is Mapping and kinds[1] in (int, float | int):
        for key, entry in given.items():
            check_option(function, f"{option}[{key!r}]", entry, kinds[1])
    elif wanted == "a whole number" and given < 1:
        raise ValueError(f"{function} takes a {option} of at least 1; found {value}.")
    elif wanted == "a number" and not (math.isfinite(given) and given > 0):
        raise ValueError(f"{function} takes a finite {option} above 0; found {value}.")


def _is_ours(traceback: TracebackType | None) -> bool:
    """Returns whether the innermost frame is a `raise` statement in quaxlike, i.e. the error is ours."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return False
    code = traceback.tb_frame.f_code
    return code.co_filename.startswith(_HERE) and code.co_code[traceback.tb_lasti] == _RAISE


def _wrong_argument(fn: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Returns an error message for the first argument not matching its annotation, or None."""
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
        hints = typing.get_type_hints(fn)
    except (NameError, TypeError):
        return None
    kinds = inspect.signature(fn).parameters
    for name, value in bound.arguments.items():
        if value is None and kinds[name].default is None:
            continue
        wanted = _wanted(name, value, hints.get(name, Any))
        if kinds[name].kind in _SEVERAL or wanted is None:
            continue
        found = reprlib.repr(value)
        kind = "" if isinstance(value, str | int | float | None) else f", of type {type(value).__name__}"
        owner = fn.__qualname__.removesuffix(".__init__")
        if args and isinstance(args[0], type) and hasattr(args[0], fn.__name__):  # a classmethod
            owner = f"{args[0].__name__}.{fn.__name__}"
        return f"{owner}: `{name}` must be {wanted}; found {found}{kind}."
    return None


def _wanted(name: str, value: Any, hint: Any) -> str | None:
    """Describes what an argument should have been, or returns None if it matches its annotation."""
    from beartype.door import is_bearable  # slow to import

    if isinstance(value, np.ndarray) and value.dtype.kind in "OSU":
        return "an array of numbers"
    if name in _BY_NAME:
        words, fits = _BY_NAME[name]
        return None if _fits(fits, value) else words
    return None if _fits(lambda x: is_bearable(x, hint), value) else _words(hint)


def _fits(test: Callable[[Any], Any], value: Any) -> bool:
    try:
        return test(value) is not False
    except (AttributeError, TypeError, ValueError):
        return False
    except Exception:  # the annotation uses names only defined for type checkers
        return True


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(x, "dtype", None), jax.dtypes.prng_key) or (
        getattr(x, "dtype", None) == np.uint32 and len(x.shape) > 0
    )


# Some annotations are wider than what the function actually accepts.
_BY_NAME: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(["key", "rng"], ("a key of `jax.random`", _is_key)),
    **dict.fromkeys(["dtype", "out_dtype"], ("a dtype", lambda x: jax.numpy.zeros(0, x))),
    "mesh": ("a mesh of devices", lambda x: isinstance(x.shape, Mapping)),
    "magnitude": ("an array", lambda x: x.shape),
    "static_argnums": ("whole numbers", lambda x: isinstance(x, int) or all(isinstance(i, int) for i in x)),
}


def _words(hint: Any) -> str:
    if hint == ArrayLike:
        return "an array or a number"
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


def did_you_mean(
    name: str,
    known: Iterable[str],
    *,
    n: int = 3,
    cutoff: float = 0.6,
    show: Callable[[str], str] = repr,
) -> str:
    """Returns a suggestion of similar names to append to an error message, or an empty string."""
    near = dict.fromkeys(map(show, difflib.get_close_matches(name, list(known), n, cutoff)))
    return f" Did you mean {' or '.join(near)}?" if near else ""


def is_finite(x: Any) -> bool:
    """Returns whether `x` is a finite Python `int` or `float`."""
    return type(x) in (int, float) and abs(x) <= sys.float_info.max
