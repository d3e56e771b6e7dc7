"""Units, and `Unitful`: an array with a unit.

Units are static, so they have no run-time overhead. Exponents are exact fractions rather than floats, so
equal units still compare equal after arbitrary powers and roots.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Union

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import wadler_lindig as wl
from jaxtyping import ArrayLike

from ..._arrays import as_array
from ..._checked import checked, did_you_mean
from ...core.jaxprs.unify import OperandMismatch, widened, widened_part
from ...core.levels import level_of
from ...core.recording import user_source
from ...core.values import ArrayValue, is_value, replace_fields
from .. import precedence
from ..annotated import AnnotatedArray
from .placeholders import may_be_placeholder, note_constant


class DimensionError(OperandMismatch):
    """Raised if the units of arrays are incompatible with each other, or with an operation."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}\n  at {user_source()[0]}", Unitful)


_BASE = ("m", "kg", "s", "A", "K", "mol", "cd")
_DERIVED = {
    "rad": {},
    "Hz": {"s": -1},
    "N": {"kg": 1, "m": 1, "s": -2},
    "Pa": {"kg": 1, "m": -1, "s": -2},
    "J": {"kg": 1, "m": 2, "s": -2},
    "W": {"kg": 1, "m": 2, "s": -3},
    "C": {"A": 1, "s": 1},
    "V": {"kg": 1, "m": 2, "s": -3, "A": -1},
    "F": {"kg": -1, "m": -2, "s": 4, "A": 2},
    "ohm": {"kg": 1, "m": 2, "s": -3, "A": -2},
    "S": {"kg": -1, "m": -2, "s": 3, "A": 2},
    "Wb": {"kg": 1, "m": 2, "s": -2, "A": -1},
    "T": {"kg": 1, "s": -2, "A": -1},
    "H": {"kg": 1, "m": 2, "s": -2, "A": -2},
}
_FACTOR = re.compile(
    r"\s*(?P<op>[*/·]?)\s*(?P<name>[A-Za-z]+|1)"
    r"(\s*(\^|\*\*)\s*(?P<power>[-+]?\d+(\.\d+)?|\([-+]?\d+(/\d+)?\)))?"
)
_PLAIN, _RAISED = "-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"
_RAISE, _LOWER = str.maketrans(_PLAIN, _RAISED), str.maketrans(_RAISED, _PLAIN)


# Alternative names of units. Errors suggest the symbol instead.
_NAMES = {
    **{"metre": "m", "meter": "m", "kilogram": "kg", "second": "s", "sec": "s", "ampere": "A", "kelvin": "K"},
    **{"mole": "mol", "candela": "cd", "radian": "rad", "hertz": "Hz", "newton": "N", "pascal": "Pa"},
    **{"joule": "J", "watt": "W", "coulomb": "C", "volt": "V", "farad": "F", "siemens": "S"},
    **{"weber": "Wb", "tesla": "T", "henry": "H"},
}
_PREFIXES = {
    **{"T": 12, "G": 9, "M": 6, "k": 3, "h": 2, "d": -1, "c": -2, "m": -3, "u": -6, "n": -9, "p": -12},
    **{"tera": 12, "giga": 9, "mega": 6, "kilo": 3, "centi": -2, "milli": -3, "micro": -6, "nano": -9},
}


def _advice(name: str) -> str:
    """Suggests what to use instead of an unknown symbol."""
    powers = {**{symbol: (symbol, 0) for symbol in (*_BASE, *_DERIVED)}, "g": ("kg", -3), "gram": ("kg", -3)}
    powers |= {full: (symbol, 0) for full, symbol in _NAMES.items()}
    for prefix, power in {"": 0, **_PREFIXES}.items():
        unit = name.removeprefix(prefix)
        symbol, own = powers.get(unit) or powers.get(unit.removesuffix("s")) or ("", 0)
        if name.startswith(prefix) and symbol and power + own:
            return f"Units have no prefixes here: write 1e{power + own} * Unitful(x, {symbol!r})."
    hint = did_you_mean(name, powers, n=1, cutoff=0.7, show=lambda full: repr(powers[full][0]))
    return f"Known: {', '.join((*_BASE, *_DERIVED))}.{hint}"


def _exponents_of(name: str) -> tuple[Fraction, ...]:
    """Returns a symbol's exponents, in the order of the base units."""
    exponents = {name: 1} if name in _BASE else _DERIVED.get(name)
    if exponents is None:
        raise ValueError(f"{name!r} is not a unit of the SI. {_advice(name)}")
    return tuple(Fraction(exponents.get(base, 0)) for base in _BASE)


def _parse(text: str) -> list[tuple[str, Fraction]]:
    """Parses a unit into factors and their powers."""
    factors, at = [], 0
    text = re.sub(f"[{_RAISED}]+", lambda power: "^" + power[0].translate(_LOWER), text.strip())
    while at < len(text):
        match = _FACTOR.match(text, at)
        if match is None:
            raise ValueError(f"Cannot read the unit {text!r} from {text[at:]!r} on; write it as 'kg*m/s^2'.")
        if match["name"] not in ("1", "dimensionless"):
            power = Fraction((match["power"] or "1").strip("()"))
            factors.append((match["name"], -power if match["op"] == "/" else power))
        at = match.end()
    return factors


def _superscript(e: Fraction) -> str:
    """Formats the power after a symbol."""
    if e == 1:
        return ""
    return str(e).translate(_RAISE) if e.denominator == 1 else f"^({e})"


class Unit:
    """An SI unit, i.e. a product of powers of the metre, kilogram, second, ampere, kelvin, mole and candela.

    Powers are rational numbers. Units are immutable and hashable, so they can be used as static fields. To
    create a [`quaxlike.arrays.unitful.Unitful`][], just multiply a number or an array by a unit.

    **Arguments:**

    - `exponents`: a mapping from symbols to exponents, such as `{"m": 1, "s": -2}`; or a string such as
        `"m/s^2"`, in which `/` only divides by the factor directly after it; or the `str` of a unit. Symbols
        also exist for the derived units Hz, N, Pa, J, W, C, V, F, ohm, S, Wb, T, H and rad.

    **Raises:**

    `ValueError` for an unknown symbol.

    !!! example

        ```python
        from quaxlike.arrays.unitful import Unit, metre, second

        assert Unit("m/s^2") == Unit({"m": 1, "s": -2}) == metre / second**2
        ```
    """

    __slots__ = ("_exponents", "_guard")
    _exponents: tuple[Fraction, ...] | str  # this is a string for the two wildcards
    _guard: int  # see `guarded`

    # None makes NumPy arrays defer to our `__rmul__`. Otherwise `array * unit` is an array of objects.
    __array_ufunc__ = None

    @checked
    def __init__(self, exponents: Union["Unit", str, Mapping[str, Any]] = {}) -> None:  # noqa: B006
        guard = 0
        if isinstance(exponents, Unit):
            total, guard = exponents._exponents, exponents._guard
        else:
            factors = _parse(exponents) if isinstance(exponents, str) else exponents.items()
            total = (Fraction(0),) * len(_BASE)
            for name, power in factors:
                power = _fraction(power)
                total = tuple(a + b * power for a, b in zip(total, _exponents_of(name), strict=True))
        object.__setattr__(self, "_exponents", total)
        object.__setattr__(self, "_guard", guard)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A Unit is immutable; cannot set {name}.")

    def __reduce__(self) -> Any:
        return _unit, (self._exponents, self._guard)

    @property
    def exponents(self) -> dict[str, Fraction]:
        """Maps each base unit to its exponent, if this is nonzero."""
        return {
            name: e for name, e in zip(_BASE, self._exponents, strict=False) if isinstance(e, Fraction) and e
        }

    @property
    def dimensionless(self) -> bool:
        return not any(self._exponents) and not self._guard

    def __mul__(self, other: Any) -> Any:
        return self._times(other, 1) if isinstance(other, Unit) else quantity(other, self)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times(other, -1) if isinstance(other, Unit) else NotImplemented

    def __rtruediv__(self, other: Any) -> Any:
        return quantity(other, self**-1)

    def __pow__(self, power: Any) -> "Unit":
        return Unit()._times(self, power)

    def _times(self, other: "Unit", power: Any) -> "Unit":
        """Returns `self * other**power`."""
        # A product with a wildcard is a wildcard.
        if isinstance(self._exponents, str) or isinstance(other._exponents, str):
            return ANY if ANY in (self, other) else UNKNOWN
        power = _fraction(power)
        # A guard is only needed until the next division (or negative power), which removes it.
        used = USED if other._guard and power != 1 else other._guard
        guards = {self._guard, used if power > 0 else 0} - {0}
        exponents = (a + b * power for a, b in zip(self._exponents, other._exponents, strict=True))
        return _unit(tuple(exponents), min(guards, default=0))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Unit):
            return False
        return (self._exponents, self._guard) == (other._exponents, other._guard)

    def __hash__(self) -> int:
        return hash(self._exponents)

    def __repr__(self) -> str:
        return f"Unit({str(self)!r})"

    def __str__(self) -> str:
        if isinstance(self._exponents, str):
            return self._exponents
        name = "·".join(name + _superscript(e) for name, e in self.exponents.items()) or "dimensionless"
        return f"{name} or a bare number" if self._guard else name


def _unit(exponents: tuple[Fraction, ...] | str, guard: int = 0) -> Unit:
    unit = Unit()
    object.__setattr__(unit, "_exponents", exponents)
    object.__setattr__(unit, "_guard", guard)
    return unit


# A guard just created by `jnp.where` is fresh. It's used once a power or root has been applied to it.
FRESH, USED = 1, 2


def guard_of(unit: Unit) -> int:
    """Returns `FRESH` or `USED` for a unit created by `guarded`, and 0 otherwise."""
    return unit._guard  # pyright: ignore[reportPrivateUsage]


def guarded(unit: Unit, guard: int) -> Unit:
    """Returns the unit of an array for which some elements are a unitless 1, as in `jnp.where(x > 0, x, 1)`.

    This is a common way of avoiding division by zero, so it mustn't raise an error. Only division accepts
    this unit, and treats it as the unit of the other elements. If `guard` is 0, returns that unit itself.
    """
    return _unit(unit._exponents, guard)  # pyright: ignore[reportPrivateUsage]


def _fraction(power: Any) -> Fraction:
    # Recover fractions such as 1/3, which floats can't represent exactly.
    return Fraction(power) if isinstance(power, int | str) else Fraction(power).limit_denominator(1000)


# Matches any unit, and is then replaced by it. For tolerances in libraries, and for inferring the units of
# placeholders in a loop.
UNKNOWN = any_unit = _unit("any unit")
"""A wildcard that takes on the unit of whatever it is added to, or compared with.

This is useful for tolerances on states that involve several units: `1e-6 * any_unit`.
"""
# The unit of derivatives by unitless numbers within a Unitful. Like `UNKNOWN`, this matches any unit, but is
# never replaced by the other one.
ANY = _unit("any")
dimensionless = Unit()
metre = Unit("m")
kilogram = Unit("kg")
second = Unit("s")
ampere = Unit("A")
kelvin = Unit("K")
mole = Unit("mol")
candela = Unit("cd")
hertz = Unit("Hz")
newton = Unit("N")
pascal = Unit("Pa")
joule = Unit("J")
watt = Unit("W")
coulomb = Unit("C")
volt = Unit("V")
farad = Unit("F")
ohm = Unit("ohm")
siemens = Unit("S")
weber = Unit("Wb")
tesla = Unit("T")
henry = Unit("H")

# Any array can have a unit, so this type takes precedence over types for how an array is stored.


class Unitful(AnnotatedArray):
    """An array with an SI unit.

    Units are propagated through primitives during tracing, so they have no run-time overhead. A mismatch
    (such as adding metres to seconds, or the exponential of a length) raises a
    [`quaxlike.arrays.unitful.DimensionError`][]. Dimensionless results are plain arrays.

    Plain arrays are dimensionless, with two exceptions needed by a lot of existing code: 0, infinity and NaN
    match any unit if their values are known during tracing, and so does a 1 in a divisor, as in
    `y / jnp.where(x > 0, x, 1)`.

    **Arguments:**

    - `array`: any array or `ArrayValue`.
    - `unit`: a [`quaxlike.arrays.unitful.Unit`][], or its argument: `"m/s^2"`, `{"m": 1, "s": -2}`.

    !!! example

        ```python
        import jax, jax.numpy as jnp, quaxlike as ql
        from quaxlike.arrays.unitful import Unitful, metre, second

        fall = lambda t: 0.5 * (9.81 * metre / second**2) * t**2
        t = Unitful(jnp.array(2.0), "s")
        fall(t)  # 19.62 m
        # 19.62 m/s: a derivative has the unit of the quotient
        ql.quaxify(jax.grad(fall))(t)
        ```
    """

    array: Any = eqx.field(converter=lambda x: x if is_value(x) else as_array(x))
    unit: Unit = eqx.field(static=True, converter=Unit)

    default_precedence = precedence.UNITFUL

    @property
    def on_materialise(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Units must be removed explicitly: silently dropping them would defeat their purpose.
        return None if self.unit == dimensionless else "error"

    to_materialise = (
        "Its unit would be lost: divide by a unit first (`x / metre`), or take the numbers in it (`x.array`)."
    )

    to_unify = (
        "Give both sides the same unit: a factor may be missing on one of them, or one that changes the unit "
        "in each iteration be too many."
    )

    @classmethod
    def without_rule(cls, primitive: Any, values: Any, params: Any) -> Any:
        if all(v.unit == dimensionless for v in values if isinstance(v, Unitful)):
            return super().without_rule(primitive, values, params)
        units = ", ".join(str(v.unit) if isinstance(v, Unitful) else "no unit" for v in values)
        if len({v.unit for v in values if isinstance(v, Unitful)} - {UNKNOWN, ANY}) > 1:
            raise DimensionError(
                f"`{primitive}` meets arrays in different units, ({units}), and no rule gives the unit of "
                "its result. Give them the same unit if they are meant to have one, remove the units first "
                f"(`.array`), or register a rule with `quaxlike.register({primitive.name!r})`."
            )
        raise DimensionError(
            f"No rule gives the unit of `{primitive}` of arrays in ({units}). Remove the units "
            f"first (`.array`), or register a rule with `quaxlike.register({primitive.name!r})`."
        )

    @classmethod
    def promote(cls, array: Any, like: Any = None) -> Any:
        if like is None:
            # Without `like`, this is a placeholder with an unknown unit. Integers can't be placeholders.
            inexact = jnp.issubdtype(array.dtype, jnp.inexact)
            return cls(0.0, UNKNOWN).with_array(array) if inexact else NotImplemented
        if like.unit.exponents and not may_be_placeholder(array):
            raise DimensionError(
                f"An array without a unit takes the place of one in {like.unit}: in another branch, or "
                "before or after an iteration. Multiply it by the unit."
            )
        return super().promote(array, like)

    def with_array(self, array: Any) -> Any:
        return with_unit(array, self.unit) if isinstance(array, Unitful) else super().with_array(array)

    def widen(self, like: Any) -> Any:
        # As in rules, remove a unit as soon as it's dimensionless.
        if is_value(like) and not isinstance(like, Unitful) and not self.unit.exponents:
            return widened(self.array, like)
        if not isinstance(like, Unitful) or like.unit != ANY:
            return NotImplemented
        return replace_fields(self, array=widened_part(self.array, like.array), unit=ANY)

    @classmethod
    def cotangent(cls, ct: Any) -> Any:
        # A cotangent's unit depends on the function being differentiated, which isn't known here.
        return cls(ct.array if isinstance(ct, Unitful) else ct, ANY)

    def cotangent_factor(self, dtype: Any) -> Any:
        return Unitful(jnp.ones((), dtype), self.unit)

    def __str__(self) -> str:
        return f"{self.array} {self.unit}"

    def __repr__(self) -> str:  # used on its own, or in a tuple or list, whereas models only print shapes
        return f"Unitful({self.array!r}, {str(self.unit)!r})"

    def __format__(self, spec: str) -> str:
        return f"{format(self.array, spec)} {self.unit}"

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        return wl.pdoc(self.array, **kwargs) + wl.TextDoc(f" {self.unit}")


def unit_of(x: ArrayLike | ArrayValue) -> Unit:
    """Returns an array's unit. Plain arrays are dimensionless."""
    return x.unit if isinstance(x, Unitful) else Unit()


def with_unit(array: Any, unit: Unit) -> Any:
    """Attaches a unit to an array, unless the unit is dimensionless."""
    if isinstance(array, Unitful):  # the array may already have a unit
        array, unit = array.array, array.unit * unit
    if not unit.dimensionless:
        return Unitful(array, unit)
    if isinstance(array, jax.Array) and not array.ndim:
        if array.weak_type:  # results of rules are strong, and a copy made later would be another array
            array = jax.lax.convert_element_type(array, array.dtype)
        note_constant(array, None)  # computed, so units mustn't depend on its value
    return array


def quantity(array: Any, unit: Unit) -> Any:
    """Computes `array * unit`."""
    if isinstance(array, Unitful):
        return Unitful(array.array, array.unit * unit)
    value = Unitful(array, unit)
    level = level_of(value)
    if level is None:
        return value
    # Inside a quaxified function, this must become an operand immediately. Otherwise the function could pass
    # it to a transform, which flattens it like any Value.
    if isinstance(array, jax.core.Tracer):
        return array * level.adopt(Unitful(jnp.ones((), array.dtype), unit))
    return level.adopt(value)
