"""Block-wise quantisation as pure functions of arrays."""

from .codebooks import FP4 as FP4
from .codebooks import INT4 as INT4
from .codebooks import NF4 as NF4
from .codebooks import dynamic_map as dynamic_map
from .quantize import NESTED_BLOCK as NESTED_BLOCK
from .quantize import check_block_size as check_block_size
from .quantize import dequantize_codebook as dequantize_codebook
from .quantize import dequantize_int as dequantize_int
from .quantize import dequantize_scales as dequantize_scales
from .quantize import quantize_codebook as quantize_codebook
from .quantize import quantize_int as quantize_int
from .quantize import quantize_scales as quantize_scales
from .quantize import unpack_codes as unpack_codes
