"""OFT: rotates blocks of a layer's inputs."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..arrays.dot_axes import cast, in_float32
from ..arrays.structured import BlockDiagonalMatrix
from .combinators import RotatedArray
from .method import MethodArray
from .record import BIAS, DROPOUT, Layer, Method, Weight, Written, count, flag, number, starts


class OFTArray(MethodArray):
    """Orthogonal fine-tuning: multiplies each block of a layer's inputs by a trained orthogonal matrix.

    These matrices are parameterised as Cayley transforms of skew-symmetric matrices. This rotates the inputs
    rather than the weight, so the rotated weight is never formed.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `skew`: the elements above the diagonal of each `b x b` skew-symmetric matrix, in row-major order, with
        shape `(..., blocks, b * (b - 1) / 2)`. A single block is shared by all inputs.
    - `terms`: the number of terms in the Neumann series for the inverse in the Cayley transform, counted as
        in PEFT. Default: None, for the exact inverse.
    - `eps`: clips the norms of the skew-symmetric matrices to `eps / sqrt(blocks)` (constrained OFT). The
        clipping is ignored when differentiating. Default: None.
    - `of_outputs`: whether to rotate the outputs instead, e.g. an embedding's columns. Default: False.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        blocks = jnp.ones((2, 3))  # two 3 x 3 blocks
        w = ql.adapters.OFTArray(jnp.ones((4, 6)), blocks)
        ql.quaxify(jnp.matmul)(w, jnp.arange(6.0))
        ```

    Qiu et al., Controlling Text-to-Image Diffusion by Orthogonal Finetuning (2023); Qiu et al., Orthogonal
    Finetuning Made Scalable (2025). Conventions follow PEFT.
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
    """Computes `(I - K) (I + K)^-1` for skew-symmetric matrices `K`.

    If `terms` is given, then this computes that many terms of the series `I - 2 K + 2 K² - ...` for `-K`.
    """
    eye = jnp.broadcast_to(jnp.eye(k.shape[-1], dtype=k.dtype), k.shape)
    if terms is None:
        # Use at least float32: LAPACK doesn't support narrower dtypes.
        plus, minus = (cast(x, in_float32(k.dtype)) for x in (eye + k, eye - k))
        return cast(jnp.linalg.solve(plus, minus), k.dtype)
    terms = 4 if terms == 3 else terms  # For consistency with PEFT.
    out, power = eye, eye
    for n in range(1, terms):
        power = jnp.matmul(power, k, precision="highest")
        out += power if 1 < n == terms - 1 else 2 * power
    return out


@starts
def oft(x: Weight, *, block_size: int = 32) -> OFTArray:
    of_outputs = x.layout.kind == "embedding"
    size = x.outputs if of_outputs else x.inputs
    x.must_divide("OFT", "a block_size", block_size, size)
    skew = x.zeros(size // block_size, block_size * (block_size - 1) // 2)
    return x.on(OFTArray, skew, of_outputs=of_outputs)


def _warn_of_windows(layers: Sequence[Layer | Written], given: Mapping[str, Any]) -> None:
    """Warns about convolutions: PEFT's forward pass is inconsistent with its merged weights there."""
    if names := [layer.name for layer in layers if math.prod(layer.window) > 1]:
        warnings.warn(
            f"PEFT computes {', '.join(names)} with OFT in another way than it merges it: its forward pass "
            "leaves out the padding of a convolution, and adds up windows that overlap. Here the outputs are "
            "those of the merged weights. An adapter that PEFT trained may not fit them.",
            stacklevel=2,
        )


def _read_oft(layer: Layer) -> Any:
    embedding = layer.layout.kind == "embedding"
    part = "embedding" if embedding else "skew"
    shape = layer.shape_of(part)
    size = layer.outputs if embedding else layer.inputs
    terms = layer.option("num_cayley_neumann_terms") if layer.option("use_cayley_neumann") else None
    eps = layer.option("eps") if layer.option("coft") else None
    if len(shape) != 2:
        raise layer.error(part, f"expected two axes; found {shape}")
    x = layer.on(OFTArray, layer.read(part, *shape), terms=terms, eps=eps, of_outputs=embedding)
    b = x.block_size
    expected = 1 if layer.option("block_share") else size // max(b, 1)
    if shape != (expected, b * (b - 1) // 2) or size % b:
        raise layer.error(part, f"expected (blocks, b (b - 1) / 2) with b dividing {size}; found {shape}")
    return x


def _write_oft(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, kind = layer.array, layer.layout.kind
    if x.of_outputs != (kind == "embedding"):
        raise ValueError(f"PEFT's OFT rotates the inputs of layers, and the outputs of embeddings alone; "
                         f"{layer.name} is of kind {kind!r}.")  # fmt: skip
    if kind == "conv" and (len(layer.window) != 2 or len({*layer.window}) > 1):
        raise ValueError(
            f"PEFT's OFT is for convolutions with a square window; that of {layer.name} is {layer.window}."
        )
    options = {
        "block": (x.block_size, x.skew.shape[-2]),
        "coft": x.eps is not None,
        "use_cayley_neumann": x.terms is not None,
        **({} if x.eps is None else {"eps": x.eps}),
        **({} if x.terms is None else {"num_cayley_neumann_terms": x.terms}),
    }
    return {"embedding" if x.of_outputs else "skew": x.skew}, options


def _settle_oft(layers: Any, options: dict[str, dict[str, Any]], targets: Sequence[str]) -> dict[str, Any]:
    _warn_of_windows([*layers.values()], {})
    blocks = {name: own["block"] for name, own in options.items()}
    inputs = {
        name: w.array.num_outputs if w.array.of_outputs else w.array.num_inputs for name, w in layers.items()
    }
    shared = all(number == 1 for _, number in blocks.values())
    shared = shared and any(size < inputs[name] for name, (size, _) in blocks.items())
    if shared:  # PEFT repeats a shared block over all inputs
        for name, own in options.items():
            own["block"] = (blocks[name][0], inputs[name] // blocks[name][0])
    size, number = size_or_number("OFT", options)
    return {"oft_block_size": size, "r": number, "block_share": shared}


def size_or_number(kind: str, options: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """Returns either the block size (if this is the same for all layers) or the number of blocks.

    The other is 0: PEFT's configuration only allows setting one of them.
    """
    sizes, numbers = map(set, zip(*(own.pop("block") for own in options.values()), strict=True))
    if len(sizes) > 1 and len(numbers) > 1:
        raise ValueError(
            f"PEFT's {kind} has one size of blocks for all layers, or one number of them; found sizes "
            f"{sorted(sizes)} and numbers {sorted(numbers)}."
        )
    return (sizes.pop(), 0) if len(sizes) == 1 else (0, numbers.pop())


OFT = Method(
    "OFT", OFTArray, oft,
    parts={"skew": ".oft_R.weight", "embedding": ".oft_embedding_R.weight"},
    options={
        "bias": BIAS,
        "r": count(0, 0), "oft_block_size": count(32, 0), "module_dropout": DROPOUT, "coft": flag(),
        "eps": number(6e-5), "block_share": flag(), "use_cayley_neumann": flag(True),
        "num_cayley_neumann_terms": count(5),
    },
    read=_read_oft, write=_write_oft, settle=_settle_oft, prepare=_warn_of_windows,
    kinds=("linear", "matrix", "embedding", "conv"), conv1d=False,
)  # fmt: skip
