"""Rules for units, most of which are tables.

Never guess a unit: applying a primitive without an entry to a quantity raises an error.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ...core.quaxify import quaxify, value_of
from ...core.rules import register, register_on_either_side
from ...core.values import ArrayValue, is_value
from ...primitives.classes import COMPARISONS, ELEMENTWISE_BINARY, ELEMENTWISE_UNARY, installed
from .. import precedence
from ..annotated import STRUCTURAL, of_elements
from .array import (
    ANY,
    FRESH,
    UNKNOWN,
    USED,
    DimensionError,
    Unit,
    Unitful,
    guard_of,
    guarded,
    unit_of,
    with_unit,
)
from .jax_numpy import functions_of_jax_numpy, is_from_jax_numpy
from .placeholders import OPEN, constant_of, is_open, may_be_placeholder, note_constant

_Any = ArrayLike | ArrayValue


# Apart from those moving elements, the only primitives allowed between `jnp.where` creating a guard (see
# `guarded`) and a division.
_TAKES_GUARDS = frozenset(
    installed("abs cbrt conj div imag integer_pow is_finite mul neg pow real rsqrt select_n sign sqrt square")
    + COMPARISONS
    + ("jit",)
)


def _bind(primitive: Primitive, operands: Sequence[Any], params: dict[str, Any]) -> Any:
    if primitive.name not in _TAKES_GUARDS and any(guard_of(unit_of(x)) for x in operands):
        raise _mismatch(primitive, operands, [unit_of(x) for x in operands])
    return Unitful.bind(primitive, operands, params)


def _units(operands: Sequence[Any]) -> str:
    return ", ".join(str(unit_of(x)) for x in operands)


# One array ----------------------------------------------------------------------------------------

# The unit of each result, as a power of the operand's unit. A single power applies to all results. Any other
# operands are e.g. indices, and have no units.
_POWERS: dict[str, Any] = {
    **dict.fromkeys(
        installed(
            "abs ceil conj cummax cummin cumsum fft floor imag neg real reduce_max reduce_min reduce_sum "
            "reduce_window_max reduce_window_min reduce_window_sum round"
        ),
        1,
    ),
    **dict.fromkeys(installed("argmax argmin is_finite sign"), 0),
    "square": 2,
    "sqrt": Fraction(1, 2),
    "rsqrt": Fraction(-1, 2),
    "cbrt": Fraction(1, 3),
    "cholesky": Fraction(1, 2),
    # values, indices
    "top_k": (1, 0),
    "approx_top_k": (1, 0),
    # the packed factors, pivots, permutation; packed, tau; Q, R, pivots; vectors, values; ...
    "lu": (1, 0, 0),
    "geqrf": (1, 0),
    "qr": (0, 1, 0),
    "eigh": (0, 1),
    "eig": (1, 0, 0),
    "svd": (1, 0, 0),
}


@register(installed(" ".join(_POWERS)))
def _powers(primitive: Primitive, x: Unitful, *rest: ArrayLike, **params: Any) -> Any:
    out = _bind(primitive, (x, *rest), params)
    powers = _POWERS[primitive.name]
    if not primitive.multiple_results:
        return with_unit(out, x.unit**powers)
    powers = powers if isinstance(powers, tuple) else (powers,) * len(out)
    return [with_unit(o, x.unit**p) for o, p in zip(out, powers[: len(out)], strict=True)]


@register("integer_pow")
def _integer_pow(x: Unitful, *, y: int) -> Any:
    return with_unit(quaxify(jax.lax.integer_pow)(x.array, y), x.unit**y)


@register("reduce_prod")
def _reduce_prod(primitive: Primitive, x: Unitful, **params: Any) -> Any:
    n = math.prod(x.shape[i] for i in params["axes"])
    return with_unit(_bind(primitive, [x], params), x.unit**n)


_NUMBERS = set(ELEMENTWISE_UNARY) - {*STRUCTURAL, *_POWERS} - {"integer_pow"} | set(
    installed("cumprod cumlogsumexp")
)


@register(tuple(_NUMBERS))
def _function_of_numbers(primitive: Primitive, x: Unitful, **params: Any) -> Any:
    """Applies functions only defined for dimensionless numbers, such as the exponential."""
    return _bind(primitive, _dimensionless(primitive, [x]), params)


def _dimensionless(primitive: Primitive | str, operands: Sequence[Any]) -> Sequence[Any]:
    if any(not unit_of(x).dimensionless and unit_of(x) not in (UNKNOWN, ANY) for x in operands):
        raise DimensionError(
            f"`{primitive}` takes arrays without a dimension; found ({_units(operands)}). Divide by a "
            "reference of the same unit first."
        )
    return operands


# Products: the powers of the two operands' units --------------------------------------------------

_PRODUCTS = {"mul": (1, 1), "div": (1, -1), "dot_general": (1, 1), "conv_general_dilated": (1, 1)}


@register_on_either_side(tuple(_PRODUCTS), Unitful, precedence=precedence.UNITFUL)
def _product(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    p, q = _PRODUCTS[primitive.name]
    out = _bind(primitive, (x, y), params)
    if any(map(is_open, (x,) if primitive.name == "div" else (x, y))) and not is_value(out):
        note_constant(out, OPEN)  # whichever unit the operands turn out to have
        return out
    return with_unit(out, unit_of(x) ** p * unit_of(y) ** q)


@register_on_either_side("triangular_solve", Unitful, precedence=precedence.UNITFUL)
def _triangular_solve(primitive: Primitive, a: Any, b: Any, **params: Any) -> Any:
    # If the diagonal is implicitly one, as in the lower factor of an LU decomposition, then the matrix must
    # be dimensionless.
    unit = unit_of(b) if params["unit_diagonal"] else unit_of(b) / unit_of(a)
    return with_unit(_bind(primitive, (a, b), params), unit)


@register_on_either_side("pow", Unitful, precedence=precedence.UNITFUL)
def _pow(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    _dimensionless(primitive, [y])
    out = _bind(primitive, (x, y), params)
    if unit_of(x).dimensionless or unit_of(x) in (UNKNOWN, ANY):
        return with_unit(out, unit_of(x))
    power = constant_of(y)
    if power is None or not np.isfinite(power):
        raise DimensionError(
            f"`{primitive}` of an array in {unit_of(x)} needs an exponent that is one number, known "
            "while tracing, since it decides the unit of the result."
        )
    return with_unit(out, unit_of(x) ** np.asarray(power).item())


# Arrays that must have one unit -------------------------------------------------------------------

_SAME = installed("add add_any sub max min rem complex nextafter")
_RATIOS = (*COMPARISONS, "atan2")


def _common(primitive: Primitive, operands: Sequence[Any]) -> Unit:
    """Returns the operands' common unit."""
    if any(unit_of(x) == ANY for x in operands):
        return ANY
    # 0, infinity and NaN are the same in any unit, so ignore arrays filled with these.
    units = {unit_of(x) for x in operands if not may_be_placeholder(x)} - {UNKNOWN}
    numbers = [x for x in operands if not isinstance(x, Unitful)]
    if len(units) > 1 and None not in map(constant_of, numbers) and _are_of_jax_numpy():
        units.discard(Unit())
    if len(units) > 1:
        raise _mismatch(primitive, operands, units)
    return units.pop() if units else next((x.unit for x in operands if isinstance(x, Unitful)), Unit())


def _are_of_jax_numpy() -> bool:
    """Returns whether we're in a jax.numpy function adding or comparing plain constants to quantities.

    These are `hypot`, which rescales to avoid overflow, and `histogram`, which widens an empty range. Both
    mean the constants to be in whatever unit the user passed in.
    """
    return not {"hypot", "histogram_bin_edges"}.isdisjoint(functions_of_jax_numpy())


def _mismatch(primitive: Primitive, operands: Sequence[Any], units: Collection[Unit]) -> DimensionError:
    within = [name for name in functions_of_jax_numpy() if hasattr(jnp, name)]
    is_ufunc = within and isinstance(getattr(jnp, within[-1]), jnp.ufunc)
    where = f" in `{within[-1]}` of jax.numpy" if within and not is_ufunc else ""
    hint = "."
    if any(map(guard_of, units)):
        hint = f"{where}. A plain 1 beside a quantity in `jnp.where` is only for a division."
    elif any(isinstance(value_of(x), Unitful) for x in operands if not is_value(x)):
        hint = ". To a `quaxify` inside of another, a Value of the outer one is a plain array."
    elif Unit() in units:
        hint = f"{where}. Give a number its unit by multiplying with it."
    return DimensionError(f"`{primitive}` takes arrays in the same unit; found ({_units(operands)}){hint}")


@register_on_either_side(_SAME, Unitful, precedence=precedence.UNITFUL)
def _same(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    unit = _common(primitive, (x, y))
    return with_unit(_bind(primitive, (x, y), params), unit)


@register_on_either_side(_RATIOS, Unitful, precedence=precedence.UNITFUL)
def _ratio(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    if primitive.name not in COMPARISONS or not (_stands_for_zero(x) or _stands_for_zero(y)):
        _common(primitive, (x, y))
    return _bind(primitive, (x, y), params)


def _stands_for_zero(x: Any) -> bool:
    """Returns whether a plain array is known to be filled with a number of at most `eps ** 2` in size.

    Some functions compare with these in place of 0, e.g. `jnp.interp`.
    """
    number, dtype = constant_of(x), jnp.result_type(x)
    if number is None or not jnp.issubdtype(dtype, jnp.floating):
        return False
    return bool(abs(number) <= jnp.finfo(dtype).eps ** 2)


@register_on_either_side(
    tuple(set(ELEMENTWISE_BINARY) - {*_SAME, *_RATIOS, *_PRODUCTS, "pow"}),
    Unitful,
    precedence=precedence.UNITFUL,
)
def _two_numbers(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    return _bind(primitive, _dimensionless(primitive, (x, y)), params)


# Several operands, some of which have units -------------------------------------------------------

# The operands that elements are taken from or written into.
_STORED = {
    "pad": slice(None),
    "dynamic_update_slice": slice(0, 2),
    **dict.fromkeys(installed("scatter scatter-add scatter-sub scatter-min scatter-max"), slice(0, None, 2)),
    "select_and_scatter_add": slice(0, 1),
    "select_and_gather_add": slice(0, 1),
}


@Unitful.rule_for_several(("concatenate", "stack", "clamp"))
def _several(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    unit = _common(primitive, xs)
    return with_unit(_bind(primitive, xs, params), unit)


@Unitful.rule_for_several("sort")
def _sort(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    return [with_unit(o, unit_of(x)) for o, x in zip(_bind(primitive, xs, params), xs, strict=True)]


@Unitful.rule_for_several("ragged_dot_general")
def _ragged_dot(primitive: Primitive, x: Any, y: Any, group_sizes: Any, **params: Any) -> Any:
    return with_unit(_bind(primitive, (x, y, group_sizes), params), unit_of(x) * unit_of(y))


@Unitful.rule_for_several(tuple(_STORED))
def _stored(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    stored = _STORED[primitive.name]
    indices = [x for x in xs if not any(x is y for y in xs[stored])]
    unit = _common(primitive, xs[stored])
    _dimensionless(primitive, indices)
    if primitive.name == "scatter" and params["update_jaxpr"] is not None:  # `at[...].apply`
        _check_function(primitive, params["update_jaxpr"], params["update_consts"], [(xs[0], unit)] * 2, unit)
    return with_unit(_bind(primitive, xs, params), unit)


@Unitful.rule_for_several(("reduce", "reduce_window"))
def _folded(primitive: Primitive, *xs: Any, **params: Any) -> Any:
    n = len(xs) // 2  # the arrays are followed by their initial values
    units = [_common_if_any(primitive, pair) for pair in zip(xs[:n], xs[n:], strict=True)]
    elements = [*zip(xs[:n], units, strict=True)] * 2
    _check_function(primitive, params["jaxpr"], params.get("consts", ()), elements, *units)
    return [with_unit(o, u) for o, u in zip(_bind(primitive, xs, params), units, strict=True)]


@Unitful.rule_for_several("select_and_scatter")
def _select_and_scatter(primitive: Primitive, x: Any, source: Any, init: Any, **params: Any) -> Any:
    unit = _common_if_any(primitive, (source, init))
    for what, element, gives in (("select", (x, unit_of(x)), Unit()), ("scatter", (source, unit), unit)):
        _check_function(primitive, params[f"{what}_jaxpr"], params[f"{what}_consts"], [element] * 2, gives)
    return with_unit(_bind(primitive, (x, source, init), params), unit)


def _common_if_any(primitive: Primitive, operands: Sequence[Any]) -> Unit:
    return _common(primitive, operands) if any(isinstance(x, Unitful) for x in operands) else Unit()


def _check_function(
    primitive: Primitive, jaxpr: Any, consts: Sequence[Any], elements: Sequence[tuple[Any, Unit]], *to: Unit
) -> None:
    """Raises an error unless an elementwise function's results have the units `to`.

    These are the units of the arrays they will be written into.
    """
    found = of_elements(jaxpr, consts, itertools.starmap(_element, elements))

    def fits(x: Any, unit: Any) -> Any:
        return may_be_placeholder(x) or unit_of(x) == unit or {unit_of(x), unit} & {ANY, UNKNOWN}

    if not all(map(fits, found, to)):
        raise DimensionError(
            f"`{primitive}` applies a function that gives ({_units(found)}) to elements of arrays whose "
            f"results are in ({', '.join(map(str, to))}). Apply it to the whole array, or divide by a "
            "reference of the same unit first."
        )


def _element(x: Any, unit: Unit) -> Any:
    element = jax.ShapeDtypeStruct((), jnp.result_type(x))
    return element if unit.dimensionless else Unitful(0.0, unit).with_array(element)


@register("select_n", precedence=precedence.UNITFUL)
def _select_left(primitive: Primitive, which: ArrayLike, x: Unitful, y: _Any) -> Any:
    return _select(primitive, which, x, y)


@register("select_n", precedence=precedence.UNITFUL)
def _select_right(primitive: Primitive, which: ArrayLike, x: _Any, y: Unitful) -> Any:
    return _select(primitive, which, x, y)


@register("select_n", precedence=precedence.UNITFUL)
def _select_both(primitive: Primitive, which: ArrayLike, x: Unitful, y: Unitful) -> Any:
    return _select(primitive, which, x, y)


@Unitful.rule_for_several("select_n")
def _select(primitive: Primitive, which: Any, *cases: Any) -> Any:
    """Selects elements. A plain 1 amongst the cases is treated as a guard, see `guarded`."""
    out = _bind(primitive, (*_dimensionless(primitive, [which]), *cases), {})
    quantities = [x for x in cases if isinstance(x, Unitful)]
    if not quantities:
        return out
    units = {guarded(x.unit, 0) for x in quantities} - {UNKNOWN}
    if ANY in units:
        return with_unit(out, ANY)
    numbers = [x for x in cases if not isinstance(x, Unitful) and not _has_any_unit(x)]
    if units != {Unit()} and units and not all(map(_is_one, numbers)):
        units.add(Unit())
    if len(units) > 1:
        raise _mismatch(primitive, cases, units)
    if not units:
        return with_unit(out, UNKNOWN)
    unit = units.pop()
    guards = {guard_of(x.unit) for x in quantities}
    if unit.dimensionless and guards == {0}:
        return out
    if FRESH in guards or numbers:
        return with_unit(out, guarded(unit, FRESH))
    # The guard is no longer needed, as in `jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)`.
    return with_unit(out, guarded(unit, USED if len(quantities) == len(cases) and guards == {USED} else 0))


def _has_any_unit(x: Any) -> bool:
    """Returns whether a plain array is known to be filled with a number matching any unit.

    These are 0, infinity, NaN, and the largest and smallest numbers used in their place, as in
    `jnp.nan_to_num`.
    """
    number, dtype = constant_of(x), jnp.result_type(x)
    if number is None or not jnp.issubdtype(dtype, jnp.floating):
        return may_be_placeholder(x)
    size, limits = abs(number), jnp.finfo(dtype)
    return may_be_placeholder(x) or bool(size == limits.max or size <= limits.tiny)


def _is_one(x: Any) -> bool:
    number = constant_of(x)
    return number is not None and bool(number == 1)


@register_on_either_side("jit", Unitful, precedence=precedence.UNITFUL)
def _heaviside(primitive: Primitive, x: Any, y: Any, **params: Any) -> Any:
    """Implements `jnp.heaviside`, with a dimensionless result.

    This needs its own rule because `jnp.heaviside` returns `x` itself if it's NaN.
    """
    if not is_from_jax_numpy(params["jaxpr"], "heaviside"):
        return NotImplemented
    _dimensionless(primitive, [y])
    return _bind(primitive, (x, y), params)


@register("jit", precedence=precedence.UNITFUL)
def _determinant(primitive: Primitive, x: Unitful, **params: Any) -> Any:
    """Implements `jnp.linalg.det` and `slogdet`.

    These need their own rule: from four rows on, `det` is the exponential of a sum of logarithms, which only
    take numbers.
    """
    if is_from_jax_numpy(params["jaxpr"], "slogdet"):
        return _bind(primitive, _dimensionless("slogdet", [x]), params)
    # A derivative within `quaxify` is a call of the same name with more results.
    if not is_from_jax_numpy(params["jaxpr"], "det") or len(params["jaxpr"].out_avals) > 1:
        return NotImplemented
    (out,) = _bind(primitive, [x], params)
    return [with_unit(out, x.unit ** x.shape[-1])]


@register("gather", precedence=precedence.UNITFUL)
def _gather(primitive: Primitive, x: Unitful, indices: ArrayLike, **params: Any) -> Any:
    fill = params["fill_value"]
    if x.unit.exponents and fill is not None and not _has_any_unit(np.asarray(fill, x.dtype)):
        raise DimensionError(
            f"`{primitive}` fills with the number {fill} where an array in {x.unit} ends. JAX takes no "
            'quantity for it: take with `mode="clip"`, and put the quantity in with `jnp.where`.'
        )
    return x.with_array(Unitful.bind(primitive, (x, indices), params))


@register("scatter-mul", precedence=precedence.UNITFUL)
def _scatter_mul(primitive: Primitive, x: Unitful, indices: ArrayLike, by: _Any, **params: Any) -> Any:
    return with_unit(_bind(primitive, (x, indices, *_dimensionless(primitive, [by])), params), x.unit)
