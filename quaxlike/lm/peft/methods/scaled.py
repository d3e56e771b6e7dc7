"""(IA)³: factors of outputs or inputs, and of biases."""

import math
from typing import Any

import numpy as np

from ....adapters.scaled import IA3Array, ScaledBias
from ....surgery.patterns import fullmatch
from .method import Layer, Method, Option, Written, flag, short_names


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


def _settle(layers: Any, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    of_inputs = {name for name, own in options.items() if own.pop("feedforward")}
    return {"feedforward_modules": short_names(of_inputs, {*layers})}


_NAMES = Option(
    [], "a regular expression or a list of names",
    lambda x: isinstance(x, str) or (isinstance(x, list) and all(isinstance(name, str) for name in x)),
)  # fmt: skip

IA3 = Method(
    "IA3", IA3Array,
    parts={"factor": ".ia3_l"},
    options={"feedforward_modules": _NAMES, "fan_in_fan_out": flag()},
    read=_read, write=_write, settle=_settle, kinds=("linear", "matrix", "conv", "grouped conv"),
)  # fmt: skip
