"""Fused products as GPU programs, on random operands in the model of a GPU."""

import functools

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from quaxlike.kernels import blockwise
from quaxlike.kernels.block_matmul import gpu, tilings
from quaxlike.kernels.block_matmul.product import Product
from quaxlike.kernels.block_matmul.tilings import Problem, Tiling
from tests.samples import Late

from . import simt

mosaic = Late("quaxlike.kernels.block_matmul.mosaic")

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}

# The formats that weights are published in: GPTQ and AWQ, MXFP4, NVFP4, Q4_0, Q4_1, Q8_0, FP8 in blocks.
FORMATS = {
    "gptq": {"block_size": 128, "zeros": "points", "kind": "uint8", "scales": "float16"},
    "awq": {"block_size": 64, "zeros": "points", "kind": "float32", "scales": "bfloat16"},
    "mxfp4": {"block_size": 32, "scales": "e8m0"},
    "mxfp4 of GGUF": {"block_size": 32, "scales": "e8m0_half"},
    "nvfp4": {"block_size": 16, "scales": "e4m3"},
    "q4_0": {"block_size": 32, "scales": "float16"},
    "q4_1": {"block_size": 32, "scales": "float16", "zeros": "plus", "kind": "float16"},
    "q4_k": {"block_size": 32, "scales": "float32", "zeros": "minus", "kind": "float32"},
    "q8_0": {"block_size": 32, "scales": "float16", "bits": 8},
    "fp8 in blocks": {"block_size": 128, "scales": "float32", "bits": 8},
}


def problem(
    m,
    n,
    k,
    block_size=64,
    *,
    scales="float32",
    zeros="uint8",
    adapters=0,
    rank=0,
    dtype="bfloat16",
    out_dtype="float32",
    **product,
):
    product = Product((n, k), block_size, **product)
    return Problem(product, m, dtype, out_dtype, adapters, rank, scales, zeros)


def _numbers(rng, kind, count):
    """Arrays of scales or zero points as the kernel takes them, and their values."""
    if kind == "nested":
        codes, quant_map = rng.integers(0, 256, count, np.uint8), blockwise.dynamic_map()
        absmax = rng.uniform(0.5, 1, -(-count // 256)).astype(np.float32)
        arrays = [np.pad(codes, (0, -count % 4)), absmax, np.float32(0.75).reshape(1), quant_map]
        values = np.float64(quant_map[codes]) * absmax[np.arange(count) // 256] + 0.75
        return arrays, np.float64(values.astype(np.float32))  # rounded once
    if kind == "uint8":
        stored = rng.integers(0, 16, count, np.uint8)
        values = stored
    elif kind in ("e8m0", "e8m0_half"):
        stored = rng.integers(120, 130, count).astype(np.uint8)
        values = 2.0 ** (stored.astype(int) - 127 - (kind == "e8m0_half"))
    elif kind == "e4m3":
        stored = rng.integers(0, 127, count).astype(np.uint8)
        values = stored.view(ml_dtypes.float8_e4m3fn)
    else:
        stored = values = rng.uniform(0.5, 2, count).astype(DTYPES[kind])
    words = np.pad(stored, (0, -count % (4 // stored.itemsize)))
    return [words], values.astype(np.float64)


def stored(p: Problem, seed=0):
    """Codes, scales, zero points and the table of a random weight, as kernels take them, and its value."""
    rng = np.random.default_rng(seed)
    product = p.product
    n, k = product.shape
    codes = rng.integers(0, 2**product.bits, (n, k), np.uint8)
    first, second = codes[:, :: product.planes], codes[:, 1 :: product.planes]
    if product.bits == 4:
        packed = second << 4 | first if product.low_first else first << 4 | second
    else:
        packed = codes
    table = blockwise.NF4 if product.bits == 4 else rng.uniform(-1, 1, 256).astype(np.float32)
    scales, scale = _numbers(rng, p.scales, n * product.row_blocks)
    zeros, zero = [], None
    if product.zeros is not None:
        zeros, zero = _numbers(rng, p.zeros, n * product.row_blocks)
    spread = lambda z: np.repeat(np.float64(z), product.block_size).reshape(n, k)
    if p.exact or p.m == 0:  # the latter is decoded alone
        dense = np.float64(table)[codes] * spread(scale)
        if product.zeros is not None:
            factor = {"points": -scale, "plus": 1.0, "minus": -1.0}[product.zeros]
            dense += spread(zero * factor)
        dense = np.float64(dense.astype(np.float32).astype(DTYPES[p.dtype]))
    else:
        dense = np.float64(table.astype(DTYPES[p.dtype]))[codes] * spread(scale)
    return [packed.reshape(-1), *scales, *zeros, table], dense


def execute(p: Problem, tiling: Tiling, seed=0):
    """What the program computes, what it should (in float64, of its rounded inputs), and stats."""
    rng = np.random.default_rng([seed, 1])
    product, dtype = p.product, DTYPES[p.dtype]
    n = product.shape[0]
    x = rng.standard_normal((p.m, product.contracted)).astype(dtype)
    operands, dense = stored(p, seed)
    expected = x.astype(np.float64) @ (dense if product.transpose else dense.T)
    low_rank = []
    if p.adapters:
        t = rng.standard_normal((p.m, p.adapters, p.rank)).astype(dtype)
        b = rng.standard_normal((p.adapters, n, p.rank)).astype(dtype)
        t[:, 1::2] = 0  # adapters that no row takes
        expected += np.einsum("mar,anr->mn", t.astype(np.float64), b.astype(np.float64))
        in_use = gpu.adapters_in_use(jnp.asarray(t), p.groups, 8 * p.token_tiles)
        low_rank = [t, b, *map(np.asarray, in_use)]
        b[1::2] = np.nan  # are not read
    y, stats = run(p, tiling, x, *operands, *low_rank)
    return np.sum(y, axis=0), expected, stats


def run(p: Problem, tiling: Tiling, *operands):
    """The terms of a product, as `gpu.pallas_kernel` computes them, and stats."""
    return simt.run(
        functools.partial(mosaic.emit, p=p, tiling=tiling),
        operands,
        ((tiling.splits, p.m, p.product.free), DTYPES[p.out_dtype]),
        [((mosaic.shared_words(p, tiling),), np.uint32)],
        blocks=tilings.blocks(p, tiling),
        threads=tiling.threads,
    )
