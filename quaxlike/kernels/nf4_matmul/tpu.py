"""The matmul with 4-bit weights on TPUs.

Codes are read as they are stored. A byte holds two neighbouring columns of a row of `W`; bytes lie
along lanes, so that the high nibbles of a tile are its even columns and the low ones its odd columns.
The two are multiplied apart, by the even and by the odd columns of `x`: nothing is interleaved. Both
the codebook and the scales are looked up within the 128 lanes of a register.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from ..backends import PARTITIONED, Choice, pallas_tpu_refusal
from .scales import NestedScales, dense_scales

_LANES = 128
_ROWS_OF_X = 256  # in a tile


def choose(platform: str, x: Any, **params: Any) -> Choice | str:
    """How the operation runs on a TPU, or why it does not."""
    refusal = PARTITIONED if params["partitioned"] else pallas_tpu_refusal(platform)
    if refusal is not None:
        return refusal
    n, k = params["shape"]
    block_size = params["block_size"]
    if n % _LANES or k % (2 * _LANES):
        return f"the TPU kernel takes shapes of multiples of 128 and 256, not {(n, k)}"
    if block_size.bit_count() != 1 or block_size < 16 or k % block_size:
        return f"the TPU kernel takes blocks of a power of two within rows, not {block_size}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the TPU kernel takes bfloat16 and float32, not {x.dtype}"
    if x.size == 0:
        return "the TPU kernel takes at least one row of x"
    interpret = platform != "tpu"
    how = "a Pallas kernel" + (", interpreted" if interpret else "")
    return Choice("tpu", how, functools.partial(matmul, interpret=interpret))


def matmul(
    x: Array,
    packed: Array,
    absmax: Array | NestedScales,
    codebook: Array,
    *low_rank: Array,
    shape: tuple[int, int],
    block_size: int,
    out_dtype: np.dtype,
    transpose: bool = False,
    interpret: bool = False,
) -> Array:
    """The Pallas kernel; `low_rank` is nothing, or `t` and `b` as in `lora_matmul_reference`."""
    n, k = shape
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    rows = min(_ROWS_OF_X, -(-m // 16) * 16)
    as_rows = lambda z: jnp.pad(z.reshape(m, z.shape[-1]), ((0, -m % rows), (0, 0)))
    x = as_rows(x)
    packed = packed.reshape(n, k // 2)
    scales = dense_scales(absmax).reshape(n, k // block_size)
    scales = jnp.pad(scales, ((0, 0), (0, -scales.shape[1] % _LANES)))
    table = jnp.pad(codebook, (0, _LANES - 16)).reshape(1, _LANES)
    tile_n, tile_bytes = _tile(n, 512), _tile(k // 2, 1024)
    weight = _Weight(packed, scales, table, block_size // 2, tile_n, tile_bytes)
    if transpose:
        even, odd = _transposed(x, weight, rows, out_dtype, interpret)
        y = jnp.stack([even, odd], axis=-1).reshape(x.shape[0], k)
    else:
        if low_rank:
            t, b = low_rank
            # Adapters beside each other, as one of the summed rank.
            low_rank = as_rows(t.reshape(m, -1)), jnp.moveaxis(b, 0, 1).reshape(n, -1)
        y = _forward((x[:, 0::2], x[:, 1::2]), low_rank, weight, rows, out_dtype, interpret)
    return y[:m].reshape(*lead, y.shape[1])


class _Weight(NamedTuple):
    packed: Array  # (n, k / 2)
    scales: Array  # (n, k / block_size), padded to whole registers
    table: Array  # (1, 128)
    block_bytes: int
    tile_n: int
    tile_bytes: int

    @property
    def operands(self) -> tuple[Array, Array, Array]:
        return self.packed, self.scales, self.table

    def specs(self, place: Callable[..., tuple[Any, Any]]) -> list[Any]:
        """How tiles of the operands are cut; `place` gives the tile's row and column in the grid."""
        import jax.experimental.pallas as pl

        scales_in_tile = self.tile_bytes // self.block_bytes

        def scales_at(*grid: Any) -> tuple[Any, Any]:
            n, k = place(*grid)
            return n, k * scales_in_tile // _LANES

        return [
            pl.BlockSpec((self.tile_n, self.tile_bytes), place),
            pl.BlockSpec((self.tile_n, _LANES), scales_at),
            pl.BlockSpec((1, _LANES), lambda *grid: (0, 0)),
        ]

    def decode(self, refs: Sequence[Any], k: Any, dtype: Any) -> Iterator[tuple[Any, ...]]:
        """For each 128 bytes of a tile's rows: where they are, their even and their odd columns."""
        packed, scales, table = refs
        lane = lax.broadcasted_iota(jnp.int32, (self.tile_n, _LANES), 1)
        lookup = functools.partial(jnp.take_along_axis, axis=1, mode="promise_in_bounds")
        values = jnp.broadcast_to(table[...], (self.tile_n, _LANES))
        for start in range(0, self.tile_bytes, _LANES):
            at = slice(start, start + _LANES)
            pairs = packed[:, at].astype(jnp.int32)
            block = (k * self.tile_bytes + start + lane) // self.block_bytes % _LANES
            scale = lookup(scales[...], block)
            even, odd = ((lookup(values, code) * scale).astype(dtype) for code in (pairs >> 4, pairs & 15))
            yield at, even, odd


def _forward(
    x: tuple[Array, Array],
    low_rank: Sequence[Array],
    weight: _Weight,
    rows: int,
    out_dtype: np.dtype,
    interpret: bool,
) -> Array:
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.tpu as pltpu

    m, (n, half_k) = x[0].shape[0], weight.packed.shape

    def kernel(x_even: Any, x_odd: Any, *refs: Any) -> None:
        packed, scales, table, *low_rank_refs, out, acc = refs
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _() -> None:
            if low_rank_refs:
                t, b = low_rank_refs
                acc[...] = _dot(t[...], b[...], 1)
            else:
                acc[...] = jnp.zeros_like(acc)

        for at, even, odd in weight.decode((packed, scales, table), k, x_even.dtype):
            acc[...] += _dot(x_even[:, at], even, 1) + _dot(x_odd[:, at], odd, 1)

        @pl.when(k == pl.num_programs(2) - 1)
        def _() -> None:
            out[...] = acc[...].astype(out.dtype)

    of_x = pl.BlockSpec((rows, weight.tile_bytes), lambda i, n, k: (i, k))
    of_low_rank = []
    if low_rank:
        rank = low_rank[0].shape[1]
        of_low_rank = [
            pl.BlockSpec((rows, rank), lambda i, n, k: (i, 0)),
            pl.BlockSpec((weight.tile_n, rank), lambda i, n, k: (n, 0)),
        ]
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(m // rows, n // weight.tile_n, half_k // weight.tile_bytes),
        in_specs=[of_x, of_x, *weight.specs(lambda i, n, k: (n, k)), *of_low_rank],
        out_specs=pl.BlockSpec((rows, weight.tile_n), lambda i, n, k: (i, n)),
        scratch_shapes=[pltpu.VMEM((rows, weight.tile_n), jnp.float32)],
        compiler_params=_compiler_params(),
        interpret=interpret,
        name="nf4_matmul",
    )(*x, *weight.operands, *low_rank)


def _transposed(
    x: Array, weight: _Weight, rows: int, out_dtype: np.dtype, interpret: bool
) -> tuple[Array, Array]:
    """The even and the odd columns of `x @ W`."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.tpu as pltpu

    m, (n, half_k) = x.shape[0], weight.packed.shape

    def kernel(x: Any, *refs: Any) -> None:
        *weight_refs, out_even, out_odd, acc_even, acc_odd = refs
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            acc_even[...] = jnp.zeros_like(acc_even)
            acc_odd[...] = jnp.zeros_like(acc_odd)

        for at, even, odd in weight.decode(weight_refs, pl.program_id(1), x.dtype):
            acc_even[:, at] += _dot(x[...], even, 0)
            acc_odd[:, at] += _dot(x[...], odd, 0)

        @pl.when(step == pl.num_programs(2) - 1)
        def _() -> None:
            out_even[...] = acc_even[...].astype(out_even.dtype)
            out_odd[...] = acc_odd[...].astype(out_odd.dtype)

    half = jax.ShapeDtypeStruct((m, half_k), out_dtype)
    of_half = pl.BlockSpec((rows, weight.tile_bytes), lambda i, k, n: (i, k))
    of_x = pl.BlockSpec((rows, weight.tile_n), lambda i, k, n: (i, n))
    return pl.pallas_call(
        kernel,
        out_shape=(half, half),
        grid=(m // rows, half_k // weight.tile_bytes, n // weight.tile_n),
        in_specs=[of_x, *weight.specs(lambda i, k, n: (n, k))],
        out_specs=(of_half, of_half),
        scratch_shapes=[pltpu.VMEM((rows, weight.tile_bytes), jnp.float32)] * 2,
        compiler_params=_compiler_params(),
        interpret=interpret,
        name="nf4_matmul_transposed",
    )(x, *weight.operands)


def _compiler_params() -> Any:
    import jax.experimental.pallas.tpu as pltpu

    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def _dot(x: Array, w: Array, axis: int) -> Array:
    """Contracts the last axis of `x` with `axis` of `w`."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x,
        w,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _tile(size: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides a size."""
    return math.gcd(size, largest)
