"""Parts of adapted and quantised arrays at positions that are data, in and out of bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quaxlike as ql
from tests.samples import normal


def adapted(batch=((), (), ()), *, transposed=False, dora=False, quantise=lambda w: w):
    w, a, b = (normal(*lead, *shape) for lead, shape in zip(batch, ((4, 64), (2, 64), (4, 2)), strict=True))
    options = {}
    if transposed:
        w, options = jnp.matrix_transpose(w), {"out_axes": (-1,), "in_axes": (-2,)}
    magnitude = 1 + jnp.square(normal(*batch[2], 4, seed=1)) if dora else None
    return ql.LoraArray(quantise(w), a, b, magnitude=magnitude, **options)


ARRAYS = {
    "plain": adapted(),
    "dora": adapted(dora=True),
    "transposed": adapted(transposed=True),
    "transposed dora": adapted(transposed=True, dora=True),
    "stacked": adapted(((2,), (2,), (2,))),
    "adapters on one base": adapted(((), (2,), (2,))),
    "one adapter": adapted(((2,), (), ())),
    "qlora": adapted(quantise=ql.NF4Array.quantize),
    "stacked qlora": adapted(((2,), (2,), (2,)), quantise=functools.partial(ql.NF4Array.quantize, stacked=1)),
    "nf4": ql.NF4Array.quantize(normal(4, 64)),
    "nf4, blocks across rows": ql.NF4Array.quantize(normal(5, 32)),
    "nf4, nested": ql.NF4Array.quantize(normal(4, 64), double_quant=True),
    "stacked nf4": ql.NF4Array.quantize(normal(2, 4, 64), stacked=1),
    "int8": ql.Int8Array.quantize(normal(4, 64)),
    "stacked int8": ql.Int8Array.quantize(normal(2, 4, 64), stacked=1),
}


def agrees(program, x, *args):
    """The program's results, those of one compiled program for all `args`."""

    @jax.jit
    def both(x, arg):
        return ql.materialise(ql.quaxify(program)(x, arg)), program(ql.materialise(x), arg)

    for arg in args:
        with ql.on_materialise("allow"):
            got, want = both(x, arg)
        for g, w in zip(got, want, strict=True):
            assert (g.shape, g.dtype) == (w.shape, w.dtype)
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ARRAYS)
def test_starts_out_of_bounds(kind):
    def program(x, start):
        return [lax.dynamic_index_in_dim(x, start, axis) for axis in range(x.ndim)]

    agrees(program, ARRAYS[kind], *map(jnp.int32, (-70, -5, -3, -1, 1, 70)))


@pytest.mark.parametrize("fill", [None, 7.0])
@pytest.mark.parametrize("kind", ARRAYS)
def test_look_ups_out_of_bounds(kind, fill):
    options = {"mode": "fill", "fill_value": fill}

    def program(x, at):
        return [
            *(jnp.take(x, at, axis, **options) for axis in range(x.ndim)),
            x.at[at, at[::-1]].get(**options),
        ]

    agrees(program, ARRAYS[kind], jnp.array([1, 99, -1, -99, 0]))
