"""Conversion to and from quantities of pint and astropy, if installed."""

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.values import materialise
from .array import DimensionError, Unit, Unitful

_PINT = {
    "meter": "m",
    "kilogram": "kg",
    "second": "s",
    "ampere": "A",
    "kelvin": "K",
    "mole": "mol",
    "candela": "cd",
    "radian": "rad",
}


def from_pint(quantity: Any) -> Unitful:
    """Converts a `pint.Quantity` to an array in SI base units.

    **Raises:** `ValueError` for a unit that isn't an SI unit.
    """
    base = quantity.to_base_units()
    exponents = {}
    for name, power in base.unit_items():
        if name not in _PINT:
            raise ValueError(f"{quantity.units} is not an SI unit: it reduces to {base.units}.")
        exponents[_PINT[name]] = power
    return Unitful(jnp.asarray(base.magnitude), Unit(exponents))


def to_pint(x: Unitful, registry: Any = None) -> Any:
    """Converts to a `pint.Quantity` with a NumPy array.

    **Arguments:**

    - `registry`: a `pint.UnitRegistry`. Default: pint's application registry.
    """
    pint = _installed("pint", "to_pint")
    registry = pint.get_application_registry() if registry is None else registry
    names = {symbol: name for name, symbol in _PINT.items()}
    unit = registry.dimensionless
    for symbol, power in _exponents(x).items():
        unit = unit * registry.Unit(names[symbol]) ** (power.numerator / power.denominator)
    return np.asarray(materialise(x.array)) * unit


def from_astropy(quantity: Any) -> Unitful:
    """Converts an `astropy.units.Quantity` to an array in SI base units.

    **Raises:** `ValueError` for a unit that isn't an SI unit.
    """
    unit = quantity.unit.decompose()
    exponents = {base.name: power for base, power in zip(unit.bases, unit.powers, strict=True)}
    return Unitful(jnp.asarray(quantity.value * unit.scale), Unit(exponents))


def to_astropy(x: Unitful) -> Any:
    """Converts to an `astropy.units.Quantity` with a NumPy array."""
    units = _installed("astropy.units", "to_astropy")
    unit = units.dimensionless_unscaled
    for symbol, power in _exponents(x).items():
        unit = unit * units.Unit(symbol) ** power
    return np.asarray(materialise(x.array)) * unit


def _installed(module: str, function: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{function} needs {package}, which is not installed: pip install {package}", name=error.name
        ) from error


def _exponents(x: Unitful) -> dict[str, Any]:
    if Unit(x.unit.exponents) != x.unit:
        raise DimensionError(f"A quantity of another library has one unit; found one in {x.unit}.")
    return x.unit.exponents
