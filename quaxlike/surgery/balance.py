"""`balance`: rescales layer inputs before quantisation (AWQ).

A weight's columns are multiplied by factors, and the rows in the preceding layer by their inverses. These
cancel out, so the model still computes the same function.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, PyTree

from .._checked import checked
from ..core.values import is_value, materialise
from .quantize import quantize_array
from .records import Layouts, records_of, require_layout
from .trees import bias_of, layer_of, replace, suggestion

#: Maps each layer to the layers consuming its outputs, for decoders with the same names as Llama. (This
#: includes Mistral, Qwen2 and Qwen3, but not Phi-3.) A factor can be folded into any norm with a weight. It
#: doesn't commute with a nonlinearity, so in a gated unit it goes into the half without the activation.
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

    Columns that multiply large activations are scaled up, and the rows in the preceding layer scaled down by
    the same factors. This doesn't change the model's function, but makes the quantisation error smaller for
    the columns that matter most. Afterwards, quantise the model with the same scheme. To calibrate as well,
    measure the moments again on the balanced model.

    **Arguments:**

    - `model`: any pytree with dense weights.
    - `moments`: for each weight, the sum of `x xᵀ` over the inputs `x` of its layer, from
        [`quaxlike.input_moments`][].
    - `scheme`, `scheme_options`: as in [`quaxlike.quantize`][]. The factors are chosen to minimise the
        rounding error of this scheme. Default: `"uint4_block"`.
    - `activations`: as in [`quaxlike.quantize`][]. If `"int8"`, then the rounding error of the inputs is
        taken into account as well. Default: the inputs are not rounded.
    - `folds`: a mapping from each layer to the layers consuming its outputs. Keys are regular expressions for
        the whole name, and values can refer to their groups. There can only be elementwise operations in
        between, and the outputs must not be used anywhere else. Keys should match either linear layers or
        norms that multiply by a one-dimensional `weight`. Default: `model.folds()` if defined (e.g. for
        [`quaxlike.lm.models.Decoder`][]), and otherwise `quaxlike.surgery.balance.LLAMA_FOLDS`.
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

    Lin et al., AWQ (2023), <https://arxiv.org/abs/2306.00978>. This uses the root mean square of the
    activations rather than their mean magnitude. With `activations`, this corresponds to SmoothQuant (Xiao et
    al., 2023).
    """
    if folds is None:
        folds = model.folds() if hasattr(model, "folds") else LLAMA_FOLDS
    records = records_of(model, layout)
    arrays = {name: record.array for name, record in records.items()}
    layers = {layer_of(name): name for name in arrays if layer_of(name) != name}

    def rounded(name: str, factor: np.ndarray) -> np.ndarray:
        """Rounds a matrix with columns scaled by `factor`, then undoes the scaling."""
        own = require_layout(name, records[name])
        scaled = _scaled(arrays[name], factor, own.in_axes[0])
        dense = materialise(quantize_array(name, scaled, scheme, own, **scheme_options))
        return _columns(name, dense, own.in_axes) / factor

    new: dict[str, Any] = {}
    for layer, consumers in _matched(folds, {layer: arrays[name] for layer, name in layers.items()}):
        weights = [layers[consumer] for consumer in consumers]
        axes = {name: require_layout(name, records[name]).in_axes for name in weights}
        columns = {name: _columns(name, arrays[name], in_axes) for name, in_axes in axes.items()}
        moment = _moment_of(columns, moments)
        factor = _best_factor(columns, moment, rounded, activations)
        for name, in_axes in axes.items():
            new[name] = arrays[name] = _scaled(arrays[name], factor, in_axes[0])
        for name in filter(None, (layers[layer], bias_of(layers[layer], arrays))):
            axis = -1
            if arrays[name].ndim > 1:
                axis = require_layout(name, records[name]).out_axes[0]
            if is_value(arrays[name]) or arrays[name].shape[axis] != len(moment):
                raise ValueError(
                    f"{name} must be a dense array with {len(moment)} outputs, the inputs of "
                    f"{', '.join(consumers)}; found {type(arrays[name]).__name__} of shape "
                    f"{tuple(arrays[name].shape)}."
                )
            new[name] = arrays[name] = _scaled(arrays[name], 1 / factor, axis)
    return replace(model, new)


def _matched(folds: Mapping[str, Sequence[str]], layers: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Returns each layer matched by a pattern in `folds`, and the layers consuming its outputs."""
    found: list[tuple[str, list[str]]] = []
    for pattern, consumers in folds.items():
        for match in filter(None, (re.fullmatch(pattern, layer) for layer in layers)):
            found.append((match[0], [match.expand(consumer) for consumer in consumers]))
    if not found:
        raise ValueError(f"No layer of the model matches `folds`: {', '.join(folds)}.")
    for name in itertools.chain.from_iterable(consumers for _, consumers in found):
        if name not in layers:
            raise ValueError(f"`folds` names {name}, which is not a layer. {suggestion(name, layers)}")
    return found


def _best_factor(
    columns: Mapping[str, np.ndarray],
    moment: np.ndarray,
    rounded: Callable[[str, np.ndarray], np.ndarray],
    activations: str | None,
) -> np.ndarray:
    """Returns the column factors that minimise the error in the outputs of these matrices."""
    rms = np.sqrt(np.maximum(np.diag(moment), np.finfo(np.float32).tiny))

    def cost(factor: np.ndarray) -> float:
        total = 0.0
        for name, w in columns.items():
            error = rounded(name, factor) - w
            total += float(np.sum(error @ moment * error))
            if activations == "int8":  # Assume the largest input is three times the RMS.
                step = 3 / 127 * np.max(rms / factor)
                total += float(step**2 / 12 * np.sum((w * factor) ** 2))
        return total

    powers = [rms ** (i / _STEPS) for i in range(_STEPS)]
    return min((p / np.sqrt(p.max() * p.min()) for p in powers), key=cost)


def _columns(name: str, w: Any, in_axes: tuple[int, ...]) -> np.ndarray:
    """Returns a dense matrix as a float64 array of shape `(out, in)`."""
    if is_value(w) or w.ndim != 2 or len(in_axes) != 1:
        found = f"of type {type(w).__name__} and shape {w.shape}"
        raise ValueError(f"balance takes dense matrices; {name} is {found}.")
    return np.asarray(jnp.moveaxis(w, in_axes[0], -1), np.float64)


def _moment_of(columns: Mapping[str, np.ndarray], moments: Mapping[str, ArrayLike]) -> np.ndarray:
    """Returns the second moments of the inputs shared by these layers."""
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
