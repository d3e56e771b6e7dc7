"""Formats of quantised weights in safetensors: one module each, and the list of their records."""

from . import awq, bitsandbytes, compressed_tensors, float8, gptq, hqq, mlx, mxfp4, torchao
from .format import Format

#: Formats are tried in order, so a more specific format for a type must come first.
FORMATS: list[Format] = [
    module.FORMAT
    for module in (awq, bitsandbytes, mxfp4, compressed_tensors, float8, gptq, hqq, mlx, torchao)
]
