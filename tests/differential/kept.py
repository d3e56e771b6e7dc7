"""What becomes of a Value of each type in each operation and transform, where nothing may be made dense.

`kept.txt` names the types, and has a line for each program with a letter for each of them:

- `k`: the result is of the class of the Value,
- `v`: it is a Value of another class,
- `a`: it is an array,
- `d`: the program would make something dense,
- `x`: the type refuses it, as units and names do,
- `-`: arrays of this shape and dtype do not take it.

`python -m tests.differential.kept` writes the file anew, or what it says of the types that are named. Whether
results are right is the question of the random programs, and of `differences` for what is not made dense.
"""

import functools
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import jax
import jax.tree_util as jtu

import quaxlike as ql
from quaxlike.testing.compare import disagreement
from tests.array_types import CORNERS, WEIGHTS

from .groups import GROUPS
from .operations import OPERANDS, VALUE, filled, lines, listed, operands_of
from .program import Program, Step, _value, under
from .transforms import INNER

FILE = Path(__file__).with_suffix(".txt")
_WIDEST = 100
# Other numbers, or no elements, are kept or not as the usual ones.
_NUMBERS = [
    "bfloat16",
    "booleans",
    "complex",
    "empty",
    "infinity",
    "integers",
    "mixed",
    "nan",
    "nothing",
    "scalar",
]
TYPES = {name: make for name, make in (WEIGHTS | CORNERS).items() if not any(x in name for x in _NUMBERS)}
# What releases of JAX compute otherwise, and what is not traced.
_LEFT_OUT = ("matrix_power(x, -1)", "linalg.lu(", "cholesky(abs", "callback")


@functools.cache
def texts() -> tuple[str, ...]:
    """The operations, and the names of transforms of a multiple of the Value."""
    groups = (line for name in ("linear algebra", "scalars and shapes") for line in lines(GROUPS[name]))
    operations = dict.fromkeys(map(filled, [*listed(), *groups]))
    short = (text for text in operations if len(text) < _WIDEST)
    return (*(text for text in short if not any(x in text for x in _LEFT_OUT)), *INNER)


def outcomes(name: str, texts: Collection[str]) -> dict[str, str]:
    """The letters of a type, by program. Nothing is computed."""
    out: dict[str, str] = {}
    with under(True), ql.on_materialise("error"):
        x, programs = _programs(name, texts)

        def trace(x: Any, operands: dict[str, Any]) -> None:
            for text, program in programs.items():
                ops = operands[text]
                out[text] = _outcome(program, x, ops) if _is_taken(program, x, ops) else "-"

        jax.eval_shape(trace, x, {text: _others(program) for text, program in programs.items()})
    return out


def differences(name: str, texts: Collection[str]) -> dict[str, str]:
    """Which of the programs give other numbers than they do of the array, in one compiled program."""
    with under(True), ql.on_materialise("error"):
        x, programs = _programs(name, texts)
        operands = {text: _others(program) for text, program in programs.items()}

        def run(quaxify: Any, x: Any, operands: dict[str, Any]) -> dict[str, Any]:
            return {text: quaxify(each.function())(x, operands[text]) for text, each in programs.items()}

        with ql.on_materialise("allow"):
            dense = ql.materialise((x, operands))
        found = jax.jit(lambda *args: ql.materialise(run(ql.quaxify, *args)))(x, operands)
        expected = jax.jit(lambda *args: run(lambda f: f, *args))(*dense)
        compare = functools.partial(disagreement, scale=1.0, nans=False)
        compared = {text: compare(found[text], expected[text]) for text in programs}
    return {text: str(problem) for text, problem in compared.items() if problem}


def _programs(name: str, texts: Collection[str]) -> tuple[Any, dict[str, Program]]:
    x = _value(name, 0, True)
    return x, {text: _program(name, x.shape, text) for text in texts}


def _others(program: Program) -> dict[str, Any]:
    return {letter: y for letter, y in program.operands().items() if letter != "x"}


def _program(name: str, shape: tuple[int, ...], text: str) -> Program:
    inner, text = ((text,), "x * 2.0") if text in INNER else ((), text)
    of = lambda letter: (name, 1) if letter == VALUE else OPERANDS[letter](shape)[0]
    return Program(name, (Step(text, tuple((letter, of(letter)) for letter in operands_of(text))),), inner)


_TAKEN: dict[Any, bool] = {}


def _is_taken(program: Program, x: Any, operands: dict[str, Any]) -> bool:
    """Whether plain JAX runs it."""
    of = lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype)
    avals = jtu.tree_map(of, (x, operands), is_leaf=ql.is_value)
    key = (program.steps[0].text, program.inner, str(avals))
    if key not in _TAKEN:
        try:
            jax.eval_shape(program.function(), *avals)
        except Exception:  # whatever it says
            _TAKEN[key] = False
        else:
            _TAKEN[key] = True
    return _TAKEN[key]


def _outcome(program: Program, x: Any, operands: dict[str, Any]) -> str:
    try:
        out = ql.quaxify(program.function())(x, operands)
    except ql.MaterialisationError:
        return "d"
    except TypeError:
        return "x"
    found = jtu.tree_leaves(out, is_leaf=ql.is_value)
    if not any(map(ql.is_value, found)):
        return "a"
    return "k" if all(type(each) is type(x) for each in found) else "v"


def read() -> dict[str, dict[str, str]]:
    """The letters of the file, by type and program."""
    head, *lines = FILE.read_text().splitlines()
    rows = [line.rsplit(" ", 1) for line in lines]
    return {name: {text.rstrip(): row[i] for text, row in rows} for i, name in enumerate(head.split(" | "))}


def write(names: Collection[str]) -> None:
    """Writes the letters of these types anew, and those that the file does not have."""
    table = read()
    for name in TYPES:
        known = {} if name in names else table.get(name, {})
        table[name] = known | outcomes(name, [text for text in texts() if text not in known])
    rows = [f"{text:{_WIDEST}} {''.join(table[name][text] for name in TYPES)}" for text in texts()]
    FILE.write_text("\n".join([" | ".join(TYPES), *rows, ""]))


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  (the settings of JAX under test)

    write(sys.argv[1:] or TYPES)
