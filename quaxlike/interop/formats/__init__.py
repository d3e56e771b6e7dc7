"""The table of formats of quantised weights in safetensors; to add one, add its module's record here."""

from . import awq, bitsandbytes, compressed_tensors, float8, gptq, hqq, mlx, mxfp4, torchao
from .format import Format

FORMATS: list[Format] = [
    awq.FORMAT,
    bitsandbytes.FORMAT,
    compressed_tensors.FORMAT,
    float8.FORMAT,
    gptq.FORMAT,
    hqq.FORMAT,
    mlx.FORMAT,
    mxfp4.FORMAT,
    torchao.FORMAT,
]
