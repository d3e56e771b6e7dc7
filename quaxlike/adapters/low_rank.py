"""Methods whose change of a weight is a product of two thin matrices: VeRA, AdaLoRA, DeLoRA, MiSS, GraLoRA,
RandLoRA. They are computed as a `LoraArray`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from ..arrays.lora.array import LoraArray
from ..arrays.structured import BlockDiagonalMatrix
from ..core.values import materialise
from .combinators import SumArray
from .method import MethodArray


class VeRAArray(MethodArray):
    """Vector-based random matrix adaptation: `w + diag(scale_b) b diag(scale_a) a`, where `a` and `b` are
    frozen random matrices that all layers share, and a vector for each is trained.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a`: shape `(..., rank, n)`, of which the layer uses the first columns, one for each input.
    - `b`: shape `(..., m, rank)`, of which the layer uses the first rows, one for each output.
    - `scale_a`: shape `(..., rank)`.
    - `scale_b`: shape `(..., *outputs)`.
    - `seed`: the number that PEFT draws these `a` and `b` with, so that its files need not hold them.
        Default: None, for any others.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.ones((4, 2))
        vera = ql.adapters.VeRAArray(w, a, b, jnp.ones(2), jnp.zeros(4))
        ql.quaxify(jnp.matmul)(vera, jnp.arange(3.0))
        ```

    Kopiczko et al., VeRA (2023).
    """

    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    seed: int | None = eqx.field(static=True, default=None, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "rank columns", "b": "rows rank", "scale_a": "rank", "scale_b": "out"
    }  # fmt: skip

    def trained(self) -> Sequence[str]:
        return ("scale_a", "scale_b", *(["w"] if self.train_base else []))

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        a = _times(self.scale_a[..., None], self.a[..., : self.num_inputs])
        scale_b = jnp.reshape(self.scale_b, (*self.scale_b.shape[: -len(self.out_axes)], self.num_outputs))
        return self.low_rank(a, _times(scale_b[..., None], self.b[..., : self.num_outputs, :]))


def _times(x: Any, y: Any) -> Any:
    """The product; one that lacks batch axes of the other gets axes of size one in their stead."""
    n = max(x.ndim, y.ndim)
    x, y = (jnp.reshape(z, (*[1] * (n - z.ndim), *z.shape)) for z in (x, y))
    return x * y


class AdaLoRAArray(MethodArray):
    """AdaLoRA: `w + scaling * b diag(e) a`, the form of a singular value decomposition, so that ranks can be
    taken away from layers that need them least. PEFT decides which; here it is trained with the ranks that it
    has.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a`: shape `(..., rank, inputs)`; several axes of inputs are flattened.
    - `b`: shape `(..., outputs, rank)`, likewise.
    - `e`: shape `(..., rank)`.
    - `scaling`: the factor of all. Default: 1.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.ones((4, 2))
        ada = ql.adapters.AdaLoRAArray(w, a, b, jnp.zeros(2))
        ql.quaxify(jnp.matmul)(ada, jnp.arange(3.0))
        ```

    Zhang et al., Adaptive Budget Allocation for Parameter-Efficient Fine-Tuning (2023).
    """

    a: Any
    b: Any
    e: Any
    scaling: float = eqx.field(static=True, default=1.0, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {"a": "rank columns", "b": "rows rank", "e": "rank"}

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        return self.low_rank((self.scaling * self.e)[..., None] * self.a, self.b)


class DeLoRAArray(MethodArray):
    """DeLoRA: a low-rank change whose rows and columns are normalised, so that one trained number bounds how
    far a weight moves.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a`: shape `(..., rank, inputs)`; several axes of inputs are flattened.
    - `b`: shape `(..., outputs, rank)`, likewise.
    - `strength`: the number, shape `(...)`.
    - `column_norms`: the norms of the columns of the weight when the adapter was made, `(..., inputs)`;
        frozen.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 3)), jnp.ones((4, 2))
        norms = jnp.linalg.norm(w, axis=0)
        de = ql.adapters.DeLoRAArray(w, a, b, jnp.asarray(15.0), norms)
        ql.quaxify(jnp.matmul)(de, jnp.arange(3.0))
        ```

    Bini et al., Decoupling Angles and Strength in Low-rank Adaptation (2025).
    """

    a: Any
    b: Any
    strength: Any
    column_norms: Any

    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "rank columns", "b": "rows rank", "strength": "", "column_norms": "columns"
    }  # fmt: skip

    def trained(self) -> Sequence[str]:
        return ("a", "b", "strength", *(["w"] if self.train_base else []))

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        norm = lambda x, axis: jnp.maximum(_norm(x, axis), jnp.asarray(1e-4, x.dtype))
        scale = self.strength[..., None] / (self.a.shape[-2] * norm(self.a, -1) * norm(self.b, -2))
        return self.low_rank(scale[..., None] * self.a * self.column_norms[..., None, :], self.b)


def _norm(x: Any, axis: int) -> Any:
    """The norm, with a gradient of zero at zero."""
    squares = jnp.sum(x * x, axis)
    some = squares > 0
    return jnp.where(some, jnp.sqrt(jnp.where(some, squares, jnp.ones_like(squares))), squares)


class MiSSArray(MethodArray):
    """Matrix shard sharing: inputs are summed in groups, and a trained matrix maps the sums to outputs. What
    is added to the weight is this matrix, repeated.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `block`: shape `(..., rank, outputs)`: input `j` is mapped by row `j % rank`. With fewer columns, these
        are repeated over the outputs. Default: None.
    - `bat`: in its stead, matrices that also multiply the weight, `(..., outputs / rank, rank, rank)`: in
        square blocks, `w[p, q]` becomes `w[p, q] + w[p, q] @ bat[p] + bat[p]`. The sum is formed in each
        product. Default: None.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        miss = ql.adapters.MiSSArray(jnp.ones((4, 6)), jnp.zeros((2, 4)))
        ql.quaxify(jnp.matmul)(miss, jnp.arange(6.0))
        ```

    Kang and Yin, MiSS: Revisiting the Trade-off in LoRA with an Efficient Shard-Sharing Structure (2024).
    """

    block: Any = None
    bat: Any = None

    part_axes: ClassVar[Mapping[str, str]] = {"block": "rank columns", "bat": "blocks rank square"}

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> Any:
        if self.block is None:
            return self.on(SumArray, self._of_blocks())
        rank, columns = self.block.shape[-2:]
        repeated = jnp.concatenate([self.block] * (self.num_outputs // columns), -1)
        a = (jnp.arange(self.num_inputs) % rank)[None, :] == jnp.arange(rank)[:, None]
        return self.low_rank(a.astype(repeated.dtype), jnp.matrix_transpose(repeated))

    def _of_blocks(self) -> Any:
        r = self.bat.shape[-1]
        w = self.as_matrix(materialise(self.base)).astype(self.bat.dtype)
        blocks = jnp.reshape(w, (*w.shape[:-2], self.num_outputs // r, r, self.num_inputs // r, r))
        added = jnp.einsum("...praq,...pqs->...pras", blocks, self.bat, precision="highest")
        added += self.bat[..., :, :, None, :]
        return jnp.reshape(added, (*added.shape[:-4], self.num_outputs, self.num_inputs))


class GraLoRAArray(MethodArray):
    """Granular low-rank adaptation: the weight is a grid of `k x k` blocks, each with a low-rank change of
    its own.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a`: for each of `k` groups of inputs, the first factors of all blocks in its column: shape
        `(..., k, inputs / k, rank)`.
    - `b`: for each of `k` groups of outputs, the second factors of all blocks in its row: shape
        `(..., k, rank, outputs / k)`.
    - `general_a`, `general_b`: a low-rank change of the whole, as `a` and `b` of [`quaxlike.LoraArray`][].
        Default: None.
    - `scaling`: the factor of all. Default: 1.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 6)), jnp.ones((2, 3, 2)), jnp.zeros((2, 2, 2))
        gralora = ql.adapters.GraLoRAArray(w, a, b)
        ql.quaxify(jnp.matmul)(gralora, jnp.arange(6.0))
        ```

    Jung et al., GraLoRA: Granular Low-Rank Adaptation for Parameter-Efficient Fine-Tuning (2025).
    """

    a: Any
    b: Any
    general_a: Any = None
    general_b: Any = None
    scaling: float = eqx.field(static=True, default=1.0, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "k in_group rank", "b": "k rank out_group", "general_a": "h columns", "general_b": "rows h"
    }  # fmt: skip

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        k, rank, size = self.b.shape[-3:]
        # The rank of the whole is (n, j, q): the group of inputs, that of outputs, and the rank of a block.
        b = jnp.reshape(self.scaling * self.b, (*self.b.shape[:-3], k, k, rank // k, size))
        eye = jnp.eye(k, dtype=b.dtype)
        b = jnp.einsum("...jnqo,jl->...jonlq", b, eye)
        b = jnp.reshape(b, (*b.shape[:-5], k * size, k * rank))
        x = self.low_rank(BlockDiagonalMatrix(jnp.matrix_transpose(self.a)), b)
        if self.general_a is None:
            return x
        return self.low_rank(self.general_a, self.scaling * self.general_b).with_base(x)


class RandLoRAArray(MethodArray):
    """RandLoRA: a change of full rank, as a sum of frozen random low-rank matrices that all layers share;
    trained are a factor for each column of their first factors and, in each, for each row.

    It is computed by two factors, together about as large as the weight.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a`: shape `(..., rank, 1, n)`, of which the layer uses as many columns as it has inputs or outputs,
        whichever are fewer.
    - `b`: shape `(..., m, bases, rank)`, of which it uses the rows of the others, and the first bases.
    - `scale`: shape `(..., rank, bases)`.
    - `gamma`: shape `(..., bases, the lesser number)`.
    - `scaling`: the factor of all. Default: 1.
    - `seed`: the number that PEFT draws these `a` and `b` with, so that its files need not hold them.
        Default: None, for any others.
    - `sparsity`: how PEFT draws them: `"dense"`, `"sparse"` or `"very_sparse"`. Default: `"dense"`.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 1, 3)), jnp.ones((4, 2, 2))
        scale, gamma = jnp.zeros((2, 2)), jnp.ones((2, 3))
        x = ql.adapters.RandLoRAArray(w, a, b, scale, gamma)
        ql.quaxify(jnp.matmul)(x, jnp.arange(3.0))
        ```

    Albert et al., RandLoRA: Full-rank parameter-efficient fine-tuning of large models (2025). The pairing of
    factors is PEFT's.
    """

    a: Any
    b: Any
    scale: Any
    gamma: Any
    scaling: float = eqx.field(static=True, default=1.0, kw_only=True)
    seed: int | None = eqx.field(static=True, default=None, kw_only=True)
    sparsity: str = eqx.field(static=True, default="dense", kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "rank one columns", "b": "rows all rank", "scale": "rank bases", "gamma": "bases fewer"
    }  # fmt: skip

    def trained(self) -> Sequence[str]:
        return ("scale", "gamma", *(["w"] if self.train_base else []))

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        (few, many), (rank, bases) = sorted((self.num_outputs, self.num_inputs)), self.scale.shape[-2:]
        # The rows of `thin` run over (rank, base), and the columns of `wide` over (base, rank), as in PEFT.
        thin = _times(_times(self.scale[..., None], self.a[..., :few]), self.gamma[..., None, :, :])
        thin = jnp.reshape(thin, (*thin.shape[:-3], rank * bases, few))
        wide = self.b[..., :many, :bases, :]
        wide = jnp.reshape(self.scaling * wide, (*wide.shape[:-3], many, bases * rank))
        if self.num_inputs == few:
            return self.low_rank(thin, wide)
        return self.low_rank(jnp.matrix_transpose(wide), jnp.matrix_transpose(thin))
