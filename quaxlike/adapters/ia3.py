"""(IA)³: scales a layer's outputs, inputs and bias."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from .._patterns import fullmatch
from ..arrays.lora.dot import multiply
from ..arrays.lora.trainable import TransparentValue
from ..core.values import materialise
from .combinators import HadamardArray, ScaledArray
from .method import MethodArray
from .record import Layer, Method, Option, Weight, Written, flag, starts


class IA3Array(MethodArray):
    """(IA)³: scales each of a layer's outputs or inputs by a trained factor.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `outputs`: factors for the outputs, of shape `(..., *outputs)`. Default: None.
    - `inputs`: factors for the inputs, of shape `(..., *inputs)`, typically used in feed-forward layers.
        Default: None.
    - `channels`: factors for all input channels of a convolution, of shape `(..., channels)`. (A grouped
        convolution's kernel only has a single group's channels.) Default: None.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

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
    """The scaled bias of a layer with scaled outputs.

    Its factors are trained separately from the weight's, even though PEFT ties them.

    **Arguments:**

    - `w`: the layer's bias, which is frozen.
    - `factor`: a factor for each bias element.
    """

    factor: Any

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.w.shape, self.w.dtype)

    def materialise(self) -> jax.Array:
        return multiply(materialise(self.base), self.factor)

    def merged(self) -> jax.Array:
        """Returns the product, differentiable with respect to both the bias and the factor."""
        return multiply(materialise(self.w), self.factor)

    def unmerged(self, weight: jax.Array) -> "ScaledBias":
        return self.with_base((weight / self.factor).astype(weight.dtype))


@starts
def ia3(x: Weight, *, of_inputs: bool | None = None, bias: Any = None) -> IA3Array:
    """Initialises with factors of one, for either the outputs or (if `of_inputs`) the inputs.

    By default, this scales the inputs if there is a bias. (PEFT would use the same factors for the outputs
    and the bias, but we can't tie parameters between two arrays.)
    """
    if not (bias is not None if of_inputs is None else of_inputs):
        return x.on(IA3Array, outputs=x.ones(*x.out_shape))
    if x.layout.kind == "grouped conv":
        raise ValueError(
            "The kernel of a grouped convolution does not tell how many channels it is applied to. Let (IA)³ "
            "adapt its outputs (`of_inputs=False`)."
        )
    if x.layout.is_conv:
        return x.on(IA3Array, channels=x.ones(x.in_shape[0]))
    return x.on(IA3Array, inputs=x.ones(*x.in_shape))


def _read(layer: Layer) -> Any:
    modules = layer.option("feedforward_modules")
    if isinstance(modules, str):
        of_inputs = fullmatch(modules, layer.name)
    else:
        of_inputs = any(layer.name.endswith(name) for name in modules)
    ones = (1,) * len(layer.window)
    if of_inputs and ones:
        shape, size = layer.shape_of("factor"), layer.in_shape[0]
        channels = shape[1] if len(shape) > 1 else 0
        if channels % size or (channels != size and layer.layout.kind == "conv"):
            raise layer.error("factor", f"expected shape {(1, size, *ones)}; found {shape}")
        return layer.on(IA3Array, channels=layer.read("factor", 1, channels, *ones).reshape(-1))
    if of_inputs:
        return layer.on(IA3Array, inputs=layer.read("factor", 1, layer.inputs).reshape(layer.in_shape))
    factor = layer.read("factor", *((1, layer.outputs, *ones) if ones else (layer.outputs, 1)))
    array = layer.on(IA3Array, outputs=factor.reshape(layer.out_shape))
    return array, None if layer.bias is None else ScaledBias(layer.bias, factor.reshape(layer.bias.shape))


def _write(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, bias = layer.array, layer.bias
    of_inputs = x.inputs is not None or x.channels is not None
    scales_bias = isinstance(bias, ScaledBias) or (bias is None and not of_inputs)
    if of_inputs == (x.outputs is not None) or of_inputs == scales_bias:
        raise ValueError(
            f"PEFT's (IA)³ has factors of the inputs of {layer.name}, or of its outputs and its bias; here "
            f"are factors of {_named(x, bias)}. Adapt the inputs of layers with a bias (`of_inputs=True`), "
            "or merge the model instead."
        )
    if x.inputs is not None and math.prod(layer.window) > 1:
        raise ValueError(
            f"PEFT's (IA)³ has a factor for each channel that {layer.name} is applied to (`channels`); here "
            "is one for each place of the window, too."
        )
    factor: Any = x.outputs if not of_inputs else x.inputs if x.channels is None else x.channels
    if isinstance(bias, ScaledBias) and not np.array_equal(np.ravel(bias.factor), np.ravel(factor)):
        raise ValueError(
            f"PEFT's (IA)³ has the same factors for the outputs and the bias of {layer.name}; here they "
            "differ, since they were trained apart. Merge the model instead."
        )
    ones = (1,) * len(layer.window)
    shape = (1, -1, *ones) if ones or of_inputs else (-1, 1)
    return {"factor": factor.reshape(shape)}, {"feedforward": of_inputs}


def _named(x: Any, bias: Any) -> str:
    there = {"outputs": x.outputs is not None, "inputs": not (x.inputs is None and x.channels is None),
             "the bias": isinstance(bias, ScaledBias)}  # fmt: skip
    return ", ".join(name for name, found in there.items() if found) or "nothing"


def _settle(layers: Any, options: dict[str, dict[str, Any]], targets: Sequence[str]) -> dict[str, Any]:
    of_inputs = [name for name, own in options.items() if own.pop("feedforward")]
    others = [name for name in layers if name not in of_inputs]
    # In PEFT, these must be some of the names in `target_modules`. It compares them with the ends of names,
    # wherever a component begins.
    named = [x for x in targets if any(name == x or name.endswith(f".{x}") for name in of_inputs)]
    if not any(name.endswith(x) for x in named for name in others):
        return {"feedforward_modules": named}
    return {"feedforward_modules": sorted(of_inputs), "target_modules": sorted(layers)}


_NAMES = Option(
    [], "a regular expression or a list of names",
    lambda x: isinstance(x, str) or (isinstance(x, list) and all(isinstance(name, str) for name in x)),
)  # fmt: skip


IA3 = Method(
    "IA3", IA3Array, ia3,
    parts={"factor": ".ia3_l"},
    options={"feedforward_modules": _NAMES, "fan_in_fan_out": flag()},
    read=_read, write=_write, settle=_settle, kinds=("linear", "matrix", "conv", "grouped conv"),
    informative=("init_ia3_weights",),
)  # fmt: skip
