"""HRA: applies Householder reflections to a layer's inputs."""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..arrays.dot_axes import cast, in_float32
from ..arrays.structured import DiagonalMatrix, LowRankUpdate
from .combinators import RotatedArray
from .method import MethodArray
from .record import BIAS, Layer, Method, Weight, Written, count, flag, starts


class HRAArray(MethodArray):
    """Householder reflection adaptation: applies a chain of trained reflections to a layer's inputs.

    Reflections are not applied one after the other: a chain of `r` reflections is equal to the identity plus
    a rank-`r` matrix.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `u`: the (unnormalised) directions of the reflections as columns, of shape `(..., inputs, r)`.
    - `orthogonal`: whether to orthogonalise the directions first. Default: False.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w = ql.adapters.HRAArray(jnp.ones((4, 6)), jnp.ones((6, 2)))
        ql.quaxify(jnp.matmul)(w, jnp.arange(6.0))
        ```

    Yuan et al., Bridging The Gap between Low-rank and Orthogonal Adaptation via Householder Reflection
    Adaptation (2024).
    """

    u: Any
    orthogonal: bool = eqx.field(static=True, default=False, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {"u": "inputs reflections"}

    def composed(self) -> RotatedArray:
        # H_0 H_1 ... = I - U T Uᵀ, with the triangular matrix T = (I / 2 + triu(UᵀU, 1))^-1.
        u = cast(self.u, in_float32(self.u.dtype))  # LAPACK doesn't support narrower dtypes
        if self.orthogonal:
            u, _ = jnp.linalg.qr(u)
            v = 2 * u
        else:
            u = u / jnp.linalg.norm(u, axis=-2, keepdims=True)
            gram = jnp.matmul(jnp.matrix_transpose(u), u, precision="highest")
            half = jnp.broadcast_to(jnp.eye(u.shape[-1], dtype=u.dtype) / 2, gram.shape)
            vt = jax.scipy.linalg.solve_triangular(half + jnp.triu(gram, 1), jnp.matrix_transpose(u))
            v = jnp.matrix_transpose(vt)
        u, v = cast(u, self.u.dtype), cast(v, self.u.dtype)
        ones = jnp.ones(u.shape[-2], u.dtype)
        return self.on(RotatedArray, LowRankUpdate(DiagonalMatrix(ones), -u, v))


@starts
def hra(x: Weight, *, rank: int = 8) -> HRAArray:
    """Initialises with random reflections in identical pairs, so that each pair cancels out."""
    if rank % 2 or rank < 2:
        raise ValueError(f"HRA begins with pairs of reflections; found a rank of {rank}.")
    return x.on(HRAArray, jnp.repeat(x.kaiming(x.inputs, rank // 2, fan_in=rank // 2), 2, axis=-1))


def _read_hra(layer: Layer) -> Any:
    return layer.on(HRAArray, layer.read("u", layer.inputs, layer.option("r")),
                    orthogonal=layer.option("apply_GS"))  # fmt: skip


def _write_hra(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    return {"u": x.u}, {"r": x.u.shape[-1], "apply_GS": x.orthogonal}


HRA = Method(
    "HRA", HRAArray, hra,
    parts={"u": ".hra_u"},
    options={"bias": BIAS, "r": count(8), "apply_GS": flag()},
    read=_read_hra, write=_write_hra, kinds=("linear", "matrix", "conv"), conv1d=False,
)  # fmt: skip
