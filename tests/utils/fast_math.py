"""Checks of `kahan_summation` that also run in a process of their own, under XLA's fast-math flags."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from quaxlike.utils import kahan_summation


def assert_compensated(xs: Sequence[np.floating], total: float, lost: float, dtype: np.dtype) -> None:
    """The bound of Neumaier 1974: the total is as good as rounded once, but for second-order terms."""
    u = float(jnp.finfo(dtype).eps) / 2
    exact = math.fsum(float(x) for x in xs)
    size = math.fsum(abs(float(x)) for x in xs)
    second_order = 2 * len(xs) ** 2 * u**2 * size + len(xs) * float(jnp.finfo(dtype).smallest_subnormal)
    assert abs(total - exact) <= 2 * u * abs(exact) + second_order
    assert abs(total - lost - exact) <= second_order + u**2 * abs(exact)


def check_cancellation() -> None:
    for dtype, big in [(jnp.float32, 1e10), (jnp.float16, 2.0**14), (jnp.bfloat16, 2.0**30)]:
        summands = [jnp.full(5, x, dtype) for x in (1.0, big, 1.0, -big)]
        for sum_ in (kahan_summation, jax.jit(kahan_summation), jax.jit(jax.vmap(kahan_summation))):
            total, lost = sum_(*summands)
            np.testing.assert_array_equal(total, np.full(5, 2.0))
            np.testing.assert_array_equal(lost, np.zeros(5))


def check_many_sizes() -> None:
    random = np.random.default_rng(0)
    xs = (random.standard_normal((24, 300)) * 2.0 ** random.integers(-40, 60, (24, 300))).astype(np.float32)
    xs[12:, ::3] = -xs[:12, ::3]
    totals, losts = jax.jit(kahan_summation)(*xs)
    for column, total, lost in zip(xs.T, totals, losts, strict=True):
        assert_compensated(column, float(total), float(lost), np.dtype(np.float32))


def check_many_calls() -> None:
    def accumulate(state, x):
        return kahan_summation(state[0], x, compensate=state[1]), None

    xs = jnp.full(100_000, 0.1, jnp.float32)
    zero = jnp.zeros((), jnp.float32)
    (total, _), _ = jax.jit(lambda xs: jax.lax.scan(accumulate, (zero, zero), xs))(xs)
    assert float(total) == float(np.float32(100_000 * float(np.float32(0.1))))


CHECKS = [check_cancellation, check_many_sizes, check_many_calls]

if __name__ == "__main__":
    for check in CHECKS:
        check()
    print("ok")
