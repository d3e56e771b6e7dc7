"""Formats for quantised weights in safetensors files. Each of them has its own module."""

from . import awq, bitsandbytes, compressed_tensors, float8, gptq, hqq, mlx, mxfp4, torchao
from .format import Format

#: We try these in order, so if several formats support the same type then the most specific must come first.
FORMATS: list[Format] = [
    module.FORMAT
    for module in (awq, bitsandbytes, mxfp4, compressed_tensors, float8, gptq, hqq, mlx, torchao)
]
