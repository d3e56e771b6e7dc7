"""Compares what two programs return."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

# Maps each itemsize to the allowed difference, relative to the largest element. Dtypes smaller than a byte
# have the tolerance of one byte.
_TOLERANCE = {1: 0.5, 2: 4e-2, 4: 6e-4, 8: 2e-6}


class Disagreement(NamedTuple):
    """The difference between two results. Calling `str` on this formats it for a report."""

    kind: str
    """One of "structure", "shape", "dtype", "weak type" or "numbers"."""
    text: str

    def __str__(self) -> str:
        return self.text


def disagreement(
    found: Any,
    expected: Any,
    *,
    dtypes: bool = True,
    weak_types: bool = False,
    tolerance: float | int | None = None,
    atol: float | int = 0.0,
    scale: float | int = 0.0,
    nans: bool = True,
) -> Disagreement | None:
    """Returns the difference between two pytrees of arrays, or None if they agree. Types are compared before
    values.

    **Arguments:**

    - `dtypes`: whether to compare dtypes.
    - `weak_types`: whether to compare weak types.
    - `tolerance`: the allowed difference, relative to the largest finite element. By default, this depends on
        the dtypes.
    - `atol`: the allowed absolute difference.
    - `scale`: the summands' magnitude. This is useful for sums that nearly cancel.
    - `nans`: whether NaNs must be in the same positions.
    """
    trees = jtu.tree_structure(found), jtu.tree_structure(expected)
    if trees[0] != trees[1]:
        return Disagreement("structure", f"a result of structure {trees[0]} instead of {trees[1]}")
    leaves = zip(jtu.tree_leaves_with_path(found), jtu.tree_leaves(expected), strict=True)
    pairs = [(a, b, f" in result {jtu.keystr(path)}" if path else "") for (path, a), b in leaves]
    for a, b, where in pairs:
        types: dict[str, tuple[Any, Any]] = {"shape": (np.shape(a), np.shape(b))}
        if dtypes and _has_numbers(b):
            types["dtype"] = (jnp.result_type(a), jnp.result_type(b))
        if weak_types and hasattr(a, "weak_type") and hasattr(b, "weak_type"):
            types["weak type"] = (a.weak_type, b.weak_type)
        for kind, (of_a, of_b) in types.items():
            if of_a != of_b:
                return Disagreement(kind, f"{kind} {of_a} instead of {of_b}{where}")
    for a, b, where in pairs:
        if _has_numbers(b) and np.size(b) and (text := _difference(a, b, tolerance, atol, scale, nans)):
            return Disagreement("numbers", text + where)
    return None


def _difference(
    a: Any, b: Any, tolerance: float | int | None, atol: float | int, scale: float | int, nans: bool
) -> str:
    if jnp.issubdtype(jnp.result_type(b), jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    dtypes = jnp.result_type(a), jnp.result_type(b)
    wide = np.complex128 if jnp.issubdtype(dtypes[1], jnp.complexfloating) else np.float64
    x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    largest = max(scale, np.abs(y[np.isfinite(y)]).max(initial=0.0))
    allowed = max(map(tolerance_of, dtypes)) if tolerance is None else tolerance
    with np.errstate(invalid="ignore"):
        wrong = (x != y) & ~(np.abs(x - y) <= allowed * largest + atol + 1e-30)
    wrong &= ~(np.isnan(y) & (np.isnan(x) | (not nans)))
    if not wrong.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    where = f" at {at}" if at else ""
    return f"{int(wrong.sum())} of {wrong.size} elements differ, {x[at]:.6g} instead of {y[at]:.6g}{where}"


def _has_numbers(x: Any) -> bool:
    """Returns whether there are any values to compare. (An integer's gradient doesn't have any.)"""
    return jnp.result_type(x) != jax.dtypes.float0


def tolerance_of(dtype: Any) -> float | int:
    """Returns the allowed difference for a dtype, relative to the largest element (0 for exact dtypes)."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    return _TOLERANCE[min(8, max(1, jnp.finfo(dtype).bits // 8))]


def is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact) if hasattr(x, "dtype") else isinstance(x, float | complex)


def weighted_sum(tree: Any) -> Any:
    """Returns a weighted sum of all inexact arrays in a tree. Different weights allow this sum's gradient to
    tell the elements apart.
    """
    total = jnp.zeros(())
    for x in filter(is_inexact, jtu.tree_leaves(tree)):
        real = jnp.real(x) + jnp.imag(x) if jnp.iscomplexobj(x) else x
        weights = jnp.cos(jnp.arange(real.size)).reshape(real.shape)
        total += jnp.sum(
            jnp.where(jnp.isfinite(real), real, 0).astype(total.dtype) * weights.astype(total.dtype)
        )
    return total


def size_of(tree: Any) -> float | int:
    """Returns the largest finite absolute value in a tree, but at least 1e-30."""
    arrays = [np.abs(np.asarray(x)).ravel() for x in jtu.tree_leaves(tree) if is_inexact(x)]
    finite = [x[np.isfinite(x)].max(initial=0.0) for x in arrays]
    return float(max(finite, default=0.0)) + 1e-30
