"""Starts, bounds and fills, against the primitives of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from quaxlike.arrays import bounds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "uint32"])
def test_starts_are_clamped_as_by_the_primitive_and_never_wrapped(dtype):
    x = np.arange(300, dtype=np.float32)
    starts = [-128, -3, -1, 0, 5, 127] if dtype.startswith("i") else [0, 5, 255]
    starts += [2**31 - 1] if dtype == "int32" else [2**32 - 1] if dtype == "uint32" else []
    for start in np.array(starts, dtype):
        want = lax.dynamic_slice_p.bind(jnp.asarray(x), jnp.asarray(start), slice_sizes=(4,))
        np.testing.assert_array_equal(bounds.dynamic_slice_in_dim(jnp.asarray(x), start, 4, 0), want)
        assert int(bounds.clamped_start(start, 300, 4)) == want[0]


@pytest.mark.quick("False-bool", "True-complex64")
@pytest.mark.parametrize("dtype", [bool, "int8", "uint8", "int32", "float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("traced", [False, True])
def test_fills_are_those_of_the_primitive(dtype, traced):
    x = jnp.zeros((3, 4), dtype)
    dims = lax.GatherDimensionNumbers((1,), (0,), (0, 1))
    indices = np.array([[0, 0], [2, 1], [2, 2], [3, 0], [-1, 1], [1, -1]], np.int32)
    sizes = (1, 3)

    def both(indices):
        want = lax.gather(x, indices, dims, sizes, mode="fill")
        clipped = lax.gather(x, indices, dims, sizes, mode="clip")
        inside = bounds.in_bounds(indices, x.shape, dims, sizes)
        value = bounds.fill_value_of("fill", None, x.dtype)
        return bounds.filled(clipped, inside, dims, value), want

    got, want = (jax.jit(both) if traced else both)(indices)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(*(np.asarray(array, np.complex64) for array in (got, want)))
    assert bounds.fill_value_of("clip", 7, x.dtype) is None
    assert bounds.fill_value_of("promise_in_bounds", None, x.dtype) is None
    assert bounds.fill_value_of("fill", 7, x.dtype) == np.asarray(7).astype(x.dtype)


def test_known_indices_tell_whether_anything_is_filled():
    dims = lax.GatherDimensionNumbers((1,), (0,), (0,))
    fills = lambda indices, mode="fill": bounds.fills(indices, (3, 4), dims, (1, 4), mode)
    inside, outside = np.array([[0], [2]], np.int32), jnp.array([[0], [3]])
    assert [fills(inside), fills(outside), fills(outside, "clip")] == [False, True, False]
    traced = []
    jax.jit(lambda indices: traced.append((fills(indices), fills(indices, "clip"))) or indices)(inside)
    assert traced == [(True, False)]
