"""Units: products of powers of the seven base units of the SI."""

import difflib
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Union

from ...core.jaxprs.unify import OperandMismatch

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
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class DimensionError(OperandMismatch):
    """Arrays whose units do not fit each other, or do not fit what is done to them."""

    def __init__(self, message: str) -> None:
        from .array import Unitful  # which needs units first

        super().__init__(message, Unitful)


class Unit:
    """A unit of the SI: a product of powers of metre, kilogram, second, ampere, kelvin, mole and candela.

    Powers are rational. Immutable and hashable. `number * unit` and `array * unit` make a
    [`quaxlike.arrays.unitful.Unitful`][].

    **Arguments:**

    - `exponents`: a mapping from symbols to exponents, `{"m": 1, "s": -2}`; or a text, `"m/s^2"`, in
        which `/` divides by the one factor that follows. The derived units Hz, N, Pa, J, W, C, V, F, ohm, S,
        Wb, T, H and rad have their symbols too.

    **Raises:**

    `ValueError` for a symbol that is not known.

    !!! example

        ```python
        from quaxlike.arrays.unitful import Unit, metre, second

        assert Unit("m/s^2") == Unit({"m": 1, "s": -2}) == metre / second**2
        ```
    """

    __slots__ = ("_exponents",)
    _exponents: tuple[Fraction, ...] | str  # a text for the two units that are none

    # NumPy arrays leave `array * unit` to us.
    __array_ufunc__ = None

    def __init__(self, exponents: Union["Unit", str, Mapping[str, Any]] = {}) -> None:  # noqa: B006
        if isinstance(exponents, Unit):
            total = exponents._exponents
        else:
            factors = _parse(exponents) if isinstance(exponents, str) else exponents.items()
            total = (Fraction(0),) * len(_BASE)
            for name, power in factors:
                power = _fraction(power)
                total = tuple(a + b * power for a, b in zip(total, _of_symbol(name), strict=True))
        object.__setattr__(self, "_exponents", total)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"A Unit is immutable; cannot set {name}.")

    def __reduce__(self) -> Any:
        return _unit, (self._exponents,)

    @property
    def exponents(self) -> dict[str, Fraction]:
        """The exponents that are not zero, by base unit."""
        return {
            name: e for name, e in zip(_BASE, self._exponents, strict=False) if isinstance(e, Fraction) and e
        }

    @property
    def dimensionless(self) -> bool:
        return not any(self._exponents)

    def __mul__(self, other: Any) -> Any:
        return self._times(other, 1) if isinstance(other, Unit) else _quantity(other, self)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._times(other, -1) if isinstance(other, Unit) else NotImplemented

    def __rtruediv__(self, other: Any) -> Any:
        return _quantity(other, self**-1)

    def __pow__(self, power: Any) -> "Unit":
        return Unit()._times(self, power)

    def _times(self, other: "Unit", power: Any) -> "Unit":
        """`self * other**power`."""
        if isinstance(self._exponents, str) or isinstance(other._exponents, str):
            return ANY if ANY in (self, other) else UNKNOWN
        power = _fraction(power)
        return _unit(tuple(a + b * power for a, b in zip(self._exponents, other._exponents, strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unit) and self._exponents == other._exponents

    def __hash__(self) -> int:
        return hash(self._exponents)

    def __repr__(self) -> str:
        return f"Unit({str(self)!r})"

    def __str__(self) -> str:
        if isinstance(self._exponents, str):
            return self._exponents
        return "·".join(name + _power(e) for name, e in self.exponents.items()) or "dimensionless"


def _power(e: Fraction) -> str:
    if e == 1:
        return ""
    return str(e).translate(_SUPERSCRIPTS) if e.denominator == 1 else f"^({e})"


def _unit(exponents: tuple[Fraction, ...] | str) -> Unit:
    unit = Unit()
    object.__setattr__(unit, "_exponents", exponents)
    return unit


def _quantity(array: Any, unit: Unit) -> Any:
    from .array import quantity  # which needs units first

    return quantity(array, unit)


def _fraction(power: Any) -> Fraction:
    return Fraction(power) if isinstance(power, int | str) else Fraction(power).limit_denominator(1000)


def _of_symbol(name: str) -> tuple[Fraction, ...]:
    exponents = {name: 1} if name in _BASE else _DERIVED.get(name)
    if exponents is None:
        near = difflib.get_close_matches(name, [*_BASE, *_DERIVED], cutoff=0.3)
        raise ValueError(
            f"{name!r} is not a unit of the SI. Known: {', '.join([*_BASE, *_DERIVED])}."
            + (f" Did you mean {' or '.join(map(repr, near))}?" if near else "")
        )
    return tuple(Fraction(exponents.get(base, 0)) for base in _BASE)


def _parse(text: str) -> list[tuple[str, Fraction]]:
    factors, at = [], 0
    text = text.strip()
    while at < len(text):
        match = _FACTOR.match(text, at)
        if match is None:
            raise ValueError(f"Cannot read the unit {text!r} from {text[at:]!r} on; write it as 'kg*m/s^2'.")
        if match["name"] != "1":
            power = Fraction((match["power"] or "1").strip("()"))
            factors.append((match["name"], -power if match["op"] == "/" else power))
        at = match.end()
    return factors


# While it is looked into which of a loop's placeholders have units: goes with any unit, and takes it.
UNKNOWN = _unit("unknown")
# Of derivatives by the numbers inside of a Unitful, which have no unit: goes with any unit, and stays.
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
