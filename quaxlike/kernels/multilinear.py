"""What multilinear operations share: the accumulator, derivatives, batching."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from quaxlike.primitives import DefinedPrimitive


def accumulator_dtype(dtype: Any) -> np.dtype:
    """What products of a floating dtype are summed in: float32, or wider if they are."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def sum_tangents(
    p: DefinedPrimitive, primals: Sequence[Any], tangents: Sequence[Any], params: Mapping[str, Any]
) -> Any:
    """The tangent of a primitive that is linear in each operand that has a tangent."""
    out = None
    for i, tangent in enumerate(tangents):
        if tangent is not None:
            term = p(*primals[:i], tangent, *primals[i + 1 :], **params)
            out = term if out is None else out + term
    return out


def map_rows(
    p: DefinedPrimitive,
    size: int,
    operands: Sequence[Any],
    dims: Sequence[int | None],
    params: Mapping[str, Any],
    *,
    rows: Sequence[int],
) -> tuple[Any, int]:
    """The batching rule of a primitive whose operands `rows` may have any leading axes.

    A batch of rows is more rows. A batch of weights is run one after the other: each of them alone
    fills the machine, and a kernel need not know of batches.
    """
    operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
    mapped = [i for i, d in enumerate(dims) if d is not None]
    if set(mapped) <= set(rows):
        for i in set(rows) - set(mapped):
            operands[i] = jnp.broadcast_to(operands[i], (size, *operands[i].shape))
        return p(*operands, **params), 0

    def one(of_batch: list[Any]) -> Any:
        args = list(operands)
        for i, x in zip(mapped, of_batch, strict=True):
            args[i] = x
        return p(*args, **params)

    return lax.map(one, [operands[i] for i in mapped]), 0
