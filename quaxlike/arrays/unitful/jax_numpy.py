"""Detects calls of jax.numpy functions, because some use constants that match any unit.

For example, `jnp.histogram` widens an empty range by adding a plain constant to a quantity: an error in user
code. By the time a primitive is bound, the constant is indistinguishable from any other, so there's no other
way to detect this.
"""

import inspect
import os
import sys
from typing import Any

import jax.numpy as jnp

from ...core import compat
from ...core.source_lines import is_internal

_JAX_NUMPY = os.path.dirname(inspect.getfile(inspect.unwrap(jnp.isclose))) + os.sep


def functions_of_jax_numpy() -> list[str]:
    """Returns the names of the jax.numpy functions being called, innermost first.

    This walks the Python stack. For a jaxpr being interpreted, it includes the function it was traced from.
    """
    found: list[str] = []
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        calls = [(frame.f_code.co_filename, frame.f_code.co_name)]
        jaxpr = frame.f_locals.get("jaxpr")
        if jaxpr is not None and is_internal(frame.f_code.co_filename):
            recorded = compat.traceback_of_equation(frame)
            calls = [(f.file_name, f.function_name) for f in recorded.frames] if recorded is not None else []
            own = _function_of(jaxpr)
            # JAX caches traces, so callers further up are those of the first trace, and may have nothing to
            # do with the current call.
            calls = [*calls[: calls.index(own) if own in calls else None], own]
        found += [name for file, name in calls if file and file.startswith(_JAX_NUMPY)]
        frame = frame.f_back
    return found


def is_from_jax_numpy(jaxpr: Any, name: str) -> bool:
    """Returns whether a jaxpr was traced from this jax.numpy function."""
    file, function = _function_of(jaxpr)
    return function == name and bool(file) and file.startswith(_JAX_NUMPY)


def _function_of(jaxpr: Any) -> tuple[str | None, str]:
    info = compat.debug_info_of(jaxpr)
    return info.func_filename, info.func_name
