"""Approximates arbitrary adapters, and adapted biases, by LoRAs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ...core.values import materialise
from ..adapted import AdaptedArray, innermost, on_innermost
from ..dot_axes import in_float32
from .array import LoraArray, padded_to
from .matrices import as_matrix, from_svd, scaling_of, svd
from .trainable import LoraBias, TrainableArray, TransparentValue


def as_lora(
    name: str, x: AdaptedArray, rank: int, axes: Callable[[], tuple[Sequence[int], Sequence[int]]]
) -> tuple[Any, tuple[float, float] | None]:
    """Returns the best LoRA approximation to an adapter, with at most this rank.

    Fully trained arrays aren't low-rank, and are returned unchanged.

    **Arguments:**

    - `axes`: returns the weight's `out_axes` and `in_axes`. (Not called for a LoRA, which has its own.)

    **Returns:** the adapter, and a pair of relative Frobenius norms: the approximation error relative to the
    change made by the adapter, and this change relative to the weight. The pair is None if the array is
    returned unchanged.
    """
    if isinstance(x, TransparentValue):
        return x, None
    if hasattr(x, "composed"):  # a method expressible as a LoRA
        x = x.composed()
    is_plain = isinstance(x, LoraArray) and x.magnitude is None and not isinstance(x.w, AdaptedArray)
    lora: LoraArray = x if isinstance(x, LoraArray) else _without_rank(x, *axes())
    a, b = materialise((lora.a, lora.b))
    lora = lora.with_base(innermost(x)).replace(a=a, b=b, magnitude=None, key=None, dropout=0.0)
    lora = padded_to(lora, lora.rank)  # removes rsLoRA
    w = materialise(lora.w).astype(in_float32(lora.dtype))
    if is_plain:
        # The change is already low-rank, so don't form it.
        u, s, vt = _svd_of_factors(lora)
    else:
        whole = on_innermost(lambda _: w, x).merged()
        u, s, vt = svd(as_matrix(lora, whole - jnp.broadcast_to(w, whole.shape)), None)
    change = float(jnp.linalg.norm(s))
    size = float(jnp.linalg.norm(w))
    lost = 0.0
    if not is_plain or lora.rank > rank:
        limit = min(u.shape[-2], vt.shape[-1])
        if rank > limit:
            raise ValueError(
                f"A change of {name} has a rank of at most min(out, in) = {limit}; found {rank}. Give it a "
                "rank of its own with `rank_pattern`."
            )
        lost = float(jnp.linalg.norm(s[..., rank:])) / change if change else 0.0
        lora = from_svd(lora, u[..., :, :rank], s[..., :rank], vt[..., :rank, :])
    return lora, (lost, change / size if size else 0.0)


def _without_rank(x: AdaptedArray, out_axes: Sequence[int], in_axes: Sequence[int]) -> LoraArray:
    """Adds a rank-0 adapter to the base of `x`, with all axes of `x`."""
    matrix = [x.ndim + axis for axis in (*out_axes, *in_axes)]
    batch = [size for i, size in enumerate(x.shape) if i not in matrix]
    w, dtype = innermost(x), in_float32(x.dtype)
    a = jnp.zeros((*batch, 0, *(x.shape[axis] for axis in in_axes)), dtype)
    b = jnp.zeros((*batch, *(x.shape[axis] for axis in out_axes), 0), dtype)
    return LoraArray(w, a, b, gradients=x.gradients, out_axes=out_axes, in_axes=in_axes)


def _svd_of_factors(lora: LoraArray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the SVD of `scaling * b @ a`, without forming it."""
    dtype = in_float32(lora.a.dtype)
    a, b = (materialise(x).astype(dtype) for x in (lora.a, lora.b))
    a = a.reshape(*a.shape[: a.ndim - len(lora.in_axes)], -1)
    b = b.reshape(*b.shape[: b.ndim - len(lora.out_axes) - 1], -1, lora.rank)
    # Orthogonalise both factors. This only leaves the SVD of a small matrix (rank by rank).
    left, right = jnp.linalg.qr(b), jnp.linalg.qr(jnp.swapaxes(a, -1, -2))
    core = jnp.matmul(left[1], jnp.swapaxes(right[1], -1, -2), precision="highest")
    core = scaling_of(lora, core, 2) * core
    u, s, vt = svd(core, None)

    def matmul(x: Any, y: Any) -> Any:
        return jnp.matmul(x, y, precision="highest")

    return matmul(left[0], u), s, matmul(vt, jnp.swapaxes(right[0], -1, -2))


def is_other_bias(x: Any) -> bool:
    """Returns whether a LoRA can only represent this adapted bias as the adapter's own bias."""
    return isinstance(x, AdaptedArray) and not isinstance(x, LoraBias | TrainableArray)


def as_lora_bias(x: Any, lora: LoraArray) -> LoraBias:
    """Converts a layer's bias, for the weight `lora`. Any change to it becomes the adapter's bias."""
    if isinstance(x, LoraBias):
        return x
    if not is_other_bias(x):
        return LoraBias(x, jnp.zeros(lora.b.shape[:-1] if x is None else x.shape, lora.b.dtype), lora.scaling)
    base = materialise(innermost(x))
    change = x.merged().astype(lora.b.dtype) - base.astype(lora.b.dtype)
    scaling = scaling_of(lora, change, change.ndim - lora.alpha.ndim)
    return LoraBias(innermost(x), change / scaling, lora.scaling)
