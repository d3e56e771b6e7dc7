"""Quantised arrays broadcast along axes of size one, and along new axes, without a look at their codes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from quaxlike.arrays.quantized import BlockArray
from tests.samples import normal


def _ordered(x):
    """With columns out of order, as GPTQ leaves them."""
    w = BlockArray.quantize(x, codec="uint4_block", block_size=4)
    columns = x.shape[-1]
    codes = (np.arange(x.size).reshape(x.shape) * 7) % 16
    order = np.random.default_rng(0).permutation(columns).astype(np.int32)
    order = np.broadcast_to(order, (*x.shape[:-2], columns))
    return BlockArray.from_codes(
        codes.astype(np.uint8), w.scale, codec=w.codec, block_size=4, order=order, dtype=w.dtype
    )


MAKE = {
    "NF4": ql.NF4Array.quantize,
    "NF4, double": lambda x: ql.NF4Array.quantize(x, double_quant=True),
    "int4": ql.Int4Array.quantize,
    "int8": ql.Int8Array.quantize,
    "int8, blocks": lambda x: ql.Int8Array.quantize(x, block_size=2),
    "codec": lambda x: BlockArray.quantize(x, codec="q2_k"),
    "columns out of order": _ordered,
}
SHAPES = [(1, 8), (8, 1), (1, 1), (3, 1, 4), (1, 3, 1)]


def _targets(shape):
    """Shapes that `shape` is broadcast to, each with the places of its axes."""
    for sizes in itertools.product(*[(1, 3) if size == 1 else (size,) for size in shape]):
        axes = tuple(range(len(sizes)))
        yield sizes, axes
        yield (2, *sizes), tuple(axis + 1 for axis in axes)
        yield (*sizes, 5), axes
        yield (sizes[0], 2, *sizes[1:], 1), (0, *(axis + 1 for axis in axes[1:]))


@pytest.mark.each_value
@pytest.mark.quick("False-int8 of (8, 1)", "True-NF4, double of (1, 3, 1)")
@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(kind, shape, id=f"{kind} of {shape}") for kind in MAKE for shape in SHAPES],
)
@pytest.mark.parametrize("turned", [False, True])
def test_every_shape(kind, shape, turned):
    w = MAKE[kind](jnp.asarray(normal(*shape)))
    w = ql.quaxify(lambda w: w.T)(w) if turned else w
    dense = np.asarray(w.materialise())
    targets = [*_targets(w.shape)]
    with ql.on_materialise("allow" if kind == "columns out of order" else "error"):
        outs = jax.jit(ql.quaxify(lambda w: [lax.broadcast_in_dim(w, *target) for target in targets]))(w)
    for (sizes, axes), out in zip(targets, outs, strict=True):
        matrix = [sizes[axis] for axis in (axes[::-1] if turned else axes)][-2:]
        lost = kind == "columns out of order" and matrix != list(shape[-2:])  # the order is that of a matrix
        assert isinstance(out, jax.Array if lost else type(w)), (sizes, axes)
        places = [n if i in axes else 1 for i, n in enumerate(sizes)]
        expected = dense.reshape([dense.shape[axes.index(i)] if i in axes else 1 for i in range(len(places))])
        np.testing.assert_array_equal(jax.jit(ql.materialise)(out), np.broadcast_to(expected, sizes))
