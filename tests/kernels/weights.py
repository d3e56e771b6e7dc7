"""Quantised and block-sparse weights with their dense values, for the tests of the kernels."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quaxlike as ql
from quaxlike.arrays.quantized.scales import BlockScales
from quaxlike.kernels import NestedScales, blockwise, transposed_index
from quaxlike.kernels.block_matmul import INTEGERS, NIBBLES, Decode, Rows
from quaxlike.kernels.block_matmul.product import Product
from tests.samples import once


class Stored(NamedTuple):
    """A weight of any codec, as products take it, and its value in float64."""

    leaves: tuple[Any, ...]
    decode: Decode
    shape: tuple[int, int]
    block_size: int
    dense: np.ndarray

    @property
    def params(self) -> dict[str, Any]:
        return {"shape": self.shape, "block_size": self.block_size}

    def product(self, transpose=False, out_dtype="float32") -> Product:
        return Product(self.shape, self.block_size, transpose, np.dtype(out_dtype))


@once
def stored(codec, n, k, block_size=64, seed=0) -> Stored:
    """A random weight: "nested" is NF4 with scales in 8 bits, and "int8 in blocks" has blocks of 16. Only
    blocks of 4-bit codebooks are of `block_size`, which may cross rows."""
    shape = n, k
    w = jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)
    if codec in ("nf4", "fp4", "int4", "nested"):
        codebook = blockwise.NF4 if codec == "nested" else getattr(blockwise, codec.upper())
        packed, absmax = blockwise.quantize_codebook(w, codebook, block_size=block_size)
        scales = absmax
        if codec == "nested":
            absmax = NestedScales(*blockwise.quantize_scales(absmax), jnp.asarray(blockwise.dynamic_map()))
            scales = blockwise.dequantize_scales(*absmax[:3])
        flat = blockwise.dequantize_codebook(packed, scales, codebook, n=w.size, block_size=block_size)
        leaves = packed, absmax, jnp.asarray(codebook)
        return Stored(leaves, NIBBLES, shape, block_size, np.float64(flat).reshape(shape))
    if codec in ("int8", "int8 in blocks"):
        block_size = max(k, 1) if codec == "int8" else 16
        leaves = blockwise.quantize_int(w, 127, block_size)
        codes, scale = leaves
        dense = np.float32(codes) * np.repeat(scale, block_size, axis=1)[:, :k]
        return Stored(leaves, INTEGERS, shape, block_size, np.float64(dense))
    array = ql.BlockArray.quantize(w, codec=codec)
    scale = array.scale
    parts = array.codes, *(scale.parts() if isinstance(scale, BlockScales) else (scale, None, None, None))
    present = tuple(part is not None for part in parts)
    leaves = tuple(part for part in parts if part is not None)
    return Stored(leaves, Rows(array.codec, present), shape, array.block, np.float64(array.materialise()))


class BlockSparse(NamedTuple):
    """Operands of a block-sparse weight, and its value in float64."""

    blocks: jax.Array
    col_idx: np.ndarray
    transposed_idx: np.ndarray

    @property
    def dense(self) -> np.ndarray:
        return np.asarray(densify(self, self.blocks), np.float64)


def block_sparse(mask, b, dtype=jnp.float32, seed=0) -> BlockSparse:
    """A random block in each place where the mask, of block rows by block columns, holds."""
    rows, columns = mask.shape
    slots = int(mask.sum(1).max(initial=0))
    col_idx = np.full((rows, slots), columns, np.int32)
    for row, present in zip(col_idx, mask, strict=True):
        row[: present.sum()] = np.flatnonzero(present)
    rng = np.random.default_rng(seed)
    blocks = jnp.asarray(rng.standard_normal((rows, slots, b, b)), dtype)
    return BlockSparse(blocks, col_idx, transposed_index(col_idx, columns))


def densify(w: BlockSparse, blocks) -> jax.Array:
    """The weight with these blocks, differentiably."""
    rows, _, b, _ = blocks.shape
    columns = len(w.transposed_idx)
    full = jnp.zeros((rows, columns + 1, b, b), blocks.dtype)
    full = full.at[np.arange(rows)[:, None], w.col_idx].add(blocks)[:, :columns]
    return jnp.moveaxis(full, 2, 1).reshape(rows * b, columns * b)


def relative_error(y, expected) -> float:
    y, expected = np.float64(y), np.float64(expected)
    assert y.shape == expected.shape
    return float(np.linalg.norm(y - expected) / max(np.linalg.norm(expected), 1e-30))


def tpu_at_hand(kind="TPU v5 lite"):
    """A context in which kernels are lowered for a TPU, as if one were there."""
    return _at_hand(jax.sharding.AbstractDevice, kind, "tpu")


def gpu_at_hand(capability):
    """A context in which kernels are lowered for a GPU of a compute capability, such as "8.0"."""

    class Device(jax.sharding.AbstractDevice):
        compute_capability = capability

    return _at_hand(Device, f"of compute capability {capability}", "gpu")


def _at_hand(cls, kind, platform):
    kind = {"device_kind": kind, "num_cores": 1}
    try:
        device = cls(**kind, platform=platform)
    except TypeError:  # up to JAX 0.10
        device = cls(**kind)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def lowered(fn, *args, platform="cuda"):
    """The program that JAX lowers a function to, for another platform."""
    return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def stored_nf4(n, k, nested=False):
    """The shapes of the codes and scales of an (n, k) weight in NF4."""
    blocks = n * k // 64
    of = jax.ShapeDtypeStruct
    absmax = of((blocks,), jnp.float32)
    if nested:
        absmax = NestedScales(
            of((blocks,), jnp.uint8),
            of((-(-blocks // 256),), jnp.float32),
            of((), jnp.float32),
            of((256,), jnp.float32),
        )
    return of((n * k // 2,), jnp.uint8), absmax
