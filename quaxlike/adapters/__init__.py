"""Methods of adaptation as array types, and what they are made of: sums, scaled and rotated weights."""

# Imported to register rules.
from . import rules  # noqa: F401  # pyright: ignore[reportUnusedImport]
from .activated import ALoRAArray
from .combinators import HadamardArray, RotatedArray, ScaledArray, SumArray
from .low_rank import AdaLoRAArray, DeLoRAArray, GraLoRAArray, MiSSArray, RandLoRAArray, VeRAArray
from .method import MethodArray
from .products import C3AArray, FourierFTArray, HiRAArray, LoHaArray, LoKrArray, SHiRAArray
from .rotated import BOFTArray, HRAArray, OFTArray
from .scaled import IA3Array

__all__ = [
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
