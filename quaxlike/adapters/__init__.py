"""Adapter methods, with one file each, and the combinators they are built from.

Each file defines the method's array type, a function that creates a new adapter on a weight, and a record
that describes how it is saved in PEFT's format. To add a new method, list its record here.
"""

# Imported only for its side effect of registering the rules for combinators.
from . import rules  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .adalora import ADALORA, AdaLoRAArray
from .alora import ALoRAArray
from .boft import BOFT, BOFTArray
from .c3a import C3A, C3AArray
from .combinators import HadamardArray, RotatedArray, ScaledArray, SumArray
from .delora import DELORA, DeLoRAArray
from .fourierft import FOURIERFT, FourierFTArray
from .gralora import GRALORA, GraLoRAArray
from .hira import HIRA, HiRAArray
from .hra import HRA, HRAArray
from .ia3 import IA3, IA3Array
from .loha import LOHA, LoHaArray
from .lokr import LOKR, LoKrArray
from .lora import LORA
from .method import MethodArray
from .miss import MISS, MiSSArray
from .oft import OFT, OFTArray
from .randlora import RANDLORA, RandLoRAArray
from .shira import SHIRA, SHiRAArray
from .vera import VERA, VeRAArray

_ALL = (
    LORA,
    IA3,
    OFT,
    BOFT,
    HRA,
    VERA,
    LOHA,
    LOKR,
    HIRA,
    SHIRA,
    MISS,
    C3A,
    DELORA,
    ADALORA,
    GRALORA,
    RANDLORA,
    FOURIERFT,
)

#: Methods' records by name. For example, "vera" is mapped to `VERA`.
METHODS = {method.name: method for method in _ALL}

__all__ = [
    "METHODS",
    "ALoRAArray",
    "AdaLoRAArray",
    "BOFTArray",
    "C3AArray",
    "DeLoRAArray",
    "FourierFTArray",
    "GraLoRAArray",
    "HRAArray",
    "HadamardArray",
    "HiRAArray",
    "IA3Array",
    "LoHaArray",
    "LoKrArray",
    "MethodArray",
    "MiSSArray",
    "OFTArray",
    "RandLoRAArray",
    "RotatedArray",
    "SHiRAArray",
    "ScaledArray",
    "SumArray",
    "VeRAArray",
]
