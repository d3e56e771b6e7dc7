"""Symbols of SI units: their exponents, and parsing and formatting of units."""

import difflib
import re
from fractions import Fraction

BASE = ("m", "kg", "s", "A", "K", "mol", "cd")
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


# What people write for units, for the advice in errors.
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
    """What to write in place of a symbol that is not known."""
    powers = {**{symbol: (symbol, 0) for symbol in (*BASE, *_DERIVED)}, "g": ("kg", -3), "gram": ("kg", -3)}
    powers |= {full: (symbol, 0) for full, symbol in _NAMES.items()}
    for prefix, power in {"": 0, **_PREFIXES}.items():
        unit = name.removeprefix(prefix)
        symbol, own = powers.get(unit) or powers.get(unit.removesuffix("s")) or ("", 0)
        if name.startswith(prefix) and symbol and power + own:
            return f"Units have no prefixes here: write 1e{power + own} * Unitful(x, {symbol!r})."
    near = difflib.get_close_matches(name, powers, n=1, cutoff=0.7)
    hint = f" Did you mean {powers[near[0]][0]!r}?" if near else ""
    return f"Known: {', '.join((*BASE, *_DERIVED))}.{hint}"


def of_symbol(name: str) -> tuple[Fraction, ...]:
    """The exponents of the base units for a symbol, in order."""
    exponents = {name: 1} if name in BASE else _DERIVED.get(name)
    if exponents is None:
        raise ValueError(f"{name!r} is not a unit of the SI. {_advice(name)}")
    return tuple(Fraction(exponents.get(base, 0)) for base in BASE)


def parse(text: str) -> list[tuple[str, Fraction]]:
    """Parses the factors of a unit, and the power of each."""
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


def superscript(e: Fraction) -> str:
    """Formats the power behind a symbol."""
    if e == 1:
        return ""
    return str(e).translate(_RAISE) if e.denominator == 1 else f"^({e})"
