"""C³A: adds a block-circulant matrix."""

from collections.abc import Mapping
from typing import Any, ClassVar

from .._patterns import value_by_end
from ..arrays.structured import BlockCirculantMatrix
from .combinators import SumArray
from .method import MethodArray
from .record import BIAS, Layer, Method, Weight, Written, by_pattern, count, starts


class C3AArray(MethodArray):
    """C³A: adds a matrix of circulant blocks, with products computed by fast Fourier transforms.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `kernel`: the first row of each block, multiplied by the number of inputs, with shape
        `(..., outputs / b, inputs / b, b)`.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

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


@starts
def c3a(x: Weight, *, block_size: int = 256) -> C3AArray:
    x.must_divide("C³A", "a block_size", block_size, x.outputs, x.inputs)
    return x.on(C3AArray, x.zeros(x.outputs // block_size, x.inputs // block_size, block_size))


def _read_c3a(layer: Layer) -> Any:
    shape = layer.shape_of("kernel")
    b = shape[-1] if len(shape) == 3 else 0
    if not b or shape[:2] != (layer.outputs // b, layer.inputs // b) or layer.outputs % b or layer.inputs % b:
        raise layer.error("kernel", f"expected (outputs / b, inputs / b, b) for {layer.outputs} outputs and "
                          f"{layer.inputs} inputs; found {shape}")  # fmt: skip
    return layer.on(C3AArray, layer.read("kernel", *shape))


def _write_c3a(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"kernel": layer.array.kernel}, {"block_size": layer.array.kernel.shape[-1]}


C3A = Method(
    "C3A", C3AArray, c3a,
    parts={"kernel": ".c3a_kernel"},
    options={"bias": BIAS, "block_size": count(256), "block_size_pattern": by_pattern(count(256))},
    read=_read_c3a, write=_write_c3a, conv1d=False, patterns={"block_size": "block_size_pattern"},
    by_pattern=value_by_end,
)  # fmt: skip
