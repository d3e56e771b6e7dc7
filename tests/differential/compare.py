"""Programs on a Value against the same programs on the array that it stands for."""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import quaxlike as ql
from quaxlike.adapters import MethodArray
from quaxlike.adapters.combinators import Combinator
from quaxlike.arrays import named, unitful
from quaxlike.arrays.lora import LoraArray, LoraBias
from quaxlike.arrays.quantized import AbstractQuantizedArray
from quaxlike.arrays.sparse import OneHotVector
from quaxlike.arrays.structured import (
    BlockDiagonalMatrix,
    DiagonalMatrix,
    KroneckerMatrix,
    LowRankUpdate,
    TridiagonalMatrix,
)
from quaxlike.arrays.zero import Full, Identity, Zero
from quaxlike.core.jaxprs.unify import StructureError
from quaxlike.core.values import replace_fields
from quaxlike.testing.compare import disagreement, is_inexact
from tests.array_types import parts
from tests.primitives.jaxprs import equations

from .origins import TRACED
from .program import Program, under
from .transforms import OUTER

# The errors that a type documents for programs that mean nothing for it.
DECLINES: dict[type, tuple[type[Exception], ...]] = {
    unitful.Unitful: (unitful.DimensionError, StructureError, ql.MaterialisationError),
    named.NamedArray: (named.array.AxisError, StructureError),
}

# The LU factors of a structured matrix, which derivatives of a determinant inside of `quaxify` look at, are
# not computed.
DECLINED = ("are kept as the matrix itself, and have no elements",)

# The types of which some elements are zero whatever is stored. By the one convention of all types, what is
# stored follows IEEE, and what is outside of the structure stays zero, where the array has `0 * inf`.
STRUCTURED = (
    DiagonalMatrix,
    BlockDiagonalMatrix,
    TridiagonalMatrix,
    KroneckerMatrix,
    LowRankUpdate,
    ql.SparseArray,
    ql.BlockSparseArray,
    OneHotVector,
    Zero,
    Identity,
)

# Steps that divide by zero, or whose derivatives do: structured arrays are zero where nothing is stored.
_DIVIDES_BY_ZERO = re.compile(r"/ .*(ZERO|s - s|jnp\.zeros\(\(\)\))|sqrt\(x - x\)")

# XLA fails to compile the transform of an array that it lays out for a solver: `solve(ifft(full(...)), y)`.
# And a value that is closed over beside an integer is not differentiated by that.
REJECTED = ("fft_thunk.cc", "grad requires real- or complex-valued inputs")

# To JAX, a value that no transform has seen is a tree: functions of trees take it apart, and say what does
# not go with it.
OF_TREES = (
    "tree structure",
    "branches must have equal output types",  # leaf by leaf, whose dtypes may differ
    "lax.associative_scan",
    "lax.custom_linear_solve",
    "jnp.apply_along_axis",  # maps over it
    "outside `quaxlike.quaxify`",
    "was used as an array",  # what `jax.jit(lambda x: x)` returned, whose integers have no tangents
)

# What a value says that no transform has seen, and whose type has no operators.
NO_OPERATORS = (
    *("bad operand type", "unsupported operand", "not subscriptable", "must be an iterable"),
    "method __array__() was called on traced array",
    *(f"has no attribute '{name}'" for name in dir(jax.Array) if not name.startswith("_")),
)


class Finding(AssertionError):
    """A program whose result differs, or several that only differ together."""

    status = "finding"

    def __init__(self, programs: Sequence[Program], kind: str, message: str) -> None:
        super().__init__("\n".join([f"{kind}: {message}", *map(str, programs)]))
        self.program, self.kind, self.message = programs[0], kind, message

    @property
    def key(self) -> tuple[str, ...]:
        """Findings with the same key count as one."""
        return (type_family(self.program.type), _operation(self.program), self.kind)


def _operation(program: Program) -> str:
    return program.steps[-1].text.split("(")[0][:24] if program.steps else "-"


def type_family(name: str) -> str:
    return name.split(",")[0]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a program: "equal", "declined" by an error that the type documents, or "rejected"
    since plain JAX cannot run it."""

    status: str
    reason: str = ""


def check(*programs: Program) -> Outcome:
    """Raises a `Finding` if programs are not the same on the Value and on its array.

    They are compiled together, since that takes less time. They are of one type, with the same outer
    transforms and settings, and their steps have different numbers.
    """
    with under(programs[0].x64):
        operands = {name: x for program in programs for name, x in program.operands().items()}
        values = [part for x in operands.values() for part in parts(x)]
        # A unit that is dropped because that is allowed is no finding.
        has_units = any(isinstance(x, unitful.Unitful) for x in values)
        with contextlib.nullcontext() if has_units else ql.on_materialise("allow"):
            try:
                return _check(programs, operands)
            except Finding:
                raise
            except Exception as error:  # wherever it comes from, it is of one of these programs
                raise Finding(programs, f"raises {type(error).__name__}", _told(error)) from error


def outcomes(programs: Sequence[Program]) -> list[tuple[Program, Outcome | Finding]]:
    """How each of the programs ended. Those that are not equal together are checked again in halves."""
    if not programs:
        return []
    try:
        outcome: Outcome | Finding = check(*programs)
    except Finding as finding:
        outcome = finding
    if outcome.status == "equal" or len(programs) < 2:
        return [(program, outcome) for program in programs]
    middle = len(programs) // 2
    parts = [pair for half in (programs[:middle], programs[middle:]) for pair in outcomes(half)]
    alone = any(isinstance(found, Finding) for _, found in parts)
    return parts if alone or not isinstance(outcome, Finding) else [*parts, (programs[0], outcome)]


def _check(programs: Sequence[Program], operands: dict[str, Any]) -> Outcome:
    program = programs[0]  # where they are all alike
    if program.origin != "argument" and not all(p.steps for p in programs):
        return Outcome("declined", "to JAX, what no step has seen is a tree")
    leaves, treedef = jtu.tree_flatten(operands)
    varied = [leaf for leaf in leaves if is_inexact(leaf)]
    others = {"z": [(0.5 * x).astype(x.dtype) for x in varied]}
    x_treedef = jtu.tree_structure(operands["x"])

    returned: list[Any] = []

    def both(leaves: list[Any], moved: Any = None, nan: float = math.nan) -> tuple[Any, Any]:
        """The program on Values, and on arrays, as functions of the leaves that can be differentiated."""
        x_leaves = jtu.tree_leaves(jtu.tree_unflatten(treedef, leaves)["x"])

        def build(varied: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
            """The leaves of the value, and the other operands."""
            tree = jtu.tree_unflatten(treedef, _put(varied, leaves))
            x = tree.pop("x")
            return [leaf for leaf in jtu.tree_leaves(x) if is_inexact(leaf)], tree

        def value(varied: Sequence[Any]) -> Any:
            return jtu.tree_unflatten(x_treedef, _put(varied, x_leaves))

        def of_values(program: Program, varied: Any, _: Any) -> Any:
            out = program.function(value, ql.quaxify)(*build(varied))
            returned.extend(jtu.tree_leaves(out, is_leaf=ql.is_value))
            return ql.materialise(out)

        @jax.jit
        def dense(x: Any, moved: Any) -> Any:
            # What does not move keeps the sign of its zeros.
            move = lambda x, by: jnp.where(by == 0, x, jnp.where(jnp.isfinite(x), x, 0) + by)
            either = lambda x, by: move(x, by) if _is_number(x) else x | by if _is_boolean(x) else x
            return jtu.tree_map(either, ql.materialise(x), moved)

        def of_arrays(program: Program, varied: Any, _: Any) -> Any:
            x, ops = build(varied)
            return program.function(lambda x: dense(value(x), moved[0]), nan=nan)(x, dense(ops, moved[1]))

        def each(of: Callable[..., Any], varied: Any, ops: Any) -> Any:
            transform = lambda f, name: OUTER[name](f)
            outer = program.outer[::-1] if varied else ()
            return [
                functools.reduce(transform, outer, functools.partial(of, each))(varied, ops)
                for each in programs
            ]

        returned.clear()
        return functools.partial(each, of_values), functools.partial(each, of_arrays)

    arrays = ql.materialise(jtu.tree_unflatten(treedef, leaves))
    arrays = (arrays.pop("x"), arrays)
    still = jtu.tree_map(jnp.zeros_like, arrays)
    by = lambda new, x: new - jnp.where(jnp.isfinite(x), x, 0) if _is_number(x) else new
    moves = lambda change: jtu.tree_map(
        lambda x: by(change(x), x) if _is_number(x) or _is_boolean(x) else x, arrays
    )
    reference = lambda leaves, varied, moved, nan=math.nan: both(leaves, moved, nan)[1](varied, others)
    found = lambda leaves, varied: both(leaves)[0](varied, others)
    try:
        traced = jax.jit(reference).trace(leaves, varied, still)
        compiled = traced.lower().compile()
    except Exception as error:  # whatever JAX says of it
        return Outcome("rejected", f"{type(error).__name__}: {error}")
    try:
        # Either all is traced, or all is known.
        traced_too = jax.jit(found).trace(leaves, varied) if program.jit else None
        expected = compiled(leaves, varied, still)
        results = traced_too.lower().compile()(leaves, varied) if traced_too else found(leaves, varied)
        jax.block_until_ready((expected, results))  # what fails while it runs says so here
    except Exception as error:
        if _declines(operands, error):
            on_arrays = {name: _on_array(x) for name, x in operands.items()}
            # What is declined of a type by itself is declined in units and with names, too.
            other = jtu.tree_structure(on_arrays) != jtu.tree_structure(operands) and not _is_declined(error)
            if other and not _inside(operands) and _check(programs, on_arrays).status == "equal":
                raise Finding(programs, "declines", f"{type(error).__name__}: {error}"[:600]) from error
            return Outcome("declined", f"{type(error).__name__}: {error}")
        try:
            reference(leaves, varied, still)
        except Exception as same:  # that comes late in plain JAX, too
            return Outcome("rejected", f"{type(same).__name__}: {same}")
        if any(p.origin != "argument" for p in programs) and any(
            x in f"{error} {programs}" for x in OF_TREES + NO_OPERATORS
        ):
            return Outcome("declined", "JAX takes the value apart, or its type has no operators")
        if any(text in str(error) for text in REJECTED):
            return Outcome("rejected", str(error))
        raise Finding(programs, f"raises {type(error).__name__}", _told(error)) from error
    values = list(returned)  # before other calls of `both` clear it
    plain = not program.outer and not any(map(ql.is_value, values))  # Values have no weak types
    again = lambda change: compiled(leaves, varied, moves(change))
    tolerance = _tolerance([*leaves, *jtu.tree_leaves(expected)], traced)
    # What differs where NaN is expected, `_loses_nans` says.
    differ = functools.partial(disagreement, tolerance=tolerance, scale=1.0, nans=False)
    problem = differ(results, expected, weak_types=plain)
    if problem and problem.kind == "weak type" and "weak type False" in problem.text:
        problem = differ(results, expected)  # what was computed through a Value is strong
    if problem and problem.kind != "numbers":
        raise Finding(programs, problem.kind, problem.text)
    classes = {type(part) for x in operands.values() for part in parts(x)}
    is_transformed = any(program.inner or program.outer for program in programs)
    sums = not classes.isdisjoint((LoraArray, LoraBias, LowRankUpdate))
    sums |= any(issubclass(cls, MethodArray | Combinator) for cls in classes)
    sums |= any(getattr(y, "is_sum", False) for x in operands.values() for y in parts(x))
    of_rounding = sums and any("sqrt(x - x)" in step.text for program in programs for step in program.steps)
    if of_rounding and (problem or _loses_nans(results, expected)):
        return Outcome("declined", "the difference of two sums is zero up to rounding")
    if problem is None and _loses_nans(results, expected):
        with_finite = functools.partial(_with_finite_numbers, reference, leaves, still)
        of_one = jax.jit(functools.partial(reference, nan=1.0))
        moved = [of_one(leaves, varied, moves(change)) for change in (_below_one, _above_one)]
        # The array as it is, too: what moves may leave the domain of a function.
        always = _loses_nans(results, expected, *moved, of_one(leaves, varied, still))
        # A sum is not computed in a branch that is not taken. Its array is, before the branch.
        not_taken = sums and any("cond_array_taken" in program.inner for program in programs)
        # A factor of a Kronecker matrix meets the cotangent, and what is zero in it is left out.
        constant = not classes.isdisjoint((Zero, Full, KroneckerMatrix)) and is_transformed
        if always and (constant or (not_taken and not _is_finite(arrays))):
            return Outcome("declined", "the derivative of what is not finite, times zero")
        by_zero = any(_DIVIDES_BY_ZERO.search(step.text) for program in programs for step in program.steps)
        if always and by_zero and not classes.isdisjoint(STRUCTURED) and is_transformed:
            return Outcome("declined", "what is not stored is zero, whatever it is divided by")
        if always or _loses_nans_that_count(results, expected, with_finite(0.7), with_finite(1.3)):
            raise Finding(programs, "no NaN", f"{results}, expected {expected}"[:1200])
    if problem is None:
        if not program.outer:
            _check_units(programs, operands, values, differ)
        return Outcome("equal")
    apart = [p for p in programs if p.origin not in TRACED]
    if any("lax.associative_scan" in step.text for p in apart for step in p.steps):
        return Outcome("declined", "JAX combines leaves, whatever the results are (docs/transforms.md)")
    for seed in range(3):
        disturbed = again(functools.partial(_disturbed, seed, 0.01 * tolerance))
        if differ(disturbed, expected):
            return Outcome("rejected", "the result is not stable")
    takes_norms = any(
        re.search(r"custom\.clipped\b", step.text) for program in programs for step in program.steps
    )
    if takes_norms and not classes.isdisjoint(STRUCTURED):
        return Outcome("declined", "the norm of a cotangent is that of what is stored")
    if not classes.isdisjoint(STRUCTURED) and _meets_nan(traced, (leaves, varied, still)):
        return Outcome("declined", "the array has NaN where nothing is stored")
    # A comparison that is fused twice may come out either way, and XLA takes a boolean times NaN for zero
    # where it is false: right is what one operation at a time gives, on the Value or on the array.
    ours = [results, *([_op_by_op(traced_too, (leaves, varied), results)] if traced_too else [])]
    theirs = [_op_by_op(traced, (leaves, varied, still), expected), expected]
    if any(not differ(x, y) for x in ours for y in theirs):
        return Outcome("rejected", "XLA computes otherwise in a program than in its operations")
    # An array that a loop or a branch takes for an adapted one has 0 added to it, and -0 + 0 is 0.
    if sums and not _is_finite(results):
        if not differ(*map(_of_one_sign, (results, expected))):
            return Outcome("declined", "divided by a zero of the other sign")
        # The terms of a sum are scaled one by one: what is traced has to be finite, as the docs say.
        if not differ(results, jtu.tree_map(_nan_if_infinite, expected)):
            return Outcome("declined", "scaled by what is not finite")
        if not _is_finite(arrays) and not differ(*_without_nans(results, expected)):
            return Outcome("declined", "scaled by what is not finite")
    if LowRankUpdate in classes and not _is_finite(results):
        return Outcome("declined", "the base cannot be inverted")
    if _divides_integers(traced) and any(np.any(np.asarray(x) == 0) for x in _integers(arrays)):
        return Outcome("declined", "integers divided by zero")
    if Full in classes and is_transformed and not _is_finite(results):
        return Outcome("declined", "a derivative at equal elements, or by infinity")
    # What is quantised has a tangent of zeros, where JAX knows of its array that it has none.
    is_frozen = any(issubclass(cls, AbstractQuantizedArray) for cls in classes)
    if is_frozen and is_transformed and not _is_finite(expected) and _has_nans_for_zeros(results, expected):
        return Outcome("declined", "the derivative of what is not finite, times zero")
    # Of an array without elements nothing is added up: zeros, which a factor such as its deviation may meet.
    is_empty = any(0 in np.shape(x) for x in jtu.tree_leaves(arrays))
    if is_empty and is_transformed and _has_nans_for_zeros(results, expected):
        return Outcome("declined", "a sum of nothing, times what is not finite")
    # Terms that cancel leave what rounding made of them, whether or not the arguments are disturbed.
    is_close = not differ(results, expected, tolerance=10 * tolerance)
    if is_close and not program.x64 and _are_equal_in_doubles(programs):
        return Outcome("rejected", "rounded otherwise, and equal in double precision")
    raise Finding(programs, "wrong numbers", problem.text)


def _are_equal_in_doubles(programs: Sequence[Program]) -> bool:
    try:
        return check(*(dataclasses.replace(program, x64=True) for program in programs)).status == "equal"
    except Finding:
        return False


def _told(error: Exception) -> str:
    """The beginning of what an error says, and its end: errors of callbacks begin with a traceback."""
    text = str(error)
    return text if len(text) <= 600 else f"{text[:300]} … {text[-300:]}"


def _metres(x: Any) -> Any:
    """The power of the metre in the unit of an array, or None if it goes with any unit."""
    units = [part.unit for part in parts(x) if isinstance(part, unitful.Unitful)]
    if not units:
        return 0
    return None if isinstance(units[0]._exponents, str) else units[0].exponents.get("m", 0)


def _check_units(
    programs: Sequence[Program], operands: dict[str, Any], returned: list[Any], differ: Callable[..., Any]
) -> None:
    """In half-metres the numbers of a result are larger by a power of two: the one that its unit says.

    Not where `select_n` takes a plain array for one in the unit of the others, nor where numbers are rounded
    to whole units.
    """
    of_operands = {name: _metres(x) for name, x in operands.items()}
    if not any(of_operands.values()):
        return
    functions = [program.function() for program in programs]  # of arrays

    def f(operands: dict[str, Any]) -> list[Any]:
        others = {k: x for k, x in operands.items() if k != "x"}
        return [of(operands["x"], others) for of in functions]

    metres = ql.materialise(operands)
    half_metres = {name: x * 2 ** of_operands[name] if of_operands[name] else x for name, x in metres.items()}
    traced = jax.jit(f).trace(metres)
    if any(eqn.primitive.name == "select_n" or _rounds(eqn) for eqn in equations(traced.jaxpr.jaxpr)):
        return
    results, larger = (jtu.tree_leaves(_evaluated(traced, x)) for x in (metres, half_metres))
    for power, x, y in zip(map(_metres, returned), results, larger, strict=True):
        wrong = power is not None and differ(y, np.asarray(x) * 2.0 ** float(power), dtypes=False)
        if wrong:
            raise Finding(programs, "unit", f"the unit of the result has m to the power of {power}")


def _rounds(eqn: Any) -> bool:
    to_integers = eqn.primitive.name == "convert_element_type" and is_inexact(eqn.invars[0].aval)
    to_integers = to_integers and not is_inexact(eqn.outvars[0].aval)
    return to_integers or eqn.primitive.name in ("ceil", "floor", "round")


def _disturbed(seed: int, noise: float, x: jax.Array) -> jax.Array:
    """The array with each of its elements changed a little, and by the precision of its dtype at least."""
    if not is_inexact(x):
        return x
    noise = max(noise, float(jnp.finfo(x.dtype).eps))
    return x * (1 + noise * np.random.default_rng(seed).uniform(-1, 1, x.shape)).astype(x.dtype)


def _below_one(x: jax.Array) -> jax.Array:
    if not is_inexact(x):
        return jnp.ones_like(x)
    numbers = np.random.default_rng(0).uniform(0.3, 0.9, x.shape)
    return jnp.asarray(numbers * (1 + 0.5j) if jnp.iscomplexobj(x) else numbers, x.dtype)


def _above_one(x: jax.Array) -> jax.Array:
    return (_below_one(x) + 1).astype(x.dtype)


def _evaluated(traced: Any, *args: Any) -> Any:
    return traced.lower().compile()(*args)


def _op_by_op(traced: Any, args: Any, like: Any) -> Any:
    """The result of a traced function, one operation at a time, as a tree `like` the one that is compiled."""
    with jax.disable_jit():
        leaves = jexc.jaxpr_as_fun(traced.jaxpr)(*jtu.tree_leaves(args))
    return jtu.tree_unflatten(jtu.tree_structure(like), leaves)


def _is_finite(tree: Any) -> bool:
    return all(jnp.isfinite(x).all() for x in jtu.tree_leaves(tree) if is_inexact(x))


def _of_one_sign(tree: Any) -> Any:
    """Infinities made positive."""
    return jtu.tree_map(lambda x: jnp.where(jnp.isinf(x), jnp.inf, x) if is_inexact(x) else x, tree)


def _nan_if_infinite(x: Any) -> Any:
    return jnp.where(jnp.isinf(x), jnp.nan, x) if is_inexact(x) else x


def _without_nans(found: Any, expected: Any) -> tuple[Any, Any]:
    """Both trees, with zeros where `found` has NaN."""
    zeros = lambda x, y: jnp.where(jnp.isnan(x), 0, y).astype(y.dtype) if is_inexact(x) else y
    return jtu.tree_map(zeros, found, found), jtu.tree_map(zeros, found, expected)


def _has_nans_for_zeros(found: Any, expected: Any) -> bool:
    """Whether `found` has NaN where zeros are expected, and there alone."""
    pairs = zip(*map(jtu.tree_leaves, (found, expected)), strict=True)
    zeros = [np.asarray(y)[np.isnan(x)] for x, y in pairs if is_inexact(x)]
    is_zero = all(np.all(np.isnan(y) | (y == 0)) for y in zeros)
    return is_zero and not disagreement(*_without_nans(found, expected), tolerance=1e-3, scale=1.0)


def _divides_integers(traced: Any) -> bool:
    divisions = [e for e in equations(traced.jaxpr.jaxpr) if e.primitive.name in ("div", "rem")]
    return any(jnp.issubdtype(e.outvars[0].aval.dtype, jnp.integer) for e in divisions)


def _integers(arrays: Any) -> list[Any]:
    return [x for x in jtu.tree_leaves(arrays) if not is_inexact(x)]


def _is_number(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.number)


def _is_boolean(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.bool_)


def _declines(operands: Any, error: Exception) -> bool:
    classes = {type(part) for x in operands.values() for part in parts(x)}
    return _is_declined(error) or any(isinstance(error, DECLINES.get(cls, ())) for cls in classes)


def _is_declined(error: Exception) -> bool:
    return any(text in str(error) for text in DECLINED)


_METADATA = (unitful.Unitful, named.NamedArray)


def _on_array(x: Any) -> Any:
    """Units and names of an array, where they are those of another Value; other Values stay."""
    if not isinstance(x, _METADATA):
        return x
    held = _on_array(x.array) if isinstance(x.array, _METADATA) else ql.materialise(x.array)
    return replace_fields(x, array=held)


def _inside(operands: dict[str, Any]) -> bool:
    """Whether a Value of another type holds units or names: with that it goes where an array would not."""
    others = (part for x in operands.values() for part in parts(x) if not isinstance(part, _METADATA))
    return any(isinstance(part, _METADATA) for other in others for part in parts(other))


def _tolerance(leaves: list[Any], traced: Any) -> float:
    """By the least precise numbers that take part. Gradients are rounded where values are, before or after
    they are added up."""
    dtypes = {jnp.result_type(x) for x in leaves}
    rounded = [e for e in equations(traced.jaxpr.jaxpr) if e.primitive.name == "reduce_precision"]
    every = [float(jnp.finfo(d).eps) for d in dtypes if jnp.issubdtype(d, jnp.inexact)]
    eps = max([*every, *(2.0 ** -e.params["mantissa_bits"] for e in rounded)], default=0.0)
    return max(1e-9, 1000 * eps) if eps < 1e-4 else 8 * eps


def _loses_nans(found: Any, *expected: Any) -> bool:
    """Whether a place is finite that is NaN in all that is expected.

    A type may well take a zero that it does not store times infinity for zero. What is NaN for any numbers,
    as what is read out of bounds, has to be so.
    """
    lost = lambda x, *ys: np.isfinite(x) & functools.reduce(np.logical_and, map(np.isnan, ys))
    return _anywhere(lost, found, *expected)


def _loses_nans_that_count(found: Any, expected: Any, below: Any, above: Any) -> bool:
    """Whether a place is finite that is to be NaN, and that other numbers in the place of the NaN change:
    what they do not change is outside of a structure."""
    lost = lambda x, y, a, b: np.isfinite(x) & np.isnan(y) & (abs(a - b) > 1e-3 * (abs(a) + abs(b)))
    with np.errstate(invalid="ignore"):
        return _anywhere(lost, found, expected, below, above)


def _anywhere(condition: Callable[..., Any], *trees: Any) -> bool:
    """Whether the condition is true of any inexact numbers at the same place."""
    inexact = [[np.asarray(x) for x in jtu.tree_leaves(tree) if is_inexact(x)] for tree in trees]
    return any(
        condition(*(x.astype(np.complex128) for x in leaves)).any() for leaves in zip(*inexact, strict=True)
    )


def _with_finite_numbers(reference: Any, leaves: list[Any], still: Any, nan: float) -> Any:
    """The result if each NaN is that number, and what is infinite, or a zero that is stored, another one."""

    def finite(x: Any) -> Any:
        x = jnp.where(jnp.isnan(x), jnp.asarray(nan, x.dtype), x)
        return jnp.where(jnp.isinf(x) | (x == 0), jnp.asarray(0.6, x.dtype), x)

    leaves = [finite(x) if is_inexact(x) else x for x in leaves]
    varied = [x for x in leaves if is_inexact(x)]
    return jax.jit(functools.partial(reference, nan=nan))(leaves, varied, still)


def _meets_nan(traced: Any, args: Any) -> bool:
    """Whether an operation gives NaN, whatever comes of it."""
    try:
        with jax.debug_nans(True):
            _op_by_op(traced, args, jax.tree.map(lambda _: 0, traced.out_info))
    except FloatingPointError:
        return True
    return False


def _put(new: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
    """The leaves, where those that are inexact are new."""
    each = iter(new)
    return [next(each) if is_inexact(x) else x for x in leaves]
