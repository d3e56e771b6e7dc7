"""PEFT's methods beside LoRA, one record each: their tensors, options, and array types."""

from .low_rank import ADALORA, DELORA, GRALORA, MISS, RANDLORA, VERA
from .method import DROPOUT, Layer, Method, Source, Written
from .products import C3A, FOURIERFT, HIRA, LOHA, LOKR, SHIRA
from .rotated import BOFT, HRA, OFT
from .scaled import IA3

_ALL = (
    IA3, OFT, HRA, VERA, LOHA, LOKR, SHIRA, HIRA, MISS, C3A, DELORA, ADALORA, GRALORA, RANDLORA, BOFT,
    FOURIERFT,
)  # fmt: skip

#: By the entry `peft_type` of the configuration.
METHODS: dict[str, Method] = {method.peft_type: method for method in _ALL}

__all__ = ["DROPOUT", "METHODS", "Layer", "Method", "Source", "Written"]
