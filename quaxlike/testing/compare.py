"""Comparison of two results."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

# The allowed difference of results, by itemsize, relative to the largest element.
_TOLERANCE = {2: 2e-2, 4: 3e-4, 8: 1e-6}


def disagreement(found: Any, expected: Any, *, dtypes: bool = True, scale: float | int = 0.0) -> str:
    """Describes how two trees of arrays differ; empty if they agree.

    **Arguments:**

    - `dtypes`: whether dtypes must agree.
    - `scale`: the size of the terms that were added up, for sums that nearly cancel.
    """
    trees = jtu.tree_structure(found), jtu.tree_structure(expected)
    if trees[0] != trees[1]:
        return f"a result of structure {trees[0]} instead of {trees[1]}"
    pairs = zip(jtu.tree_leaves_with_path(found), jtu.tree_leaves(expected), strict=True)
    for (path, a), b in pairs:
        if difference := _difference(a, b, dtypes, scale):
            return difference + (f" in result {jtu.keystr(path)}" if path else "")
    return ""


def _difference(a: Any, b: Any, dtypes: bool, scale: float | int) -> str:
    a, b = (x if isinstance(x, jax.Array) else jnp.asarray(x) for x in (a, b))
    if a.shape != b.shape:
        return f"shape {a.shape} instead of {b.shape}"
    if dtypes and a.dtype != b.dtype:
        return f"dtype {a.dtype} instead of {b.dtype}"
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if not a.size:
        return ""
    rtol = max(map(_tolerance, (a.dtype, b.dtype)))
    wide = np.complex128 if jnp.issubdtype(b.dtype, jnp.complexfloating) else np.float64
    x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    finite = np.abs(y[np.isfinite(y)])
    scale = max(scale, finite.max() if finite.size else 0.0)
    with np.errstate(invalid="ignore"):
        wrong = ~np.isclose(x, y, rtol=rtol, atol=rtol * scale + 1e-30, equal_nan=True)
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at {at}" if at else ""
    return f"{int(wrong.sum())} of {wrong.size} elements differ, {x[at]:.6g} instead of {y[at]:.6g}{where}"


def _tolerance(dtype: Any) -> float | int:
    """The allowed difference of elements of a dtype, relative to the largest; 0 for exact dtypes."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return _TOLERANCE[min(8, jnp.finfo(dtype).bits // 8)]


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact) if hasattr(x, "dtype") else isinstance(x, float)


def weighted_sum(tree: Any) -> Any:
    """A sum over the inexact arrays in a tree, with a different weight for each element."""
    total = jnp.zeros(())
    for x in filter(is_inexact, jtu.tree_leaves(tree)):
        real = jnp.real(x) + jnp.imag(x) if jnp.iscomplexobj(x) else x
        weights = jnp.cos(jnp.arange(real.size)).reshape(real.shape)
        total += jnp.sum(
            jnp.where(jnp.isfinite(real), real, 0).astype(total.dtype) * weights.astype(total.dtype)
        )
    return total


def size_of(tree: Any) -> float | int:
    """The largest finite absolute value in the arrays of a tree; at least 1e-30."""
    arrays = [np.abs(np.asarray(x)).ravel() for x in jtu.tree_leaves(tree) if is_inexact(x)]
    finite = [x[np.isfinite(x)].max(initial=0.0) for x in arrays]
    return float(max(finite, default=0.0)) + 1e-30
