"""Random matrices shared by all layers, as in VeRA and RandLoRA."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays.dot_axes import common_dtype
from ..arrays.layout import Layout
from .random_numbers import Generator
from .record import Layer, Option, Written

SEED = Option(0, "an integer", lambda x: type(x) is int)


def times(x: Any, y: Any) -> Any:
    """Multiplies two arrays, without relying on implicit rank promotion."""
    n = max(x.ndim, y.ndim)
    x, y = (jnp.reshape(z, (*[1] * (n - z.ndim), *z.shape)) for z in (x, y))
    return x * y


def given_matrices(method: str, a: Any, b: Any) -> tuple[Any, Any]:
    if a is None or b is None:
        raise ValueError(
            f"{method} needs both matrices, `a` and `b`, which all layers share. Without either, "
            "`quaxlike.adapt` draws them for all weights that it adapts."
        )
    return a, b


def draws(make: Any, draw: Callable[..., Any]) -> None:
    """Attaches a function `share` to `make`, for `adapt` to draw the shared matrices.

    This happens once, before any adapters are created. The arguments of
    `draw(generator, inputs, outputs, rank, options)` include the maximum number of inputs and outputs over
    all weights, so that the matrices are large enough for each weight.
    """
    defaults = {name: option.default for name, option in inspect.signature(make).parameters.items()}

    def share(weights: Sequence[tuple[Any, Layout]], *, key: Any, **options: Any) -> dict[str, Any]:
        options = defaults | options
        if options["a"] is not None or options["b"] is not None:
            return {}

        def size(w: Any, axes: Any) -> Any:
            return math.prod(w.shape[axis] for axis in axes)

        inputs = max(size(w, layout.in_axes) for w, layout in weights)
        outputs = max(size(w, layout.out_axes) for w, layout in weights)
        seed = options["seed"]
        if seed is None:
            seed = 0 if key is None else int(jax.random.bits(key) >> 1)
        dtype = common_dtype(jax.ShapeDtypeStruct((), jnp.float32), *(w for w, _ in weights))
        a, b = (
            jnp.asarray(x, dtype) for x in draw(Generator(seed), inputs, outputs, options["rank"], options)
        )
        return {"a": a, "b": b, "seed": seed}

    make.share = share


def read_shared(
    part: str, draw: Callable[..., Any], layers: Sequence[Layer], given: Mapping[str, Any]
) -> Any:
    """Returns the shared matrices and their seed.

    The seed is `None` if the file includes the matrices themselves. `part` should be a part with the rank as
    its leading axis, and `draw` is as in `draws`.
    """
    if not layers:
        return None
    options = layers[0].options
    for layer in layers:
        if (found := layer.shape_of(part)[:1]) != (options["r"],):  # Check this before allocating any memory.
            raise layer.error(part, f"the configuration gives rank {options['r']}; found {found}")
    if options["save_projection"]:
        for name in ("a", "b"):
            if name not in given:
                raise layers[0].missing_for_all(name)
        return given["a"], given["b"], None
    seed = options["projection_prng_key"]
    inputs, outputs = max(x.inputs for x in layers), max(x.outputs for x in layers)
    a, b = draw(Generator(seed), inputs, outputs, options["r"], options)
    return jnp.asarray(a), jnp.asarray(b), seed


def write_shared(layers: Sequence[Written], fits: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = [layer.array for layer in layers]
    first = arrays[0]
    for layer, x in zip(layers, arrays, strict=True):
        for name in ("a", "b"):
            mine, own = getattr(first, name), getattr(x, name)
            if mine is not own and not np.array_equal(mine, own):
                raise ValueError(
                    f"PEFT's files hold one pair of random matrices for all layers; {layer.name} and "
                    f"{layers[0].name} have others."
                )
    if first.seed is not None and fits(layers):
        return {}, {"save_projection": False, "projection_prng_key": first.seed}
    return {"a": first.a, "b": first.b}, {"save_projection": True, "projection_prng_key": first.seed or 0}
