"""Runs programs in each mode, both on a value and on its materialised array.

Most of the time in `check_type` is spent on compilation, so many programs are compiled together. If this
fails then the group is bisected to find the program responsible.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ..core.quaxify import quaxify
from .compare import weighted_sum
from .hooks import Subject
from .programs import Program
from .refusing import reveal

Results = dict[tuple[str, str], Any]
"""Maps each program and mode to either a pytree of arrays or the exception that was raised."""


def _vmap(run: Any, subject: Subject) -> Any:
    out = jax.vmap(quaxify(run), axis_size=2)(subject.stack())
    return jax.vmap(reveal, axis_size=2)(out)


def _grad(run: Any, subject: Subject) -> Any:
    varied, build = subject.varied()
    return jax.grad(lambda leaves: weighted_sum(reveal(quaxify(run)(build(leaves)))))(varied)


def _run(run: Any, subject: Subject) -> Any:
    return reveal(quaxify(run)(subject.value))


ON_VALUE: dict[str, Callable[[Any, Subject], Any]] = {
    "eager": _run,
    "jit": _run,
    "vmap": _vmap,
    "grad": _grad,
}

_ON_ARRAY: dict[str, Callable[[Any, Any], Any]] = {
    "jit": lambda run, arrays: run(arrays[0]),
    "vmap": lambda run, arrays: jax.vmap(run)(arrays[1]),
    "grad": lambda run, arrays: jax.grad(lambda x: weighted_sum(run(x)))(arrays[0]),
}

_MOST = 24  # the maximum number of programs to compile together


def run_all(table: Mapping[str, Program], on: Callable[[str, Program, Any], Any], value: Any) -> Results:
    """Runs `on(mode, program, value)` for each program and mode. Modes other than "eager" are compiled."""
    found: Results = {}
    for name, program in table.items():
        if "eager" in program.modes:
            try:
                found[name, "eager"] = on("eager", program, value)
            except Exception as error:
                found[name, "eager"] = error
    return found | _compiled(tuple(table.items()), on, value)


def _compiled(programs: tuple[tuple[str, Program], ...], on: Any, value: Any) -> Results:
    if len(programs) > _MOST:
        return _halves(programs, on, value)
    errors: Results = {}
    if not programs:
        return errors
    run = jax.jit(functools.partial(_each, programs, on, errors))
    try:
        out = run(value)
    except Exception as error:  # raised either during compilation or at run time
        if len(programs) > 1:
            return _halves(programs, on, value)
        name, program = next(iter(programs))
        modes = [mode for mode in program.modes if mode != "eager"]
        if len(modes) == 1:
            return {(name, modes[0]): error}
        for mode in modes:
            errors |= _compiled(((name, dataclasses.replace(program, modes=(mode,))),), on, value)
        return errors
    return errors | out


def _halves(programs: tuple[tuple[str, Program], ...], on: Any, value: Any) -> Results:
    half = len(programs) // 2
    return _compiled(programs[:half], on, value) | _compiled(programs[half:], on, value)


def _each(programs: tuple[tuple[str, Program], ...], on: Any, errors: Results, value: Any) -> Results:
    """Traces all the programs. Any exceptions are recorded in `errors`."""
    found: Results = {}
    for name, program in programs:
        for mode in program.modes:
            if mode != "eager":
                try:
                    found[name, mode] = on(mode, program, value)
                except Exception as error:
                    errors[name, mode] = error
    return found


def on_array(table: Mapping[str, Program], subject: Subject) -> Results:
    """Returns the results on the materialised array. Gradients are still for the value's leaves."""
    stack = jax.vmap(reveal, axis_size=2)(subject.stack())

    def on(mode: Any, program: Any, arrays: Any) -> Any:
        return _ON_ARRAY[mode](program.run, arrays)

    found = _compiled(tuple(table.items()), on, (subject.dense, stack))
    varied, build = subject.varied()
    pull = jax.jit(jax.vjp(lambda leaves: reveal(build(leaves)), varied)[1])
    for name, program in table.items():
        gradient = found.get((name, "grad"))
        if not varied and "grad" in program.modes:
            found[name, "grad"] = TypeError("nothing to differentiate")
        elif gradient is not None and not isinstance(gradient, Exception):
            found[name, "grad"] = pull(gradient)[0]
        if "eager" in program.modes:
            found[name, "eager"] = found[name, "jit"]
    return found
