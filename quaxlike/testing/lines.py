"""Finds the line at which a program starts to treat Values differently from arrays."""

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.tree_util as jtu
import numpy as np

from ..core.source_lines import SourceLine, is_internal, is_library, lines_of_error
from .compare import disagreement
from .refusing import reveal

_MOST_STEPS, _MOST_SECONDS = 100_000, 10.0
_DERIVATIVES = "custom_derivatives.py"  # JAX calls the functions in this file at unpredictable times


def line_of(error: BaseException) -> str:
    """Returns the user's line that raised an error, and the library it called. This is empty if unknown."""
    return _shown(lines_of_error(error))


def _shown(lines: Iterable[SourceLine]) -> str:
    lines = list(lines)
    own = next((line for line in lines if not is_library(line.file)), None)
    through = lines[0] if lines and is_library(lines[0].file) else None
    if own is None:
        return "" if through is None else str(through)
    return str(own) + (f", which calls {through}" if through else "")


class _Executed(NamedTuple):
    """A line about to be executed, or a function about to return."""

    at: SourceLine
    frame: int  # frames are numbered in the order of their calls
    caller: tuple[SourceLine, ...]  # the lines of the calls leading here, innermost first
    new: dict[str, Any]  # the local variables set by the preceding line, or the return value


class _Enough(Exception):
    pass


class _Run:
    """Runs a function and records each line executed outside JAX and this package."""

    def __init__(self, run: Callable[[], Any], fn: Callable[..., Any]) -> None:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        self._package = _package(code.co_filename) if code else ""
        self.steps: list[_Executed] = []
        self._frames: dict[Any, tuple[int, dict[str, Any]]] = {}
        self._ends = time.monotonic() + _MOST_SECONDS
        before = sys.gettrace()
        with jax.disable_jit():
            try:
                sys.settrace(self._enter)
                self._top = sys._getframe()  # pyright: ignore[reportPrivateUsage]
                run()
            except Exception:  # keep the steps recorded so far
                pass
            finally:
                sys.settrace(before)
        self._frames.clear()

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        if time.monotonic() > self._ends or len(self.steps) > _MOST_STEPS:
            raise _Enough
        if is_internal(frame.f_code.co_filename) or self._callers(frame) is None:
            return None
        self._frames[frame] = len(self._frames), {}
        return self._step

    def _callers(self, frame: Any) -> tuple[SourceLine, ...] | None:
        """Returns the lines of the calls leading to a frame, or None if it wasn't called by the program.

        For example, JAX may call a function any number of times to differentiate it, and other packages may
        call functions for their own purposes. Neither says anything about the program.
        """
        called, direct = frame.f_code.co_filename, True
        callers: list[SourceLine] = []
        while (frame := frame.f_back) is not None and frame is not self._top:
            code = frame.f_code
            if frame in self._frames:
                if not (callers or direct or _package(called) in ("", _package(code.co_filename))):
                    return None
                callers.append(SourceLine(code.co_filename, frame.f_lineno, code.co_qualname))
            elif code.co_filename.endswith(_DERIVATIVES) or not is_internal(code.co_filename):
                return None
            direct = False
        own = callers or _package(called) in ("", self._package)
        return tuple(callers) if own else None

    def _step(self, frame: Any, event: str, arg: Any) -> Any:
        if event not in ("line", "return"):
            return self._step
        number, known = self._frames[frame]
        current = dict(frame.f_locals)
        new = {k: _kept(v) for k, v in current.items() if k not in known or known[k] is not v}
        known.clear()
        known.update(current)
        if event == "return":
            new["the result"] = _kept(arg)
        code = frame.f_code
        at = SourceLine(code.co_filename, frame.f_lineno, code.co_qualname)
        self.steps.append(_Executed(at, number, self._callers(frame) or (), new))
        return self._step


def _package(file: str) -> str:
    """Returns a file's library. This is "<...>" for generated code, and empty for anything else."""
    if file.startswith("<"):
        return file
    return file.rpartition(f"-packages{os.sep}")[2].split(os.sep)[0] if is_library(file) else ""


def _kept(x: Any) -> Any:
    return x.copy() if isinstance(x, np.ndarray) else x


def first_difference(
    fn: Callable[..., Any], plain: Callable[[], Any], other: Callable[[], Any], *, numbers: bool = True
) -> tuple[str, str]:
    """Compares two runs of a function, line by line.

    **Arguments:**

    - `numbers`: whether to compare local variables as well, rather than just which lines are executed.

    **Returns:** the line after which the runs differ, and how they differ. Both are empty if the runs don't
    differ, or if it takes too long to find out.
    """
    runs = _Run(plain, fn).steps, _Run(other, fn).steps
    last: dict[int, _Executed] = {}
    before: _Executed | None = None
    for a, b in zip(*runs, strict=False):
        if a.at != b.at or a.frame != b.frame:
            if before is None:
                return "", ""
            return _where(before), f"goes on to line {b.at.line} instead of {a.at.line}"
        if numbers and (text := _differ(a.new, b.new)):
            returned = "the result" in a.new and text.startswith("`the result`")
            return _where(a if returned else last.get(a.frame, a)), text.replace("`the result`", "the result")
        last[a.frame] = before = a
    return "", ""


def _where(step: _Executed) -> str:
    return _shown((step.at, *step.caller))


def _differ(expected: dict[str, Any], found: dict[str, Any]) -> str:
    for name, x in expected.items():
        if name in found and (text := _difference(found[name], x)):
            return f"`{name}` is other: {text}"
    return ""


def _difference(found: Any, expected: Any) -> str:
    if isinstance(expected, bool | int | float | complex | str) and type(found) is type(expected):
        same = found == expected or found != found
        return "" if same else f"{found!r} instead of {expected!r}"
    try:
        pair = [_numbers(reveal(x)) for x in (found, expected)]
        return str(disagreement(*pair) or "") if pair[0].keys() == pair[1].keys() else ""
    except Exception:  # these aren't pytrees of arrays
        return ""


def _numbers(tree: Any) -> dict[str, Any]:
    """Returns the concrete arrays in a tree, keyed by path."""

    def concrete(x: Any) -> Any:
        return isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)

    return {jtu.keystr(path): x for path, x in jtu.tree_leaves_with_path(tree) if concrete(x)}
