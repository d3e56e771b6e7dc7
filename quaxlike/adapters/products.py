"""Methods that add or multiply by products: LoHa, LoKr, HiRA, SHiRA, C3A, FourierFT."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from ..arrays.lora.array import LoraArray
from ..arrays.structured import BlockCirculantMatrix, KroneckerMatrix
from ..arrays.zero import Full
from .combinators import HadamardArray, SumArray
from .method import MethodArray


class LoHaArray(MethodArray):
    """LoHa: adds the elementwise product of two low-rank matrices, `scaling * (a_1 b_1) * (a_2 b_2)`.

    That has at most the rank `r²`, and is computed as such a low-rank change where it takes less than a dense
    one.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a_1`, `a_2`: shape `(..., outputs, r)`.
    - `b_1`, `b_2`: shape `(..., r, inputs)`; several axes of inputs are flattened.
    - `core_1`, `core_2`: for kernels of convolutions in the form of Tucker, `(r, r, *window)`; each low-rank
        matrix is then `core`, multiplied by `a` and by `b`, of shape `(r, channels)`. Default: None.
    - `scaling`: the factor of all. Default: 1.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        a, b = jnp.ones((4, 2)), jnp.ones((2, 6))
        loha = ql.adapters.LoHaArray(jnp.ones((4, 6)), a, b, a, 0 * b)
        ql.quaxify(jnp.matmul)(loha, jnp.arange(6.0))
        ```

    Hyeon-Woo et al., FedPara (2021), as in LyCORIS.
    """

    a_1: Any
    b_1: Any
    a_2: Any
    b_2: Any
    core_1: Any = None
    core_2: Any = None
    scaling: float = eqx.field(static=True, default=1.0, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "a_1": "rows r", "b_1": "r columns", "a_2": "rows r", "b_2": "r columns",
        "core_1": "r s height width", "core_2": "r s height width",
    }  # fmt: skip

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> Any:
        rank = self.a_1.shape[-1] * self.a_2.shape[-1]
        if (
            self.core_1 is None
            and rank * (self.num_outputs + self.num_inputs) < self.num_outputs * self.num_inputs
        ):
            a = self.b_1[..., :, None, :] * self.b_2[..., None, :, :]
            b = self.a_1[..., :, :, None] * self.a_2[..., :, None, :]
            a = jnp.reshape(a, (*a.shape[:-3], rank, a.shape[-1]))
            return self.low_rank(self.scaling * a, jnp.reshape(b, (*b.shape[:-2], rank)))
        matrices = [tucker(core, a, b) for core, a, b in (
            (self.core_1, self.a_1, self.b_1), (self.core_2, self.a_2, self.b_2))]  # fmt: skip
        return self.on(SumArray, self.scaling * matrices[0] * matrices[1])


def tucker(core: Any, a: Any, b: Any) -> Any:
    """`a @ b`, or with a core of shape `(r, s, *window)` between them, as a matrix of flattened inputs."""
    if core is None:
        return jnp.matmul(a, b, precision="highest")
    kernel = jnp.einsum("ijkl,...pi,...jq->...pqkl", core, a, b, precision="highest")
    return jnp.reshape(kernel, (*kernel.shape[:-3], -1))


class LoKrArray(MethodArray):
    """LoKr: adds `scaling` times the Kronecker product of two matrices, each of which may be low-rank.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `first`: shape `(..., o_1, i_1)`, or `(..., o_1, r)` if there is a `first_b`.
    - `second`: shape `(..., o_2, i_2)`, or `(..., o_2, r)` if there is a `second_b`. `o_1 o_2` and `i_1 i_2`
        count outputs and inputs; several axes of either are flattened.
    - `first_b`, `second_b`: what they are multiplied by, `(..., r, i_1)` and `(..., r, i_2)`. Default: None.
    - `core`: for kernels of convolutions in the form of Tucker, `(r, r, *window)`: the second matrix is then
        `core`, multiplied by `second` and by `second_b`, of shape `(r, channels)`. Default: None.
    - `alpha`, `rank`: `scaling = alpha / rank`, whatever the ranks of the matrices are. Default: 1.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        first, second = jnp.ones((2, 2)), jnp.zeros((2, 3))
        lokr = ql.adapters.LoKrArray(jnp.ones((4, 6)), first, second)
        ql.quaxify(jnp.matmul)(lokr, jnp.arange(6.0))
        ```

    Yeh et al., Navigating Text-To-Image Customization (2023), as in LyCORIS.
    """

    first: Any
    second: Any
    first_b: Any = None
    second_b: Any = None
    core: Any = None
    alpha: float = eqx.field(static=True, default=1.0, kw_only=True, converter=float)
    rank: int = eqx.field(static=True, default=1, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "first": "o_1 i_1", "second": "o_2 i_2", "first_b": "r i_1", "second_b": "r i_2",
        "core": "r s height width",
    }  # fmt: skip

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> SumArray:
        first = self.first if self.first_b is None else tucker(None, self.first, self.first_b)
        second = self.second if self.second_b is None else tucker(self.core, self.second, self.second_b)
        return self.on(SumArray, KroneckerMatrix(self.alpha / self.rank * first, second))


class HiRAArray(MethodArray):
    """HiRA: multiplies the weight by one plus a low-rank matrix, element by element: `w * (1 + b a)`.

    The product is formed in each matrix product; of embeddings, only the rows that are looked up are.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `a`: shape `(..., rank, *inputs)`.
    - `b`: shape `(..., *outputs, rank)`.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        a, b = jnp.ones((2, 6)), jnp.zeros((4, 2))
        hira = ql.adapters.HiRAArray(jnp.ones((4, 6)), a, b)
        ql.quaxify(jnp.matmul)(hira, jnp.arange(6.0))
        ```

    Huang et al., HiRA: Parameter-Efficient Hadamard High-Rank Adaptation for Large Language Models (2025).
    """

    a: Any
    b: Any

    part_axes: ClassVar[Mapping[str, str]] = {"a": "rank in", "b": "out rank"}

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> HadamardArray:
        n_out, n_in = len(self.out_axes), len(self.in_axes)
        ones = Full(jnp.ones((), self.a.dtype), (*self.b.shape[-1 - n_out : -1], *self.a.shape[-n_in:]))
        axes = {"out_axes": range(-n_out - n_in, -n_in), "in_axes": range(-n_in, 0)}
        return self.on(HadamardArray, LoraArray(ones, self.a, self.b, **axes))


class SHiRAArray(MethodArray):
    """Sparse high-rank adaptation: some elements of the weight are trained.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `delta`: what is added to them, a [`quaxlike.SparseArray`][] of shape `(..., outputs, inputs)`.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        delta = ql.SparseArray.from_coo(jnp.ones(2), [[0, 1], [3, 2]], (4, 6))
        shira = ql.adapters.SHiRAArray(jnp.ones((4, 6)), delta)
        ql.quaxify(jnp.matmul)(shira, jnp.arange(6.0))
        ```

    Bhardwaj et al., Sparse High Rank Adapters (2024).
    """

    delta: Any

    part_axes: ClassVar[Mapping[str, str]] = {"delta": "rows columns"}

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> SumArray:
        return self.on(SumArray, self.delta)


class C3AArray(MethodArray):
    """C³A: adds a matrix of circulant blocks, which is multiplied by fast Fourier transforms.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `kernel`: the first rows of the blocks, times the number of inputs: `(..., outputs / b, inputs / b, b)`.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        c3a = ql.adapters.C3AArray(jnp.ones((4, 6)), jnp.zeros((2, 3, 2)))
        ql.quaxify(jnp.matmul)(c3a, jnp.arange(6.0))
        ```

    Chen et al., Parameter-Efficient Fine-Tuning via Circular Convolution (2024).
    """

    kernel: Any

    part_axes: ClassVar[Mapping[str, str]] = {"kernel": "row_blocks column_blocks b"}

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> SumArray:
        return self.on(SumArray, BlockCirculantMatrix(self.kernel / self.num_inputs))


class FourierFTArray(MethodArray):
    """FourierFT: adds a matrix that has a few trained frequencies. It is formed in each product.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `spectrum`: the coefficients, `(..., n)`.
    - `places`: their places in the flattened spectrum `(outputs, inputs)`, integers `(..., n)`.
    - `scaling`: the factor of all. Default: 1.
    - `seed`: the number that PEFT draws these places with, which its files have in their stead. Default:
        None.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, places = jnp.ones((4, 6)), jnp.array([0, 7])
        x = ql.adapters.FourierFTArray(w, jnp.zeros(2), places, scaling=150.0)
        ql.quaxify(jnp.matmul)(x, jnp.arange(6.0))
        ```

    Gao et al., Parameter-Efficient Fine-Tuning with Discrete Fourier Transform (2024).
    """

    spectrum: Any
    places: Any
    scaling: float = eqx.field(static=True, default=1.0, kw_only=True)
    seed: int | None = eqx.field(static=True, default=None, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {"spectrum": "n", "places": "n"}

    def trained(self) -> Sequence[str]:
        return ("spectrum", *(["w"] if self.train_base else []))

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> SumArray:
        spectrum, places = jnp.broadcast_arrays(self.spectrum, self.places)  # places may be shared
        shape = (*spectrum.shape[:-1], self.num_outputs * self.num_inputs)
        flat = jnp.put_along_axis(jnp.zeros(shape, spectrum.dtype), places, spectrum, axis=-1, inplace=False)
        whole = jnp.reshape(flat, (*shape[:-1], self.num_outputs, self.num_inputs))
        return self.on(SumArray, self.scaling * jnp.fft.ifft2(whole).real)
