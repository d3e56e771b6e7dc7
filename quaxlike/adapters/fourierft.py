"""FourierFT: adds a matrix that is sparse in the frequency domain."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._patterns import value_by_end
from .combinators import SumArray
from .method import MethodArray
from .random_numbers import Generator
from .record import (
    BIAS,
    Layer,
    Method,
    Option,
    Weight,
    Written,
    as_written,
    by_pattern,
    count,
    flag,
    number,
    starts,
)


class FourierFTArray(MethodArray):
    """FourierFT: adds a matrix with a sparse, trained spectrum.

    Every product with this array materialises the change.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `spectrum`: the nonzero coefficients, with shape `(..., n)`.
    - `places`: their integer indices into the flattened `(outputs, inputs)` spectrum, with shape `(..., n)`.
    - `scaling`: a factor for the change. Not differentiated. Default: 1.
    - `seed`: PEFT's seed for drawing these `places`, which its files store instead. Default: None.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

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
    scaling: Any = eqx.field(default=1.0, kw_only=True)
    seed: int | None = eqx.field(static=True, default=None, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {"spectrum": "n", "places": "n"}
    numbers: ClassVar[Sequence[str]] = ("scaling",)

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> SumArray:
        # If all adapters of a stack share `places`, then it doesn't have a stacked axis.
        spectrum, places = jnp.broadcast_arrays(self.scaled("spectrum"), self.places)
        shape = (*spectrum.shape[:-1], self.num_outputs * self.num_inputs)
        flat = jnp.put_along_axis(jnp.zeros(shape, spectrum.dtype), places, spectrum, axis=-1, inplace=False)
        whole = jnp.reshape(flat, (*shape[:-1], self.num_outputs, self.num_inputs))
        return self.on(SumArray, jnp.fft.ifft2(whole).real)


@starts
def fourierft(
    x: Weight, *, n_frequency: int = 1000, scaling: float = 150.0, seed: int = 777
) -> FourierFTArray:
    """Uses the frequencies that PEFT would draw with `seed`.

    These only depend on a weight's size, so equally large weights share them.
    """
    size = x.outputs * x.inputs
    if not 0 < n_frequency <= size:
        raise ValueError(f"FourierFT takes an n_frequency from 1 to {size}; found {n_frequency}.")
    places = jnp.broadcast_to(Generator(seed).permutation(size, n_frequency), (*x.batch, n_frequency))
    return x.on(FourierFTArray, x.zeros(n_frequency), places, scaling=scaling, seed=seed)


def _read_fourierft(layer: Layer) -> Any:
    n = layer.option("n_frequency")
    spectrum, seed, size = (
        layer.read("spectrum", n),
        layer.option("random_loc_seed"),
        layer.outputs * layer.inputs,
    )
    if n > size:
        raise layer.error("spectrum", f"has more frequencies than the weight has elements, {size}")
    places = Generator(seed).permutation(size, n)
    return layer.on(FourierFTArray, spectrum, jnp.asarray(places), scaling=layer.option("scaling"), seed=seed)


def _write_fourierft(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    n = x.spectrum.shape[-1]
    if x.seed is None or not np.array_equal(
        x.places, Generator(x.seed).permutation(x.num_outputs * x.num_inputs, n)
    ):
        raise ValueError(
            "PEFT's files of FourierFT have no places of frequencies but those that `random_loc_seed` gives; "
            f"{layer.name} has others. Make it with these places and `seed`."
        )
    scaling = float(as_written(layer.path, x.scaling))
    return {"spectrum": x.spectrum}, {"n_frequency": n, "scaling": scaling, "random_loc_seed": x.seed}


FOURIERFT = Method(
    "FOURIERFT", FourierFTArray, fourierft,
    parts={"spectrum": ".fourierft_spectrum"},
    options={
        "bias": BIAS,
        "n_frequency": count(1000), "n_frequency_pattern": by_pattern(count(1000)), "scaling": number(150.0),
        "random_loc_seed": Option(777, "an integer", lambda x: type(x) is int), "fan_in_fan_out": flag(),
    },
    read=_read_fourierft, write=_write_fourierft, patterns={"n_frequency": "n_frequency_pattern"},
    by_pattern=value_by_end,
)  # fmt: skip
