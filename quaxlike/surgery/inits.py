"""`loftq`: an initialisation for adapters on quantised weights."""

from typing import Any

from .._checked import checked
from ..arrays.layout import Layout
from ..arrays.lora import LoraArray
from ..arrays.lora.inits import Init, dense_base
from ..arrays.lora.matrices import as_matrix, halves, scaling_of, svd, with_factors
from ..core.values import materialise
from .quantize import quantize_array


@checked
def loftq(scheme: str = "nf4", *, iterations: int = 1, **scheme_options: Any) -> Init:
    """Quantises the base and initialises the adapter to approximate the rounding error (LoftQ).

    The adapted model thus starts out closer to the unquantised one than with an adapter that initially adds
    zero. This helps most at low bit widths, where the rounding error is large.

    **Arguments:**

    - `scheme`, `scheme_options`: as in [`quaxlike.quantize`][]. Default: `"nf4"`.
    - `iterations`: the number of times to alternate between quantising the weight minus its adapter and
        fitting the adapter to the resulting error. Default: 1.

    **Returns:**

    An initialisation to pass to [`quaxlike.loraify`][] as `init`.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(64, 64, 64, depth=1, key=jax.random.key(0))
        model = ql.loraify(
            mlp, rank=8, init=ql.loftq("nf4", iterations=4), key=jax.random.key(1)
        )
        ```

    Li et al., LoftQ (2023).
    """
    if iterations < 1:
        raise ValueError(f"loftq takes at least one iteration; found {iterations}.")

    def init(name: str, lora: LoraArray, key: Any) -> LoraArray:
        w, quantized = dense_base(name, lora, "loftq"), None
        for _ in range(iterations):
            rest = lora.w - lora.delta().astype(lora.dtype)
            quantized = quantize_array(
                name, rest, scheme, Layout(lora.out_axes, lora.in_axes), **scheme_options
            )
            u, s, vt = svd(w - as_matrix(lora, materialise(quantized)), lora.rank)
            lora = with_factors(lora, *halves(u, s / scaling_of(lora, s), vt))
        return lora.with_base(quantized)

    return init
