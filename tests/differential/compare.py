"""A program on a Value against the same program on the array that it stands for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import quaxlike as ql
from quaxlike.arrays import named, unitful
from quaxlike.core.slots import StructureError

from .program import Program, parts, under
from .transforms import OUTER

# The errors that a type documents for programs that mean nothing for it.
DECLINES: dict[type, tuple[type[Exception], ...]] = {
    unitful.Unitful: (unitful.DimensionError, StructureError, ql.MaterialisationError),
    named.NamedArray: (named.array.AxisError, StructureError),
}


class Finding(AssertionError):
    """A program whose result differs."""

    def __init__(self, program: Program, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}\n{program}")
        self.program, self.kind, self.message = program, kind, message

    @property
    def key(self) -> tuple[str, ...]:
        """Findings with the same key count as one."""
        return (type_family(self.program.type), self.program.steps[-1].text.split("(")[0][:24], self.kind)


def type_family(name: str) -> str:
    return name.split(",")[0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a program: "equal", "declined" by an error that the type documents, or "rejected"
    since plain JAX cannot run it."""

    status: str
    reason: str = ""


def check(program: Program) -> Outcome:
    """Raises a `Finding` if the program is not the same on the Value and on its array."""
    with under(program.x64), ql.on_materialise("allow"):
        return _check(program)


def _check(program: Program) -> Outcome:
    f, operands = program.function(), program.operands()
    leaves, treedef = jtu.tree_flatten(operands)
    varied = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]

    def build(dynamic: list[Any]) -> tuple[Any, dict[str, Any]]:
        dynamic = iter(dynamic)
        tree = jtu.tree_unflatten(
            treedef, [next(dynamic) if v else leaf for v, leaf in zip(varied, leaves, strict=True)]
        )
        return tree.pop("x"), tree

    def of_values(dynamic: Any, _: Any) -> Any:
        return ql.materialise(ql.quaxify(f)(*build(dynamic)))

    def of_arrays(dynamic: Any, _: Any) -> Any:
        return f(*ql.materialise(build(dynamic)))

    start = [leaf for v, leaf in zip(varied, leaves, strict=True) if v]
    others = {"z": jtu.tree_map(lambda x: (0.5 * x).astype(x.dtype), start)}
    reference, found = of_arrays, of_values
    for name in reversed(program.outer if start else ()):
        reference, found = OUTER[name](reference), OUTER[name](found)
    try:
        expected_avals = jax.eval_shape(reference, start, others)
    except Exception as error:  # whatever JAX says of it
        return Outcome("rejected", f"{type(error).__name__}: {error}")
    try:
        results = found(start, others)
    except Exception as error:
        if _declines(operands, error):
            return Outcome("declined", str(error))
        try:
            reference(start, others)
        except Exception as same:  # that comes late in plain JAX, too
            return Outcome("rejected", f"{type(same).__name__}: {same}")
        raise Finding(program, f"raises {type(error).__name__}", str(error)[:600]) from error
    _compare_avals(program, results, expected_avals)
    expected = _run(reference, start, others)
    tolerance = _tolerance([*leaves, *jtu.tree_leaves(expected)])
    problem = _difference(results, expected, tolerance)
    if problem is None:
        return Outcome("equal")
    rng = np.random.default_rng(0)
    noise = lambda x: (x * (1 + 0.01 * tolerance * rng.uniform(-1, 1, x.shape))).astype(x.dtype)
    if _difference(_run(reference, jtu.tree_map(noise, start), others), expected, tolerance) is not None:
        return Outcome("rejected", "the result is not stable")
    raise Finding(program, "wrong numbers", problem)


def _run(f: Callable[..., Any], *args: Any) -> Any:
    """Without compiling what can be run step by step."""
    try:
        with jax.disable_jit():
            return f(*args)
    except Exception:  # what batches a loop, say
        return f(*args)


def _declines(operands: Any, error: Exception) -> bool:
    classes = {type(part) for x in operands.values() for part in parts(x)}
    return any(isinstance(error, DECLINES.get(cls, ())) for cls in classes)


def _tolerance(leaves: list[Any]) -> float:
    """By the least precise dtype that takes part."""
    dtypes = {jnp.result_type(x) for x in leaves}
    eps = max((float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.inexact)), default=0.0)
    return max(1e-9, 1000 * eps) if eps < 1e-3 else 8 * eps


def _compare_avals(program: Program, results: Any, expected: Any) -> None:
    found_leaves, found_tree = jtu.tree_flatten(results)
    leaves, tree = jtu.tree_flatten(expected)
    if found_tree != tree:
        raise Finding(program, "structure", f"{found_tree}, expected {tree}")
    for x, y in zip(found_leaves, leaves, strict=True):
        if np.shape(x) != y.shape:
            raise Finding(program, "shape", f"{np.shape(x)}, expected {y.shape}")
        if jnp.asarray(x).dtype != y.dtype and y.dtype != jax.dtypes.float0:
            raise Finding(program, "dtype", f"{x.dtype}, expected {y.dtype}")


def _difference(found: Any, expected: Any, tolerance: float) -> str | None:
    pairs = zip(jtu.tree_leaves_with_path(found), jtu.tree_leaves(expected), strict=True)
    for (path, x), y in pairs:
        if y.dtype == jax.dtypes.float0:
            continue
        wide = np.complex128 if jnp.issubdtype(y.dtype, jnp.complexfloating) else np.float64
        x, y = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
        told = np.isfinite(y)
        scale = max(1.0, np.abs(y[told]).max(initial=0.0))
        with np.errstate(invalid="ignore"):
            wrong = told & ~(np.abs(x - y) <= tolerance * scale)
        if wrong.any():
            return f"result{jtu.keystr(path)} is {x.tolist()}, expected {y.tolist()}"[:1200]
    return None
