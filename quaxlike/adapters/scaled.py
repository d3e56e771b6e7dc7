"""`IA3Array`, and the biases of its layers."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp

from ..arrays.lora.dot import multiply
from ..arrays.lora.trainable import TransparentValue
from ..core.values import materialise
from .combinators import HadamardArray, ScaledArray
from .method import MethodArray


class IA3Array(MethodArray):
    """(IA)³: a trained factor for each output of a layer, or for each of its inputs.

    **Arguments:**

    - `w`: the base, an array or a Value.
    - `outputs`: the factors of outputs, `(..., *outputs)`. Default: None.
    - `inputs`: the factors of inputs, `(..., *inputs)`: those of feed-forward layers. Default: None.
    - `channels`: the factors of the channels that a convolution is applied to, `(..., channels)`; of a
        grouped one, whose kernel has only those of a group. Default: None.
    - `out_axes`, `in_axes`, `train_base`, `open_base`: as for [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        w = ql.adapters.IA3Array(jnp.ones((4, 3)), 1.5 * jnp.ones(4))
        ql.quaxify(jnp.matmul)(w, jnp.ones(3))
        ```

    Liu et al., Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning
    (2022).
    """

    outputs: Any = None
    inputs: Any = None
    channels: Any = None

    part_axes: ClassVar[Mapping[str, str]] = {"outputs": "out", "inputs": "in", "channels": "channels"}

    def composed(self) -> Any:
        if self.channels is None:
            return self.on(ScaledArray, self.outputs, self.inputs)
        size, *window = (self.w.shape[axis] for axis in self.in_axes)
        groups = self.channels.shape[-1] // size
        by_group = jnp.reshape(self.channels, (*self.channels.shape[:-1], groups, size))
        factor = jnp.repeat(by_group, self.num_outputs // groups, axis=-2)
        factor = jnp.reshape(factor, (*factor.shape, *[1] * len(window)))
        return self.on(HadamardArray, jnp.broadcast_to(factor, (*factor.shape[: -len(window)], *window)))


class ScaledBias(TransparentValue):
    """The bias of a layer whose outputs are scaled, times the same factors. They are trained apart from those
    of the weight.

    **Arguments:**

    - `w`: the bias of the layer, frozen.
    - `factor`: a factor for each element.
    """

    factor: Any

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.w.shape, self.w.dtype)

    def materialise(self) -> jax.Array:
        return multiply(materialise(self.base), self.factor)

    def merged(self) -> jax.Array:
        """The product, with gradients to both parts."""
        return multiply(materialise(self.w), self.factor)

    def unmerged(self, weight: jax.Array) -> "ScaledBias":
        return self.with_base((weight / self.factor).astype(weight.dtype))
