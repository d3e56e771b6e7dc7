"""`balance`: rescales layer inputs before quantisation (AWQ).

We multiply a weight's columns by some factors, and the rows in the preceding layer by their inverses. These
cancel out, so the model still computes the same function.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PyTree

from .._checked import checked
from ..core.values import is_value, materialise
from .quantize import quantize_array
from .records import Layouts, records_of, require_layout
from .trees import bias_of, layer_of, replace, suggestion

#: Maps each layer to the layers that consume its outputs, for decoders which use the same names as Llama.
#: (This includes Mistral, Qwen2 and Qwen3, but not Phi-3.) Note that a factor can be folded into any norm
#: that has a weight. In a gated unit, it must be folded into the half without the activation, because it
#: wouldn't commute with a nonlinearity.
LLAMA_FOLDS: Mapping[str, Sequence[str]] = {
    r"(.*)\.input_layernorm": [rf"\1.self_attn.{name}_proj" for name in "qkv"],
    r"(.*)\.post_attention_layernorm": [r"\1.mlp.gate_proj", r"\1.mlp.up_proj"],
    r"(.*)\.mlp\.up_proj": [r"\1.mlp.down_proj"],
}

_STEPS = 20


@checked
def balance(
    model: PyTree,
    moments: Mapping[str, ArrayLike],
    scheme: str = "uint4_block",
    *,
    activations: str | None = None,
    folds: Mapping[str, Sequence[str]] | None = None,
    layout: Layouts = None,
    **scheme_options: Any,
) -> PyTree:
    """Rescales layer inputs to reduce the quantisation error of [`quaxlike.quantize`][] (AWQ).

    Columns that multiply large activations are scaled up, and the rows in the preceding layer are scaled down
    by the same factors. This doesn't change the function that the model computes, but makes the quantisation
    error smaller for the columns that matter most. Afterwards, you should quantise the model with the same
    scheme. If you also want to calibrate, then make sure to measure the moments again on the balanced model.

    **Arguments:**

    - `model`: any pytree with dense weights.
    - `moments`: for each weight, the sum of `x xᵀ` over the inputs `x` of its layer, from
        [`quaxlike.input_moments`][].
    - `scheme`, `scheme_options`: as in [`quaxlike.quantize`][]. The factors are chosen to minimise the
        rounding error of this scheme. Default: `"uint4_block"`.
    - `activations`: as in [`quaxlike.quantize`][]. If `"int8"`, then the rounding error of the inputs is
        taken into account as well. Default: the inputs are not rounded.
    - `folds`: a mapping from each layer to the layers that consume its outputs. Keys are regular expressions
        that must match the whole name, and values can refer to their groups. There can only be elementwise
        operations in between, and the outputs must not be used anywhere else. Keys should match either linear
        layers or norms that multiply by a one-dimensional `weight`. Default: the result of `model.folds()` if
        there is such a method (e.g. for [`quaxlike.lm.models.Decoder`][]), and otherwise
        `quaxlike.surgery.balance.LLAMA_FOLDS`.
    - `layout`: as in [`quaxlike.quantize`][].

    **Returns:**

    The model with rescaled weights.

    **Raises:**

    `ValueError` if no layer matches `folds`, if a layer in `folds` is missing or not dense, if sizes don't
    match, or if a weight is missing from `moments`.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        model = [eqx.nn.LayerNorm(64), eqx.nn.Linear(64, 64, key=jax.random.key(0))]
        run = lambda model, x: jax.vmap(lambda x: model[1](model[0](x)))(x)
        x = jax.random.normal(jax.random.key(1), (32, 64))
        moments = ql.input_moments(run)(model, x)
        balanced = ql.balance(model, moments, "int4", folds={"0": ["1"]})
        quantised = ql.quantize(balanced, "int4")
        ```

    Lin et al., AWQ (2023), <https://arxiv.org/abs/2306.00978>. Note that we use the root mean square of the
    activations rather than their mean magnitude. If `activations` is set then this corresponds to SmoothQuant
    (Xiao et al., 2023).
    """
    if folds is None:
        folds = model.folds() if hasattr(model, "folds") else LLAMA_FOLDS
    records = records_of(model, layout)
    arrays = {name: record.array for name, record in records.items()}
    layers = {layer_of(name): name for name in arrays if layer_of(name) != name}
    pairs: list[tuple[str, list[str]]] = []
    for pattern, laters in folds.items():
        matches = (re.fullmatch(pattern, layer) for layer in layers)
        pairs += [(match[0], [match.expand(later) for later in laters]) for match in matches if match]
    if not pairs:
        raise ValueError(f"No layer of the model matches `folds`: {', '.join(folds)}.")
    new: dict[str, Any] = {}
    for layer, laters in pairs:
        for name in (layer, *laters):
            if name not in layers:
                known_layers = {layer: arrays[weight] for layer, weight in layers.items()}
                raise ValueError(
                    f"`folds` names {name}, which is not a layer. {suggestion(name, known_layers)}"
                )
        into = {name: require_layout(name, records[name]) for name in (layers[x] for x in laters)}
        columns = {name: _columns(name, arrays[name], axes.in_axes) for name, axes in into.items()}
        moment = _moment_of(columns, moments)
        size = len(moment)

        def cost(factor: np.ndarray, columns: Any = columns, into: Any = into, moment: Any = moment) -> float:
            total = 0.0
            for name, w in columns.items():
                scaled = _scaled(arrays[name], factor, into[name].in_axes[0])
                rounded = materialise(quantize_array(name, scaled, scheme, into[name], **scheme_options))
                error = _columns(name, rounded, into[name].in_axes) / factor - w
                total += float(np.sum(error @ moment * error))
                if activations == "int8":  # We assume that the largest input is three times the RMS.
                    step = 3 / 127 * np.max(magnitude / factor)
                    total += float(step**2 / 12 * np.sum((w * factor) ** 2))
            return total

        magnitude = np.sqrt(np.maximum(np.diag(moment), np.finfo(np.float32).tiny))
        powers = [magnitude ** (i / _STEPS) for i in range(_STEPS)]
        best = min((p / np.sqrt(p.max() * p.min()) for p in powers), key=cost)
        for name, axes in into.items():
            new[name] = arrays[name] = _scaled(arrays[name], best, axes.in_axes[0])
        earlier = layers[layer]
        for name in {earlier, bias_of(earlier, arrays)} - {None}:
            axis = -1
            if arrays[name].ndim > 1:
                axis = require_layout(name, records[name]).out_axes[0]
            if is_value(arrays[name]) or arrays[name].shape[axis] != size:
                raise ValueError(
                    f"{name} must be a dense array with {size} outputs, the inputs of {', '.join(laters)}; "
                    f"found {type(arrays[name]).__name__} of shape {tuple(arrays[name].shape)}."
                )
            new[name] = arrays[name] = _scaled(arrays[name], 1 / best, axis)
    return replace(model, new)


def _columns(name: str, w: Any, in_axes: tuple[int, ...]) -> np.ndarray:
    """Returns a dense matrix as a float64 array of shape `(out, in)`."""
    if is_value(w) or w.ndim != 2 or len(in_axes) != 1:
        found = f"of type {type(w).__name__} and shape {w.shape}"
        raise ValueError(f"balance takes dense matrices; {name} is {found}.")
    return np.asarray(jnp.moveaxis(w, in_axes[0], -1), np.float64)


def _moment_of(columns: Mapping[str, np.ndarray], moments: Mapping[str, ArrayLike]) -> np.ndarray:
    """Returns the second moments of the inputs, which all these layers share."""
    for name, w in columns.items():
        if name not in moments:
            raise ValueError(f"balance has no moments for {name}; it has those for {', '.join(moments)}.")
        if np.shape(moments[name]) != (w.shape[1],) * 2:
            found = np.shape(moments[name])
            raise ValueError(f"{name}: moments must have shape {(w.shape[1],) * 2}; found {found}.")
    return np.asarray(moments[next(iter(columns))], np.float64)


def _scaled(x: Any, factor: np.ndarray, axis: int) -> Any:
    shape = [1] * x.ndim
    shape[axis] = -1
    return x * jnp.asarray(factor.reshape(shape), x.dtype)
