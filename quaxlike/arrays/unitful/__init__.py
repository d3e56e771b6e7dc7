"""Arrays with units of the SI, checked and worked out while tracing."""

from . import rules as _rules  # noqa: F401  # pyright: ignore[reportUnusedImport] (registers them)
from .array import Unitful as Unitful
from .convert import from_astropy as from_astropy
from .convert import from_pint as from_pint
from .convert import to_astropy as to_astropy
from .convert import to_pint as to_pint
from .unit import DimensionError as DimensionError
from .unit import Unit as Unit
from .unit import ampere as ampere
from .unit import candela as candela
from .unit import coulomb as coulomb
from .unit import dimensionless as dimensionless
from .unit import farad as farad
from .unit import henry as henry
from .unit import hertz as hertz
from .unit import joule as joule
from .unit import kelvin as kelvin
from .unit import kilogram as kilogram
from .unit import metre as metre
from .unit import mole as mole
from .unit import newton as newton
from .unit import ohm as ohm
from .unit import pascal as pascal
from .unit import second as second
from .unit import siemens as siemens
from .unit import tesla as tesla
from .unit import volt as volt
from .unit import watt as watt
from .unit import weber as weber
