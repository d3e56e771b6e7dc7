"""BOFT: rotates a layer's inputs by butterfly factors."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp

from ..arrays.structured import BlockDiagonalMatrix, KroneckerMatrix
from ..arrays.zero import Identity
from .combinators import RotatedArray, ScaledArray
from .method import MethodArray
from .oft import cayley, size_or_number
from .record import BIAS, DROPOUT, Layer, Method, Weight, Written, count, starts


class BOFTArray(MethodArray):
    """Butterfly orthogonal fine-tuning: rotates the inputs and scales the outputs.

    The rotation is a product of orthogonal matrices, each block-diagonal up to a different permutation of the
    inputs.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `blocks`: `n` blocks of size `b` for each matrix, with shape `(..., factors, n, b, b)`, where `n * b` is
        the number of inputs. The orthogonal matrices are the Cayley transforms of their skew-symmetric parts.
    - `scale`: factors for the outputs, of shape `(..., *outputs)`.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    **Raises:**

    `ValueError` if there is more than one matrix and `b` is odd, or `n` isn't a multiple of `2 ** (factors -
    1)`.

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
            if k:  # Permute half-blocks within each group, so that those with even indices come first.
                order = jnp.concatenate([jnp.arange(start, 2 ** (k + 1), 2) for start in (0, 1)])
                mixed = jnp.eye(2 ** (k + 1), dtype=blocks.dtype)[order]

                def mix(m: Any, k: Any = k) -> Any:
                    return KroneckerMatrix(
                        Identity(n // 2**k, blocks.dtype), KroneckerMatrix(m, Identity(b // 2, blocks.dtype))
                    )

                chain = [mix(mixed), *chain, mix(mixed.T)]
            for rotation in chain:
                x = self.on(RotatedArray, rotation).with_base(x)
        return x


@starts
def boft(x: Weight, *, block_size: int = 4, n_butterfly_factor: int = 1) -> BOFTArray:
    x.must_divide("BOFT", "a block_size", block_size, x.inputs)
    blocks = x.zeros(n_butterfly_factor, x.inputs // block_size, block_size, block_size)
    return x.on(BOFTArray, blocks, x.ones(*x.out_shape))


def _read_boft(layer: Layer) -> Any:
    shape, m = layer.shape_of("blocks"), layer.option("boft_n_butterfly_factor")
    b = shape[-1] if len(shape) == 4 else 0
    if not b or shape != (m, layer.inputs // b, b, b) or layer.inputs % b:
        raise layer.error(
            "blocks", f"expected ({m}, inputs / b, b, b) for {layer.inputs} inputs; found {shape}"
        )
    scale = layer.read("scale", *((1, layer.outputs) if layer.window else (layer.outputs, 1)))
    return layer.on(BOFTArray, layer.read("blocks", *shape), scale.reshape(layer.out_shape))


def _write_boft(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, (m, n, b, _) = layer.array, layer.array.blocks.shape
    scale = x.scale.reshape((1, -1) if layer.layout.is_conv else (-1, 1))
    return {"blocks": x.blocks, "scale": scale}, {"block": (b, n), "boft_n_butterfly_factor": m}


def _settle_boft(layers: Any, options: dict[str, dict[str, Any]], targets: Sequence[str]) -> dict[str, Any]:
    size, number = size_or_number("BOFT", options)
    return {"boft_block_size": size, "boft_block_num": number}


BOFT = Method(
    "BOFT", BOFTArray, boft,
    parts={"blocks": ".boft_R", "scale": ".boft_s"},
    options={
        "bias": BIAS,
        "boft_block_size": count(4, 0), "boft_block_num": count(0, 0), "boft_n_butterfly_factor": count(1),
        "boft_dropout": DROPOUT,
    },
    read=_read_boft, write=_write_boft, settle=_settle_boft,
    kinds=("linear", "matrix", "conv"), conv1d=False,
)  # fmt: skip
