"""RandLoRA: a full-rank change, based on random matrices shared by all layers."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ..arrays.lora.array import LoraArray
from .method import MethodArray
from .random_numbers import Generator, randlora_projections
from .record import BIAS, DROPOUT, Layer, Method, Weight, Written, as_written, count, flag, number, starts
from .shared_matrices import SEED, draws, given_matrices, read_shared, times, write_shared


class RandLoRAArray(MethodArray):
    """RandLoRA: adds a full-rank matrix, as a sum of random low-rank matrices.

    The random matrices are frozen and shared by all layers. Only `scale` and `gamma` are trained: they scale
    the rows and columns of `a` separately for each term. The sum is computed by multiplying two factors,
    together roughly as large as the weight.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a`: has shape `(..., rank, 1, n)`. Only the first `min(outputs, inputs)` columns are used.
    - `b`: has shape `(..., m, max_bases, rank)`. Only the first `max(outputs, inputs)` rows and the first
        `bases` bases are used.
    - `scale`: has shape `(..., rank, bases)`.
    - `gamma`: has shape `(..., bases, min(outputs, inputs))`.
    - `scaling`: a factor for the change. Not differentiated. Default: 1.
    - `seed`: PEFT's seed for drawing these `a` and `b`, so that its files can omit them. Default: None, for
        arbitrary matrices.
    - `sparsity`: PEFT's distribution for drawing them: `"dense"`, `"sparse"` or `"very_sparse"`. Default:
        `"dense"`.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w, a, b = jnp.ones((4, 3)), jnp.ones((2, 1, 3)), jnp.ones((4, 2, 2))
        scale, gamma = jnp.zeros((2, 2)), jnp.ones((2, 3))
        x = ql.adapters.RandLoRAArray(w, a, b, scale, gamma)
        ql.quaxify(jnp.matmul)(x, jnp.arange(3.0))
        ```

    Albert et al., RandLoRA: Full-rank parameter-efficient fine-tuning of large models (2025). Factors are
    paired as in PEFT.
    """

    a: Any
    b: Any
    scale: Any
    gamma: Any
    scaling: Any = eqx.field(default=1.0, kw_only=True)
    seed: int | None = eqx.field(static=True, default=None, kw_only=True)
    sparsity: str = eqx.field(static=True, default="dense", kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "a": "rank one columns", "b": "rows all rank", "scale": "rank bases", "gamma": "bases fewer"
    }  # fmt: skip
    numbers: ClassVar[Sequence[str]] = ("scaling",)

    def trained(self) -> Sequence[str]:
        return ("scale", "gamma", *(["w"] if self.gradients == "train" else []))

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        (few, many), (rank, bases) = sorted((self.num_outputs, self.num_inputs)), self.scale.shape[-2:]
        # The rows of `thin` are flattened from (rank, base), but the columns of `wide` from (base, rank).
        # This looks like a mistake, but is consistent with PEFT.
        thin = times(times(self.scale[..., None], self.a[..., :few]), self.gamma[..., None, :, :])
        thin = jnp.reshape(thin, (*thin.shape[:-3], rank * bases, few))
        wide = self.scaled("b")[..., :many, :bases, :]
        wide = jnp.reshape(wide, (*wide.shape[:-3], many, bases * rank))
        if self.num_inputs == few:
            return self.low_rank(thin, wide)
        return self.low_rank(jnp.matrix_transpose(wide), jnp.matrix_transpose(thin))


@starts
def randlora(
    x: Weight, *, rank: int = 32, alpha: float = 640, seed: int | None = None,
    sparsity: Literal["dense", "sparse", "very_sparse"] = "dense", a: Any = None, b: Any = None,
) -> RandLoRAArray:  # fmt: skip
    """Initialises with random matrices `a` and `b` shared by all layers, as in `vera`."""
    if sparsity not in ("dense", "sparse", "very_sparse"):
        raise ValueError(f"RandLoRA is 'dense', 'sparse' or 'very_sparse'; found {sparsity!r}.")
    a, b = given_matrices("RandLoRA", a, b)
    rank, few = a.shape[0], min(x.outputs, x.inputs)
    bases = math.ceil(few / rank)
    gamma = x.ones(bases, few) / max(x.outputs, x.inputs)
    options: dict[str, Any] = {"scaling": alpha / rank, "seed": seed, "sparsity": sparsity}
    return x.on(RandLoRAArray, a, b, x.zeros(rank, bases), gamma, **options)


def _drawn(generator: Generator, n: int, m: int, rank: int, options: Mapping[str, Any]) -> tuple[Any, Any]:
    return randlora_projections(generator, min(n, m), max(n, m), rank, _sparsity(options))


draws(randlora, _drawn)


def _sparsity(options: Mapping[str, Any]) -> str:
    if "sparsity" in options:  # Options of `randlora`, rather than from a file.
        return options["sparsity"]
    return "very_sparse" if options["very_sparse"] else "sparse" if options["sparse"] else "dense"


def _read_randlora(layer: Layer) -> Any:
    a, b, seed = layer.shared
    r, few, many = layer.option("r"), *sorted((layer.inputs, layer.outputs))
    bases = math.ceil(few / r)
    for part, x in (("a", a), ("b", b)):  # The file may contain a copy of these for every layer.
        if layer.has(part) and not np.array_equal(layer.read(part, *x.shape), x):
            raise layer.error(part, "is not the matrix that all layers share")

    def short() -> Any:
        return a.shape[-1] < few or len(b) < many or b.shape[1] < bases

    if a.shape[:-1] != (r, 1) or b.shape[2:] != (r,) or short():
        raise layer.error(
            "scale",
            f"randlora_A {a.shape} and randlora_B {b.shape} do not reach over the layer, of {layer.inputs} "
            f"inputs and {layer.outputs} outputs, with rank {r}",
        )
    return layer.on(
        RandLoRAArray, a, b, layer.read("scale", r, bases), layer.read("gamma", bases, few),
        scaling=layer.option("randlora_alpha") / r, seed=seed, sparsity=_sparsity(layer.options),
    )  # fmt: skip


def _write_randlora(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    r = x.scale.shape[-2]
    options = {
        "r": r,
        "randlora_alpha": as_written(layer.path, x.scaling * r),
        "sparse": x.sparsity == "sparse",
        "very_sparse": x.sparsity == "very_sparse",
    }
    parts = {"scale": x.scale, "gamma": x.gamma}
    return (parts if x.seed is not None else parts | {"a": x.a, "b": x.b}), options


RANDLORA = Method(
    "RANDLORA", RandLoRAArray, randlora,
    parts={"scale": ".randlora_lambda", "gamma": ".randlora_gamma", "a": ".randlora_A", "b": ".randlora_B"},
    options={
        "bias": BIAS,
        "r": count(32), "randlora_alpha": number(640), "projection_prng_key": SEED,
        "save_projection": flag(True), "sparse": flag(), "very_sparse": flag(), "randlora_dropout": DROPOUT,
        "fan_in_fan_out": flag(),
    },
    read=_read_randlora, write=_write_randlora,
    shared={"a": "randlora_A", "b": "randlora_B"}, prepare=functools.partial(read_shared, "scale", _drawn),
    write_shared=lambda layers: write_shared(layers, lambda layers: True),
)  # fmt: skip
