"""VeRA: trains vectors that scale random matrices shared by all layers."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from ..arrays.lora.array import LoraArray
from .method import MethodArray
from .random_numbers import Generator, vera_projections
from .record import BIAS, DROPOUT, Layer, Method, Weight, Written, count, flag, starts
from .shared_matrices import SEED, draws, given_matrices, read_shared, times, write_shared


class VeRAArray(MethodArray):
    """Vector-based random matrix adaptation: `w + diag(scale_b) b diag(scale_a) a`.

    Here `a` and `b` are frozen random matrices shared by all layers. Only the two vectors are trained, so
    this needs very few parameters.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a`: has shape `(..., rank, n)`. Only the first `num_inputs` columns are used.
    - `b`: has shape `(..., m, rank)`. Only the first `num_outputs` rows are used.
    - `scale_a`: has shape `(..., rank)`.
    - `scale_b`: has shape `(..., *outputs)`.
    - `seed`: PEFT's seed for drawing these `a` and `b`, so that its files can omit them. Default: None, for
        arbitrary matrices.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

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
        return ("scale_a", "scale_b", *(["w"] if self.gradients == "train" else []))

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> LoraArray:
        a = times(self.scale_a[..., None], self.a[..., : self.num_inputs])
        scale_b = jnp.reshape(self.scale_b, (*self.scale_b.shape[: -len(self.out_axes)], self.num_outputs))
        return self.low_rank(a, times(scale_b[..., None], self.b[..., : self.num_outputs, :]))


@starts
def vera(
    x: Weight, *, rank: int = 256, d_initial: float = 0.1, seed: int | None = None, a: Any = None,
    b: Any = None,
) -> VeRAArray:  # fmt: skip
    """Initialises with random matrices `a` and `b` shared by all layers.

    By default, these are the matrices that PEFT would draw with this `seed`, or otherwise with a seed derived
    from the key.
    """
    a, b = given_matrices("VeRA", a, b)
    return x.on(VeRAArray, a, b, d_initial * x.ones(a.shape[-2]), x.zeros(*x.out_shape), seed=seed)


def _drawn(generator: Generator, n: int, m: int, rank: int, options: Mapping[str, Any]) -> tuple[Any, Any]:
    return vera_projections(generator, n, m, rank)


draws(vera, _drawn)


def _read_vera(layer: Layer) -> Any:
    a, b, seed = layer.shared
    r = layer.option("r")
    if a.shape[:-1] != (r,) or b.shape[1:] != (r,) or a.shape[-1] < layer.inputs or len(b) < layer.outputs:
        raise layer.error("scale_a", f"vera_A {a.shape} and vera_B {b.shape} do not reach over the layer, of "
                          f"{layer.inputs} inputs and {layer.outputs} outputs, with rank {r}")  # fmt: skip
    scale_b = layer.read("scale_b", layer.outputs).reshape(layer.out_shape)
    return layer.on(VeRAArray, a, b, layer.read("scale_a", r), scale_b, seed=seed)


def _write_vera(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    return {"scale_a": x.scale_a, "scale_b": x.scale_b.reshape(-1)}, {"r": x.a.shape[-2]}


def _fits_vera(layers: Sequence[Written]) -> bool:
    """Returns whether the shared matrices have the shapes that PEFT would choose for these layers.

    Otherwise PEFT couldn't reproduce them from the seed, so the file must store them.
    """
    sizes = zip(*((x.array.num_inputs, x.array.num_outputs) for x in layers), strict=True)
    n, m = map(max, sizes)
    return (layers[0].array.a.shape[-1], len(layers[0].array.b)) == (n, m)


VERA = Method(
    "VERA", VeRAArray, vera,
    parts={"scale_a": ".vera_lambda_d", "scale_b": ".vera_lambda_b"},
    options={
        "bias": BIAS,
        "r": count(256), "projection_prng_key": SEED, "save_projection": flag(True), "vera_dropout": DROPOUT,
        "fan_in_fan_out": flag(),
    },
    read=_read_vera, write=_write_vera, informative=("d_initial", "init_weights"),
    shared={"a": "vera_A", "b": "vera_B"}, prepare=functools.partial(read_shared, "scale_a", _drawn),
    write_shared=lambda layers: write_shared(layers, _fits_vera),
)  # fmt: skip
