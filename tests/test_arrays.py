import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quaxlike._arrays import from_numpy


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "bool", "int64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (7, 13), (16, 128)])
def test_arrays_from_numpy(shape, dtype):
    """They are copies, and no program is compiled for them."""
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "compile" in event else None
    array = np.arange(math.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    expected, given = array.copy(), array[::-1].copy()[::-1] if shape else array
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        out = from_numpy(given).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    given[...] = 0
    assert not compiled
    assert out.dtype == jax.dtypes.canonicalize_dtype(array.dtype)
    np.testing.assert_array_equal(np.asarray(out), expected)
