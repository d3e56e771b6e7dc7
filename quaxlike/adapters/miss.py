"""MiSS: matrix shard sharing."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from ..core.values import materialise
from .combinators import SumArray
from .method import MethodArray
from .record import BIAS, DROPOUT, Layer, Method, Weight, Written, count, one_of, starts


class MiSSArray(MethodArray):
    """Matrix shard sharing: sums over groups of inputs, then multiplies the result by a trained matrix.

    Mathematically, this is the same as periodically repeating the trained matrix and adding it to the weight.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `block`: the trained matrix, of shape `(..., rank, outputs)`. Input `j` is multiplied by row `j % rank`.
        If there are fewer columns than outputs, then these are repeated as well. Default: None.
    - `bat`: matrices of shape `(..., outputs / rank, rank, rank)` that also multiply the weight; `block`
        should then be `None`. Each square block `w[p, q]` then becomes `w[p, q] + w[p, q] @ bat[p] + bat[p]`.
        Every product materialises this sum. Default: None.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

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
            return self.on(SumArray, self._block_delta())
        rank, columns = self.block.shape[-2:]
        repeated = jnp.concatenate([self.block] * (self.num_outputs // columns), -1)
        a = (jnp.arange(self.num_inputs) % rank)[None, :] == jnp.arange(rank)[:, None]
        return self.low_rank(a.astype(repeated.dtype), jnp.matrix_transpose(repeated))

    def _block_delta(self) -> Any:
        r = self.bat.shape[-1]
        w = self.as_matrix(materialise(self.base)).astype(self.bat.dtype)
        blocks = jnp.reshape(w, (*w.shape[:-2], self.num_outputs // r, r, self.num_inputs // r, r))
        added = jnp.einsum("...praq,...pqs->...pras", blocks, self.bat, precision="highest")
        added += self.bat[..., :, :, None, :]
        return jnp.reshape(added, (*added.shape[:-4], self.num_outputs, self.num_inputs))


@starts
def miss(x: Weight, *, rank: int = 64) -> MiSSArray:
    return x.on(MiSSArray, x.zeros(rank, x.outputs))


def _read_miss(layer: Layer) -> Any:
    r, variant = layer.option("r"), layer.option("init_weights")
    if variant == "bat":
        if layer.outputs % r or layer.inputs % r:
            raise layer.error("block", f"'bat' takes outputs and inputs that {r} divides; found "
                              f"{layer.outputs} and {layer.inputs}")  # fmt: skip
        return layer.on(MiSSArray, bat=layer.read("block", layer.outputs // r, r, r))
    columns = layer.option("mini_r") if variant == "mini" else layer.outputs
    if layer.outputs % columns:
        raise layer.error("block", f"mini_r must divide {layer.outputs} outputs; found {columns}")
    return layer.on(MiSSArray, layer.read("block", r, columns))


def _write_miss(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x = layer.array
    if x.bat is not None:
        return {"block": x.bat}, {"r": x.bat.shape[-1], "init_weights": "bat"}
    r, columns = x.block.shape[-2:]
    mini = {"init_weights": "mini", "mini_r": columns} if columns != x.num_outputs else {"init_weights": True}
    return {"block": x.block}, {"r": r, **mini}


MISS = Method(
    "MISS", MiSSArray, miss,
    parts={"block": ".miss_block"},
    options={
        "bias": BIAS,
        "r": count(64), "mini_r": count(1), "init_weights": one_of(True, False, "bat", "mini"),
        "miss_dropout": DROPOUT,
    },
    read=_read_miss, write=_write_miss, conv1d=False,
)  # fmt: skip
