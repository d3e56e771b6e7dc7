"""Run by `test_numerics` in a process of its own, under XLA's fast-math flags."""

import jax
import jax.numpy as jnp
import numpy as np

from quaxlike.utils import kahan_summation


def check() -> None:
    for dtype, big in [(jnp.float32, 1e10), (jnp.float16, 2.0**14), (jnp.bfloat16, 2.0**30)]:
        summands = [jnp.full(5, x, dtype) for x in (1.0, big, 1.0, -big)]
        for sum_ in (kahan_summation, jax.jit(kahan_summation), jax.jit(jax.vmap(kahan_summation))):
            total, lost = sum_(*summands)
            np.testing.assert_array_equal(total, np.full(5, 2.0))
            np.testing.assert_array_equal(lost, np.zeros(5))

    def accumulate(state, x):
        total, lost = kahan_summation(state[0], x, compensate=state[1])
        return (total, lost), None

    xs = jnp.full(100_000, 0.1, jnp.float32)
    zero = jnp.zeros((), jnp.float32)
    (total, _), _ = jax.jit(lambda xs: jax.lax.scan(accumulate, (zero, zero), xs))(xs)
    assert float(total) == float(np.float32(100_000 * float(np.float32(0.1))))


if __name__ == "__main__":
    check()
    print("ok")
