"""The products of the compile check: their functions, and the shapes and dtypes of their operands."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from quaxlike import BlockArray, quantize, quaxify
from quaxlike.kernels import (
    NestedScales,
    block_sparse_matmul,
    blockwise,
    int8_matmul,
    lora_matmul,
    nf4_matmul,
)

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))
WAYS = "forward", "gradient of x", "gradient of blocks"
_BLOCK = 64
_RANK = 16


class Row(NamedTuple):
    """A product to compile.

    **Attributes:**

    - `operation`: its name in the table.
    - `shape`, `m`: of the weight, and how many rows of `x`.
    - `fn`, `operands`: the function, and the shapes and dtypes of its arguments.
    - `weight_bytes`: of the same weight in bfloat16 (of the stored blocks alone, where it is sparse).
    """

    operation: str
    shape: tuple[int, int]
    m: int
    fn: Callable[..., Any]
    operands: tuple[Any, ...]
    weight_bytes: int

    @property
    def name(self) -> str:
        return f"{self.operation} {self.shape[0]}×{self.shape[1]}, M = {self.m}"

    @property
    def dense_bytes(self) -> int:
        """Of a dense copy of the weight in bfloat16."""
        return 2 * self.shape[0] * self.shape[1]

    @property
    def macs(self) -> int:
        """How many numbers are multiplied with the weight, at least: tensor cores take 8 rows of `x`."""
        return max(self.m, 8) * self.weight_bytes // 2

    @property
    def for_a_device(self) -> bool:
        """Whether it is lowered for a device that is described.

        Products with int8 and fp8 are XLA's alone, and JAX 0.12 lowers what may be divided between devices
        for no device that is described.
        """
        return not self.operation.startswith(("int8", "fp8"))

    @property
    def of_codes(self) -> bool:
        """Whether both operands are codes of 8 bits, and the library is asked to multiply these."""
        return "×" in self.operation


def rows(platform: str) -> Iterator[Row]:
    """The rows of the table for `"cuda"` or `"tpu"`."""
    large = SHAPES[0]
    if platform == "tpu":  # half a minute each
        yield from (nf4(shape, 16) for shape in SHAPES)
        yield from (nf4(large, 1), nf4(large, 512), nf4(large, 16, transpose=True), lora(large, 16, None))
        yield from (int8(large, 16, False), int8(large, 16, True))
        yield from (block_sparse(4096, 4096, 0.1, way) for way in WAYS)
        return
    for shape, m in itertools.product(SHAPES, (1, 16, 64, 512)):
        yield nf4(shape, m)
    yield nf4(large, 128)
    yield nf4(large, 4096)
    yield nf4(large, 16, dtype=jnp.float32)
    yield nf4(large, 16, codebook="FP4")
    yield nf4(large, 16, nested=True)
    yield nf4(large, 512, nested=True)
    for m in (1, 16, 64, 4096):
        yield nf4(large, m, transpose=True)
    for codec, transpose in itertools.product(("mxfp4", "uint4_block", "q8_0"), (False, True)):
        yield block(large, 16, codec, transpose)
    yield block(large, 64, "mxfp4")
    for codec in ("mxfp4", "uint4_block", "q8_0"):
        yield block(large, 512, codec)
    yield block(large, 4096, "mxfp4", True)
    for m, adapters in ((1, None), (64, None), (64, 32), (512, None)):
        yield lora(large, m, adapters)
    for m, transpose in itertools.product((1, 16, 64, 4096), (False, True)):
        yield int8(large, m, transpose)
    for m, transpose in itertools.product((16, 4096), (False, True)):
        yield int8(large, m, transpose, block_size=64)
    for scheme, way in itertools.product(("int8", "fp8"), WAYS[:2]):
        yield rounded(large, 512, scheme, way)
    for density, way in itertools.product((0.1, 0.5), WAYS):
        yield block_sparse(4096, 4096, density, way)
    for m in (1, 16):
        yield block_sparse(4096, m, 0.1, "forward")
    for way in WAYS:
        yield block_sparse(4096, 4000, 0.1, way)  # no multiple of a tile
    for way in WAYS:
        yield block_sparse(4096, 4096, 0.1, way, b=32)
    for way in WAYS:
        yield block_sparse(4096, 4096, 0.1, way, dtype=jnp.float32)


def nf4(
    shape: tuple[int, int],
    m: int,
    *,
    codebook: str = "NF4",
    nested: bool = False,
    transpose: bool = False,
    dtype: Any = jnp.bfloat16,
) -> Row:
    params = {"shape": shape, "block_size": _BLOCK, "transpose": transpose}
    fn = lambda x, packed, absmax: nf4_matmul(x, packed, absmax, getattr(blockwise, codebook), **params)
    kind = ", double" * nested + ", x @ W" * transpose + ", float32" * (dtype == jnp.float32)
    x = _of((m, shape[not transpose]), dtype)
    return _row(codebook + kind, shape, m, fn, (x, *_four_bit(shape, nested)))


def block(shape: tuple[int, int], m: int, codec: str, transpose: bool = False) -> Row:
    """A weight in one of the block formats, as its array type stores it."""
    of_array = functools.partial(BlockArray.quantize, codec=codec)
    w = jax.eval_shape(of_array, _of(shape))
    fn = quaxify(lambda x, w: x @ (w if transpose else w.T))
    return _row(
        f"BlockArray {codec}" + ", x @ W" * transpose, shape, m, fn, (_of((m, shape[not transpose])), w)
    )


def lora(shape: tuple[int, int], m: int, adapters: int | None) -> Row:
    n, k = shape
    lead = () if adapters is None else (adapters,)
    index = None if adapters is None else np.arange(m) % adapters

    def fn(x: Any, packed: Any, absmax: Any, a: Any, b: Any) -> Any:
        chosen = None if index is None else jnp.asarray(index)
        params: dict[str, Any] = {"shape": shape, "block_size": _BLOCK, "adapter_index": chosen}
        return lora_matmul(x, packed, absmax, blockwise.NF4, a, b, **params)

    low_rank = _of((*lead, _RANK, k)), _of((*lead, n, _RANK))
    name = f"NF4 + {'LoRA' if adapters is None else f'{adapters} LoRAs'} of rank {_RANK}"
    return _row(name, shape, m, fn, (_of((m, k)), *_four_bit(shape, False), *low_rank))


def int8(shape: tuple[int, int], m: int, transpose: bool, block_size: int | None = None) -> Row:
    fn = functools.partial(int8_matmul, transpose=transpose, block_size=block_size)
    blocks = 1 if block_size is None else -(-shape[1] // block_size)
    operands = _of((m, shape[not transpose])), _of(shape, jnp.int8), _of((shape[0], blocks), jnp.float32)
    kind = "" if block_size is None else f", blocks of {block_size}"
    return _row("int8" + kind + ", x @ W" * transpose, shape, m, fn, operands)


def rounded(shape: tuple[int, int], m: int, scheme: str, way: str) -> Row:
    """A weight, and an input or a cotangent that is rounded to 8 bits."""
    make = functools.partial(eqx.nn.Linear, shape[1], shape[0], use_bias=False, dtype=jnp.bfloat16)
    quantized = lambda key: quantize(make(key=key), scheme, activations=scheme, rounds_gradients=True)
    layer = jax.eval_shape(quantized, jax.random.key(0))
    run = lambda layer, x: jax.vmap(quaxify(layer))(x)
    back = lambda layer, x, ct: jax.vjp(lambda x: run(layer, x), x)[1](ct)[0]
    x, ct = _of((m, shape[1])), _of((m, shape[0]))
    fn, operands = (run, (layer, x)) if way == "forward" else (back, (layer, x, ct))
    return _row(f"{scheme} × {scheme}, {way}", shape, m, fn, operands)


def block_sparse(size: int, m: int, density: float, way: str, b: int = 128, dtype: Any = jnp.bfloat16) -> Row:
    blocks = size // b
    slots = round(density * blocks)
    w = _of((blocks, slots, b, b), dtype)
    index = _of((blocks, slots), jnp.int32), _of((blocks, slots + 3), jnp.int32)

    def gradient(argument: int, x: Any, ct: Any, w: Any, *index: Any) -> Any:
        return jax.vjp(lambda x, w: block_sparse_matmul(x, w, *index), x, w)[1](ct)[argument]

    gradients = {"gradient of x": 0, "gradient of blocks": 1}
    fn = functools.partial(gradient, gradients[way]) if way in gradients else block_sparse_matmul
    x = [_of((m, size), dtype)] * (2 if way in gradients else 1)
    kind = f", blocks of {b}" * (b != 128) + ", float32" * (dtype == jnp.float32)
    name = f"block-sparse{kind}, {density:.0%}, {way}"
    return _row(name, (size, size), m, fn, (*x, w, *index), weight=w.size)


def _row(
    operation: str,
    shape: tuple[int, int],
    m: int,
    fn: Callable[..., Any],
    operands: tuple[Any, ...],
    weight: int | None = None,
) -> Row:
    return Row(operation, shape, m, fn, operands, 2 * (shape[0] * shape[1] if weight is None else weight))


def _four_bit(shape: tuple[int, int], nested: bool) -> tuple[Any, Any]:
    n, k = shape
    blocks = n * k // _BLOCK
    if not nested:
        return _of((n, k // 2), jnp.uint8), _of((n, k // _BLOCK), jnp.float32)
    of_scales = (blocks,), (-(-blocks // 256),), (), (256,)
    dtypes = jnp.uint8, jnp.float32, jnp.float32, jnp.float32
    return _of((n * k // 2,), jnp.uint8), NestedScales(*map(_of, of_scales, dtypes))


def _of(shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
