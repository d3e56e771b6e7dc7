"""Methods that rotate what a layer is applied to: `OFTArray`, `BOFTArray`, `HRAArray`."""

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..arrays.dot_axes import cast, in_float32
from ..arrays.structured import BlockDiagonalMatrix, DiagonalMatrix, KroneckerMatrix, LowRankUpdate
from ..arrays.zero import Identity
from .combinators import RotatedArray, ScaledArray
from .method import MethodArray


class OFTArray(MethodArray):
    """Orthogonal fine-tuning: blocks of inputs are multiplied by trained orthogonal matrices.

    Each is the Cayley transform of a skew-symmetric matrix. The weight itself is never multiplied.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `skew`: for each block of `b` inputs, the `b * (b - 1) / 2` elements of its matrix above the diagonal,
        row by row: `(..., blocks, b * (b - 1) / 2)`. One block is shared by all inputs.
    - `terms`: how many terms of Neumann's series approximate the inverse of the Cayley transform, as PEFT
        counts them. Default: None, for the exact inverse.
    - `eps`: the matrices are scaled to have at most the norm `eps / sqrt(blocks)` (constrained OFT).
        Gradients do not see this. Default: None.
    - `of_outputs`: whether it multiplies the outputs instead: the columns of an embedding. Default: False.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        blocks = jnp.ones((2, 3))  # of 3 x 3
        w = ql.adapters.OFTArray(jnp.ones((4, 6)), blocks)
        ql.quaxify(jnp.matmul)(w, jnp.arange(6.0))
        ```

    Qiu et al., Controlling Text-to-Image Diffusion by Orthogonal Finetuning (2023); Qiu et al., Orthogonal
    Finetuning Made Scalable (2025); conventions of PEFT.
    """

    skew: Any
    terms: int | None = eqx.field(static=True, default=None, kw_only=True)
    eps: float | None = eqx.field(static=True, default=None, kw_only=True)
    of_outputs: bool = eqx.field(static=True, default=False, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {"skew": "blocks elements"}

    @property
    def block_size(self) -> int:
        return (1 + math.isqrt(1 + 8 * self.skew.shape[-1])) // 2

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> RotatedArray:
        skew, b = self.skew, self.block_size
        if self.eps is not None:
            norm = math.sqrt(2) * jnp.linalg.norm(skew, axis=-1, keepdims=True)
            most = self.eps / math.sqrt(skew.shape[-2])
            skew += jax.lax.stop_gradient(skew * (jnp.minimum(1, most / jnp.maximum(norm, most)) - 1))
        rows, columns = jnp.triu_indices(b, 1)
        upper = jnp.zeros((*skew.shape[:-1], b, b), skew.dtype).at[..., rows, columns].set(skew)
        blocks = cayley(upper - jnp.matrix_transpose(upper), self.terms)
        sizes = [self.shape[axis] for axis in (self.out_axes if self.of_outputs else self.in_axes)]
        if skew.shape[-2] == 1:
            blocks = jnp.broadcast_to(blocks, (*blocks.shape[:-3], math.prod(sizes) // b, b, b))
        blocks = blocks if self.of_outputs else jnp.matrix_transpose(blocks)
        return self.on(RotatedArray, BlockDiagonalMatrix(blocks), of_outputs=self.of_outputs)


def cayley(k: jax.Array, terms: int | None) -> jax.Array:
    """`(I - K) (I + K)^-1` for skew-symmetric matrices `K`; with `terms`, the first ones of its series
    `I - 2 K + 2 K² - ...`, at `-K`."""
    eye = jnp.broadcast_to(jnp.eye(k.shape[-1], dtype=k.dtype), k.shape)
    if terms is None:
        # LAPACK has no narrower dtype.
        plus, minus = (cast(x, in_float32(k.dtype)) for x in (eye + k, eye - k))
        return cast(jnp.linalg.solve(plus, minus), k.dtype)
    terms = 4 if terms == 3 else terms  # as PEFT does
    out, power = eye, eye
    for n in range(1, terms):
        power = jnp.matmul(power, k, precision="highest")
        out += power if 1 < n == terms - 1 else 2 * power
    return out


class BOFTArray(MethodArray):
    """Butterfly orthogonal fine-tuning: inputs go through a chain of block-diagonal orthogonal matrices, each
    of which mixes others of them, and outputs are scaled.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `blocks`: for each matrix of the chain, `n` blocks of size `b`, where `n * b` counts the inputs:
        `(..., factors, n, b, b)`. Their skew-symmetric parts give orthogonal ones by the Cayley transform.
    - `scale`: the factors of the outputs, `(..., *outputs)`.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    **Raises:**

    `ValueError` if factor `k` has no groups of `2 ** k` blocks of even size, which it mixes.

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        blocks = jnp.zeros((2, 4, 2, 2))
        w = ql.adapters.BOFTArray(jnp.ones((4, 8)), blocks, jnp.ones(4))
        ql.quaxify(jnp.matmul)(w, jnp.arange(8.0))
        ```

    Liu et al., Parameter-Efficient Orthogonal Finetuning via Butterfly Factorization (2023).
    """

    blocks: Any
    scale: Any

    part_axes: ClassVar[Mapping[str, str]] = {"blocks": "factors n b c", "scale": "out"}

    def __check_init__(self) -> None:
        factors, n, b = self.blocks.shape[-4:-1]
        if factors > 1 and (b % 2 or n % 2 ** (factors - 1)):
            raise ValueError(
                f"BOFTArray takes {factors} factors of blocks of even size, whose number is a multiple of "
                f"{2 ** (factors - 1)}; found blocks of shape {self.blocks.shape}."
            )

    def composed(self) -> RotatedArray:
        x = self.on(ScaledArray, self.scale)
        blocks = cayley((self.blocks - jnp.matrix_transpose(self.blocks)) / 2, None)
        factors, n, b = blocks.shape[-4:-1]
        for k in range(factors):
            chain: list[Any] = [BlockDiagonalMatrix(jnp.matrix_transpose(blocks[..., k, :, :, :]))]
            if k:  # it mixes halves of blocks: those at even places of a group come first
                order = jnp.concatenate([jnp.arange(start, 2 ** (k + 1), 2) for start in (0, 1)])
                mixed = jnp.eye(2 ** (k + 1), dtype=blocks.dtype)[order]
                mix = lambda m, k=k: KroneckerMatrix(
                    Identity(n // 2**k, blocks.dtype), KroneckerMatrix(m, Identity(b // 2, blocks.dtype))
                )
                chain = [mix(mixed), *chain, mix(mixed.T)]
            for rotation in chain:
                x = self.on(RotatedArray, rotation).with_base(x)
        return x


class HRAArray(MethodArray):
    """Householder reflection adaptation: the inputs of a layer go through a chain of trained reflections.

    The chain is applied as the identity and a product of two thin matrices, with `2 r` numbers for each
    input.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `u`: the directions of the reflections, of any length, as columns: `(..., inputs, r)`.
    - `orthogonal`: whether the directions are made orthogonal first, in this order. Default: False.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

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
        # H_0 H_1 ... = I - U T Uᵀ, where T is triangular, with the inverse I / 2 + triu(UᵀU, 1).
        u = cast(self.u, in_float32(self.u.dtype))  # LAPACK has no narrower dtype
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
