"""From and to the quantities of pint and astropy, if they are installed."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.values import materialise
from .array import Unit, Unitful

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
    """A `pint.Quantity`, converted to the base units of the SI.

    **Raises:** `ValueError` for a unit outside of the SI.
    """
    base = quantity.to_base_units()
    exponents = {}
    for name, power in base.unit_items():
        if name not in _PINT:
            raise ValueError(f"{quantity.units} has no place in the SI: it comes down to {base.units}.")
        exponents[_PINT[name]] = power
    return Unitful(jnp.asarray(base.magnitude), Unit(exponents))


def to_pint(x: Unitful, registry: Any = None) -> Any:
    """A `pint.Quantity` with a NumPy array.

    **Arguments:**

    - `registry`: a `pint.UnitRegistry`. Default: pint's application registry.
    """
    import pint

    registry = pint.get_application_registry() if registry is None else registry
    names = {symbol: name for name, symbol in _PINT.items()}
    unit = registry.dimensionless
    for symbol, power in x.unit.exponents.items():
        unit = unit * registry.Unit(names[symbol]) ** (power.numerator / power.denominator)
    return np.asarray(materialise(x.array)) * unit


def from_astropy(quantity: Any) -> Unitful:
    """An `astropy.units.Quantity`, converted to the base units of the SI.

    **Raises:** `ValueError` for a unit outside of the SI.
    """
    unit = quantity.unit.decompose()
    exponents = {base.name: power for base, power in zip(unit.bases, unit.powers, strict=True)}
    return Unitful(jnp.asarray(quantity.value * unit.scale), Unit(exponents))


def to_astropy(x: Unitful) -> Any:
    """An `astropy.units.Quantity` with a NumPy array."""
    from astropy import units

    unit = units.dimensionless_unscaled
    for symbol, power in x.unit.exponents.items():
        unit = unit * units.Unit(symbol) ** power
    return np.asarray(materialise(x.array)) * unit
