"""LoHa: adds the elementwise product of two low-rank matrices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp

from .combinators import SumArray
from .lycoris import KINDS, OPTIONS, PATTERNS, is_effective, tucker
from .method import MethodArray
from .record import Layer, Method, Weight, Written, as_written, starts


class LoHaArray(MethodArray):
    """LoHa: adds the elementwise product of two low-rank matrices, `scaling * (a_1 b_1) * (a_2 b_2)`.

    The rank of this product is at most `r²`. The product is treated as a low-rank change or materialised,
    whichever is cheaper.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `a_1`, `a_2`: have shape `(..., outputs, r)`.
    - `b_1`, `b_2`: have shape `(..., r, inputs)`. Multiple input axes are flattened.
    - `core_1`, `core_2`: cores with shape `(r, r, *window)`, for convolution kernels in Tucker form. Each
        matrix is then `core` multiplied by both `a` and `b`, with `b` of shape `(r, channels)`. Default:
        None.
    - `scaling`: a factor for the change. Not differentiated. Default: 1.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

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
    scaling: Any = eqx.field(default=1.0, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "a_1": "rows r", "b_1": "r columns", "a_2": "rows r", "b_2": "r columns",
        "core_1": "r s height width", "core_2": "r s height width",
    }  # fmt: skip
    numbers: ClassVar[Sequence[str]] = ("scaling",)

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> Any:
        rank, b_1 = self.a_1.shape[-1] * self.a_2.shape[-1], self.scaled("b_1")
        if (
            self.core_1 is None
            and rank * (self.num_outputs + self.num_inputs) < self.num_outputs * self.num_inputs
        ):
            a = b_1[..., :, None, :] * self.b_2[..., None, :, :]
            b = self.a_1[..., :, :, None] * self.a_2[..., :, None, :]
            a = jnp.reshape(a, (*a.shape[:-3], rank, a.shape[-1]))
            return self.low_rank(a, jnp.reshape(b, (*b.shape[:-2], rank)))
        matrices = [tucker(core, a, b) for core, a, b in (
            (self.core_1, self.a_1, b_1), (self.core_2, self.a_2, self.b_2))]  # fmt: skip
        return self.on(SumArray, matrices[0] * matrices[1])


@starts
def loha(x: Weight, *, rank: int = 8, alpha: float = 8) -> LoHaArray:
    a, b_1, b_2 = x.normal(x.outputs, rank, scale=0.1), x.normal(rank, x.inputs), x.normal(rank, x.inputs)
    return x.on(LoHaArray, a, b_1, x.zeros(x.outputs, rank), b_2, scaling=alpha / rank)


def _read_loha(layer: Layer) -> Any:
    r, alpha = layer.option("r"), layer.option("alpha")
    out, into, cores = layer.outputs, layer.inputs, {}
    if is_effective(layer):
        cores = {f"core_{n}": layer.read(f"core_{n}", r, r, *layer.window) for n in (1, 2)}
        into = layer.in_shape[0]
        a_1, a_2 = (layer.read(f"a_{n}", r, out).T for n in (1, 2))
    else:
        a_1, a_2 = (layer.read(f"a_{n}", out, r) for n in (1, 2))
    b_1, b_2 = (layer.read(f"b_{n}", r, into) for n in (1, 2))
    return layer.on(LoHaArray, a_1, b_1, a_2, b_2, **cores, scaling=alpha / r)


def _write_loha(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    effective = x.core_1 is not None
    parts = {name: getattr(x, name) for name in LOHA.parts}
    if effective:
        parts |= {"a_1": x.a_1.T, "a_2": x.a_2.T}
    r = x.a_1.shape[-1]
    options = {"r": r, "alpha": as_written(layer.path, x.scaling * r)}
    return parts, options | ({"use_effective_conv2d": effective} if math.prod(layer.window) > 1 else {})


LOHA = Method(
    "LOHA", LoHaArray, loha,
    parts={
        "a_1": ".hada_w1_a", "b_1": ".hada_w1_b", "a_2": ".hada_w2_a", "b_2": ".hada_w2_b",
        "core_1": ".hada_t1", "core_2": ".hada_t2",
    },
    options=OPTIONS, read=_read_loha, write=_write_loha, kinds=KINDS, conv1d=False, patterns=PATTERNS,
)  # fmt: skip
