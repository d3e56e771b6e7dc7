"""Formats of quantised weights in safetensors: one module each, and the list of their records."""

from . import awq, bitsandbytes, compressed_tensors, float8, gptq, hqq, mlx, mxfp4, torchao
from .format import Format

FORMATS: list[Format] = [
    module.FORMAT
    for module in (awq, bitsandbytes, compressed_tensors, float8, gptq, hqq, mlx, mxfp4, torchao)
]
