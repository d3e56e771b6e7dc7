"""Helpers for multilinear operations: accumulator dtypes, derivatives, batching and mesh axes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array

from ..core import compat
from ..primitives import DefinedPrimitive, Partitioning

_Tree = TypeVar("_Tree")


def accumulator_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype for accumulating products: float32 for everything except float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def precision_for(dtype: Any) -> lax.Precision | None:
    """Returns the precision for computing a product in this dtype.

    By default, GPUs and TPUs round float32 operands to TensorFloat32 or bfloat16. This makes results much
    less accurate than the dtype suggests, so we only allow it if requested by setting
    `jax.default_matmul_precision`.
    """
    wide = jnp.finfo(dtype).bits >= 32 and jax.config.jax_default_matmul_precision is None
    return lax.Precision.HIGHEST if wide else None


def vary_alike(operands: _Tree) -> _Tree:
    """Makes all arrays vary over the same mesh axes inside `shard_map`, so that a loop can add them up."""
    leaves, tree = jax.tree.flatten(operands)
    return jax.tree.unflatten(tree, compat.vary_alike(leaves))


def varying_zeros(shape: Sequence[int], dtype: Any, *operands: Array) -> Array:
    """Returns zeros varying over the same mesh axes as any of the operands, inside `shard_map`.

    These initialise the accumulator when looping over products of the operands. (With ordinary zeros, the
    loop would fail because its carry changes type.)
    """
    axes = frozenset().union(*map(compat.varying_axes, operands))
    return compat.vary_over(jnp.zeros(tuple(shape), dtype), axes)


def is_spread(operands: Iterable[Any]) -> bool:
    """Returns whether any operand's type is sharded over explicit mesh axes."""
    return any(axes is not None for x in operands for axes in jax.typeof(x).sharding.spec)


def spread_like(x: ArrayLike, y: ArrayLike) -> ArrayLike:
    """Reshards `x` to match the explicit mesh axes of `y`, which should have the same shape."""
    return jax.sharding.reshard(x, jax.typeof(y).sharding.spec) if is_spread((x, y)) else x


def dot_general(x: Array, y: Array, dimension_numbers: Any, **params: Any) -> Array:
    """As `lax.dot_general`, but allows both operands to be sharded over the same explicit mesh axes.

    If a contracted axis is sharded, then the product is reduced across devices. In all other cases `x` keeps
    its sharding and `y` is resharded.
    """
    if not is_spread((x, y)):
        return lax.dot_general(x, y, dimension_numbers, **params)
    (summed, y_summed), (batch, y_batch) = dimension_numbers
    x_names, y_names = [f"x{i}" for i in range(x.ndim)], [f"y{i}" for i in range(y.ndim)]
    for i, j in zip((*summed, *batch), (*y_summed, *y_batch), strict=True):
        # Using the same name means that both axes must be sharded identically. Otherwise JAX raises an error
        # asking for `out_sharding`.
        y_names[j] = x_names[i]
    sums = tuple(x_names[i] for i in summed)
    kept = [x_names[i] for i in batch]
    kept += [name for name in (*x_names, *y_names) if name not in sums and name not in kept]
    rule = Partitioning(f"{' '.join(x_names)}, {' '.join(y_names)} -> {' '.join(kept)}", sums)

    def product(x: Any, y: Any) -> Any:
        return [lax.dot_general(x, y, dimension_numbers, **params)]

    return rule.apply_to_types(product)(x, y)[0]


def nonzero(tangent: Any) -> bool:
    """Returns whether any leaf in an operand has a tangent. (`None` represents a symbolic zero.)"""
    return bool(jax.tree.leaves(tangent))


def sum_tangents(
    p: DefinedPrimitive, primals: Sequence[Any], tangents: Sequence[Any], params: Mapping[str, Any]
) -> Any:
    """Computes the tangent of a primitive linear in each operand with a tangent."""
    out = None
    for i, tangent in enumerate(tangents):
        if nonzero(tangent):
            # The primitive is linear in each operand separately, so only substitute one tangent at a time.
            term = p(*primals[:i], tangent, *primals[i + 1 :], **params)
            out = term if out is None else out + term
    return out


def map_rows(
    p: DefinedPrimitive,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[Any],
    params: Mapping[str, Any],
    *,
    rows: Sequence[int],
) -> tuple[Any, int]:
    """A batching rule for primitives whose operands in `rows` can have arbitrary leading axes.

    If only these operands are batched, this just adds more rows. Batched weights are processed sequentially:
    in practice, a single weight is enough to keep the device busy, and kernels don't have to support
    batching.
    """
    is_row = [i in rows for i, x in enumerate(operands) for _ in jax.tree.leaves(x)]
    leaves, tree = jax.tree.flatten(list(operands))
    leaf_dims = jax.tree.leaves(dims, is_leaf=lambda d: d is None)
    mapped = [d is not None for d in leaf_dims]
    leaves = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(leaves, leaf_dims, strict=True)]
    # If only rows are batched, make a single call with more rows, reading the weight just once.
    if all(row or not m for row, m in zip(is_row, mapped, strict=True)):
        leaves = [
            jnp.broadcast_to(x, (size, *x.shape)) if row and not m else x
            for x, row, m in zip(leaves, is_row, mapped, strict=True)
        ]
        return p(*jax.tree.unflatten(tree, leaves), **params), 0

    def one(of_batch: list[Any]) -> Any:
        batch = iter(of_batch)
        args = [next(batch) if m else x for x, m in zip(leaves, mapped, strict=True)]
        return p(*jax.tree.unflatten(tree, args), **params)

    return lax.map(one, [x for x, m in zip(leaves, mapped, strict=True) if m]), 0


def check_x(op: str, x: Any, shape: tuple[int, int], transpose: bool) -> None:
    """Raises a `ValueError` if `x`'s last axis does not match the contracted axis in a weight `W`."""
    contracted = shape[0] if transpose else shape[1]
    if x.ndim == 0 or x.shape[-1] != contracted:
        raise ValueError(
            f"{op}: the last axis of x must be {'N' if transpose else 'K'} = {contracted} of the weight's "
            f"shape {shape}{' (transposed)' if transpose else ''}, got x of shape {x.shape}"
        )
