"""Finds the user's own lines and frames, as opposed to those of JAX, libraries and this package.

Messages must point to a line in the user's code, never to one of JAX or this package. Both are identified by
the folders they are installed in.
"""

import functools
import importlib.util
import os
import pathlib
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.extend.core as jexc

from . import compat

# The whole package except its programs: hidden from tracebacks, and never reported as the user's code.
_OURS = tuple(
    f"{path}{os.sep}" if path.is_dir() else str(path)
    for path in sorted(pathlib.Path(__file__).parents[1].iterdir())
    if path.name != "demo"
)
for _path in _OURS:
    compat.hide_file(_path)


class SourceLine(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function.rpartition('<locals>.')[2]})"


def source_lines() -> Iterator[SourceLine]:
    """Returns the lines being executed outside JAX and this package, innermost first.

    When a jaxpr's equation is evaluated, its own lines aren't on Python's stack. Instead, each equation
    records the lines at which it was staged.
    """
    yield from _recorded_lines(compat.current_traceback())
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield from _lines_in(frame, frame.f_lineno)
        frame = frame.f_back


def lines_of_error(error: BaseException) -> list[SourceLine]:
    """Returns the lines of an error's traceback outside JAX and this package, innermost first."""
    frames = reversed([*traceback.walk_tb(error.__traceback__)])
    return [line for frame, number in frames for line in _lines_in(frame, number)]


def _lines_in(frame: types.FrameType, number: int) -> Iterator[SourceLine]:
    """Returns this frame's line or, if it is interpreting an equation, the lines staging the equation."""
    file = frame.f_code.co_filename
    if not is_internal(file):
        yield SourceLine(file, number, frame.f_code.co_qualname)
    else:
        yield from _recorded_lines(compat.traceback_of_equation(frame))


def lines_of(eqn: jexc.JaxprEqn) -> Iterator[SourceLine]:
    """Returns the lines outside JAX and this package where an equation was staged, innermost first."""
    return _recorded_lines(eqn.source_info.traceback)


def _recorded_lines(recorded: Any) -> Iterator[SourceLine]:
    if recorded is not None:
        for frame in recorded.frames:
            if not is_internal(frame.file_name):
                yield SourceLine(frame.file_name, frame.line_num, frame.function_name)


def _folders(*packages: str) -> tuple[str, ...]:
    specs: Any = map(importlib.util.find_spec, packages)
    return tuple(f"{pathlib.Path(spec.origin).parent}{os.sep}" for spec in specs)


# Libraries wrapping functions only to check the types of their arguments.
_CHECKERS = (*_folders("jaxtyping", "beartype"), "<@beartype")
_MACHINERY = (*_folders("jax", "jaxlib"), *_CHECKERS)


def calling_frame() -> types.FrameType:
    """Returns the frame of our caller's caller. Skips frames that only check annotations."""
    frame: Any = sys._getframe(0)  # pyright: ignore[reportPrivateUsage]
    for _ in range(2):
        frame = frame.f_back
        while frame.f_code.co_filename.startswith(_CHECKERS):
            frame = frame.f_back
    return frame


_STDLIB = f"{pathlib.Path(os.__file__).parent}{os.sep}"


@functools.cache
def is_internal(file: str) -> bool:
    # Without a virtual environment, third-party libraries are inside the standard library's folder.
    is_standard = file.startswith(_STDLIB) and "-packages" not in file
    return is_standard or file.startswith((*_MACHINERY, *_OURS, "<frozen "))


def is_library(file: str) -> bool:
    """Returns whether a file belongs to an installed library, rather than to the user's own code."""
    return f"-packages{os.sep}" in file


def shorten_traceback(error: Exception) -> None:
    """Cuts the traceback at the user's last frame.

    For errors with this line in their message.
    """
    if not compat.drops_frames(error):
        return
    kept = None
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if kept is not None or not (is_internal(file) or is_library(file)):
            kept = types.TracebackType(kept, frame, frame.f_lasti, line)
    error.__traceback__ = kept
