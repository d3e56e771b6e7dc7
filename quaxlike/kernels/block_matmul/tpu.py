"""The matmul with stored weights on TPUs.

Codes are used in their stored layout. If a byte packs two codes, these are two adjacent columns in a row of
`W`. Bytes are laid out along lanes, so one nibble in every byte belongs to an even column and the other to an
odd column. One plane is multiplied by the even columns of `x` and the other one by the odd columns, without
interleaving them, which would be expensive.

Values for 4-bit codes are looked up along the 8 sublanes of two registers. Scales are instead looked up along
a register's 128 lanes, as are values for 8-bit codes, and (prior to TPU v5) for all codes. Lookups along
lanes are several times as expensive if the indices differ between a register's rows. Integer codes don't
require a table.
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
from .codecs import scaled
from .nested_scales import NestedScales, dense_scales
from .product import Product

_LANES, _SUBLANES = 128, 8
_ROWS_OF_X = 256  # in a tile


def choose(platform: str, x: Any, *, product: Product, partitioned: bool, **params: Any) -> Choice | str:
    """Returns how to run the operation on a TPU, or why this is not supported."""
    refusal = PARTITIONED if partitioned else pallas_tpu_refusal(platform)
    if refusal is not None:
        return refusal
    (n, k), block_size = product.shape, product.block_size
    if product.bits not in (4, 8):
        return f"the TPU kernel takes codes of 4 and 8 bits, not {product.bits}"
    if n == 0 or k == 0 or n % _LANES or k % (product.planes * _LANES):
        return f"the TPU kernel takes shapes of multiples of 128 and {product.planes * _LANES}, not {(n, k)}"
    few = block_size.bit_count() == 1 and block_size >= 16 and k % block_size == 0
    if not few and block_size != k:
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
    product: Product,
    zeros: Array | None = None,
    interpret: bool = False,
) -> Array:
    """Computes the product using the Pallas kernel.

    **Arguments:**

    - `packed`, `absmax`, `zeros`: the codes, and floating-point scales and zero points, with any shape.
    - `low_rank`: either empty, or `t` and `b` as in `times_adapters`.
    """
    (n, k), out_dtype, planes = product.shape, product.out_dtype, product.planes
    lead, m = x.shape[:-1], math.prod(x.shape[:-1])
    rows = min(_ROWS_OF_X, -(-m // 16) * 16)  # bfloat16 registers have 16 sublanes

    def as_rows(z: Any) -> Any:
        return jnp.pad(z.reshape(m, z.shape[-1]), ((0, -m % rows), (0, 0)))

    x = as_rows(x)
    packed = packed.reshape(n, product.row_bytes)

    def by_blocks(z: Any) -> Any:
        # Pad this, because lookups along lanes require whole registers.
        z = z.reshape(n, product.row_blocks).astype(jnp.float32)
        return jnp.pad(z, ((0, 0), (0, -z.shape[1] % _LANES)))

    of_blocks = [by_blocks(z) for z in (dense_scales(absmax), zeros) if z is not None]
    if product.bits == 4 and _looks_up_along_sublanes(interpret):
        table = jnp.broadcast_to(jnp.pad(codebook, (0, 16 - codebook.size))[:, None], (16, _LANES))
    else:
        table = jnp.pad(codebook, (0, -codebook.size % _LANES))[None]
    tile_n, tile_bytes = _tile(n, 512), _tile(product.row_bytes, 2048 // planes)
    weight = _Weight(packed, of_blocks, table, product, tile_n, tile_bytes)
    if product.transpose:
        y = jnp.stack(_transposed(x, weight, rows, out_dtype, interpret), axis=-1).reshape(x.shape[0], k)
    else:
        if low_rank:
            t, b = low_rank
            # Concatenate all adapters into a single one: its rank is the sum of theirs.
            low_rank = as_rows(t.reshape(m, -1)), jnp.moveaxis(b, 0, 1).reshape(n, -1)
        y = _forward([x[:, i::planes] for i in range(planes)], low_rank, weight, rows, out_dtype, interpret)
    return y[:m].reshape(*lead, y.shape[1])


class _Weight(NamedTuple):
    packed: Array  # (n, bytes per row)
    of_blocks: list[Array]  # scales and zero points, (n, k / block_size), padded to whole registers
    table: Array  # (16, 128), with one value per row; or (1, 128) or (1, 256), with values along lanes
    product: Product
    tile_n: int
    tile_bytes: int

    @property
    def operands(self) -> list[Array]:
        return [self.packed, self.table, *self.of_blocks]

    @property
    def block_bytes(self) -> int:
        return self.product.block_size * self.product.bits // 8

    def specs(self, place: Callable[..., tuple[Any, Any]]) -> list[Any]:
        """Returns the operands' block specs. `place` maps a grid index to a tile's row and column."""
        import jax.experimental.pallas as pl

        scales_in_tile = self.tile_bytes // self.block_bytes

        def scales_at(*grid: Any) -> tuple[Any, Any]:
            n, k = place(*grid)
            return n, k * scales_in_tile // _LANES

        return [
            pl.BlockSpec((self.tile_n, self.tile_bytes), place),
            pl.BlockSpec(self.table.shape, lambda *grid: (0, 0)),
            *[pl.BlockSpec((self.tile_n, _LANES), scales_at) for _ in self.of_blocks],
        ]

    def decode(self, refs: Sequence[Any], k: Any, dtype: Any) -> Iterator[tuple[Any, list[Array]]]:
        """Yields 128-byte slices of a tile's rows, along with their decoded columns in each plane."""
        packed, table, *of_blocks = refs
        lane = lax.broadcasted_iota(jnp.int32, (self.tile_n, _LANES), 1)
        for start in range(0, self.tile_bytes, _LANES):
            at = slice(start, start + _LANES)
            codes = packed[:, at].astype(jnp.int32)
            block = (k * self.tile_bytes + start + lane) // self.block_bytes % _LANES
            if self.product.row_blocks == 1:
                scale, *zero = (jnp.broadcast_to(z[:, :1], codes.shape) for z in of_blocks)
            else:
                scale, *zero = (_lookup(z[...], block) for z in of_blocks)
            halves = [codes] if self.product.bits == 8 else [codes >> 4, codes & 15]
            halves = halves[::-1] if self.product.low_first else halves
            values = [
                scaled(self._values(table, half), scale, *zero, zeros=self.product.zeros) for half in halves
            ]
            yield at, [v.astype(dtype) for v in values]

    def _values(self, table: Any, codes: Array) -> Array:
        """Looks up float32 values for codes."""
        if self.product.bias is not None:
            return (codes - self.product.bias).astype(jnp.float32)
        if table.shape[0] > 1:
            low, high = table[:_SUBLANES], table[_SUBLANES:]
            rows = [codes[i : i + _SUBLANES] for i in range(0, codes.shape[0], _SUBLANES)]

            def at(table: Any, codes: Any) -> Any:
                return _lookup(table, codes & (_SUBLANES - 1), axis=0)

            return jnp.concatenate([jnp.where(c < _SUBLANES, at(low, c), at(high, c)) for c in rows])

        def spread(start: Any) -> Any:
            return jnp.broadcast_to(table[:, start : start + _LANES], codes.shape)

        found = [_lookup(spread(i), codes & (_LANES - 1)) for i in range(0, table.shape[1], _LANES)]
        return found[0] if len(found) == 1 else jnp.where(codes < _LANES, *found)


def _forward(
    x: list[Array],
    low_rank: Sequence[Array],
    weight: _Weight,
    rows: int,
    out_dtype: np.dtype,
    interpret: bool,
) -> Array:
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.tpu as pltpu

    m, (n, row_bytes) = x[0].shape[0], weight.packed.shape
    of_weight = len(x) + len(weight.operands)

    def kernel(*refs: Any) -> None:
        planes, weight_refs, low_rank_refs = refs[: len(x)], refs[len(x) : of_weight], refs[of_weight:-2]
        out, acc = refs[-2:]
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _() -> None:
            if low_rank_refs:
                # Initialise the accumulator with the low-rank term, so that it's only computed once per tile.
                t, b = low_rank_refs
                acc[...] = _dot(t[...], b[...], 1)
            else:
                acc[...] = jnp.zeros_like(acc)

        for at, parts in weight.decode(weight_refs, k, planes[0].dtype):
            products = [_dot(plane[:, at], w, 1) for plane, w in zip(planes, parts, strict=True)]
            acc[...] += functools.reduce(jnp.add, products)

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
        grid=(m // rows, n // weight.tile_n, row_bytes // weight.tile_bytes),
        in_specs=[*[of_x] * len(x), *weight.specs(lambda i, n, k: (n, k)), *of_low_rank],
        out_specs=pl.BlockSpec((rows, weight.tile_n), lambda i, n, k: (i, n)),
        scratch_shapes=[pltpu.VMEM((rows, weight.tile_n), jnp.float32)],
        compiler_params=_compiler_params(),
        interpret=interpret,
        name="stored_matmul",
    )(*x, *weight.operands, *low_rank)


def _transposed(
    x: Array, weight: _Weight, rows: int, out_dtype: np.dtype, interpret: bool
) -> Sequence[Array]:
    """Computes the column planes of `x @ W`, without interleaving them."""
    import jax.experimental.pallas as pl
    import jax.experimental.pallas.tpu as pltpu

    m, (n, row_bytes), planes = x.shape[0], weight.packed.shape, weight.product.planes

    def kernel(x: Any, *refs: Any) -> None:
        weight_refs, outs, accs = refs[: -2 * planes], refs[-2 * planes : -planes], refs[-planes:]
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _() -> None:
            for acc in accs:
                acc[...] = jnp.zeros_like(acc)

        for at, parts in weight.decode(weight_refs, pl.program_id(1), x.dtype):
            for acc, w in zip(accs, parts, strict=True):
                acc[:, at] += _dot(x[...], w, 0)

        @pl.when(step == pl.num_programs(2) - 1)
        def _() -> None:
            for out, acc in zip(outs, accs, strict=True):
                out[...] = acc[...].astype(out.dtype)

    plane = jax.ShapeDtypeStruct((m, row_bytes), out_dtype)
    of_plane = pl.BlockSpec((rows, weight.tile_bytes), lambda i, k, n: (i, k))
    of_x = pl.BlockSpec((rows, weight.tile_n), lambda i, k, n: (i, n))
    return pl.pallas_call(
        kernel,
        out_shape=[plane] * planes,
        grid=(m // rows, row_bytes // weight.tile_bytes, n // weight.tile_n),
        in_specs=[of_x, *weight.specs(lambda i, k, n: (n, k))],
        out_specs=[of_plane] * planes,
        scratch_shapes=[pltpu.VMEM((rows, weight.tile_bytes), jnp.float32)] * planes,
        compiler_params=_compiler_params(),
        interpret=interpret,
        name="stored_matmul_transposed",
    )(x, *weight.operands)


def _looks_up_along_sublanes(interpret: bool) -> bool:
    """Returns whether the target TPU supports lookups along sublanes, i.e. is v5 or later."""
    import jax.experimental.pallas.tpu as pltpu

    return interpret or pltpu.get_tpu_info().generation >= 5


def _lookup(table: Array, index: Array, axis: int = 1) -> Array:
    """Gathers from a table along an axis, using indices with the same shape."""
    return jnp.take_along_axis(table, index, axis=axis, mode="promise_in_bounds")


def _compiler_params() -> Any:
    import jax.experimental.pallas.tpu as pltpu

    # The grid's last axis is the contraction, which is accumulated over and so must be sequential.
    return pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"))


def _dot(x: Array, w: Array, axis: int) -> Array:
    """Contracts `x`'s last axis with the given axis of `w`."""
    # By default, TPUs round float32 operands to bfloat16.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x,
        w,
        (((1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _tile(size: int, largest: int) -> int:
    """Returns the largest power of two (at most `largest`, itself a power of two) dividing `size`."""
    return math.gcd(size, largest)
