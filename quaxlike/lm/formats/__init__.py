"""Formats for quantised weights in safetensors files, each in its own module."""

from . import awq, bitsandbytes, compressed_tensors, float8, gptq, hqq, mlx, mxfp4, torchao
from .format import Format

#: Tried in order. If several formats support the same type, then the most specific must come first.
FORMATS: list[Format] = [
    module.FORMAT
    for module in (awq, bitsandbytes, mxfp4, compressed_tensors, float8, gptq, hqq, mlx, torchao)
]
