"""`loraify`: adds low-rank adapters to a model's weights."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._checked import checked
from .._patterns import PatternError, matches_layer, value_for
from ..arrays.gradients import trained_if
from ..arrays.layout import Layout
from ..arrays.lora import LoraArray, LoraBias, TrainableArray, in_float32, row_norm
from ..arrays.lora.inits import Init, initialise
from ..arrays.lora.matrices import as_matrix
from ..core.values import is_value, materialise
from .adapt import adapters_on, require_trainable, weights_to_adapt
from .records import Layouts, Record, require_layout
from .select import Where
from .trees import (
    bias_of,
    biases_beside,
    is_bias,
    layer_of,
    listing,
    map_arrays,
    named_arrays,
    path_of,
    replace,
    suggestion,
)

_OPTIONS = ("rank", "alpha", "rank_pattern", "alpha_pattern", "modules_to_save", "bias", "invocation_tokens")
_FLAGS = ("rslora", "dora", "lora_bias", "train_base")


@checked(options=_OPTIONS + _FLAGS)
def loraify(
    model: PyTree,
    *,
    rank: int,
    alpha: float | int | None = None,
    where: Where = "all-linear",
    key: Any,
    init: str | Init = "kaiming",
    rslora: bool = False,
    dora: bool = False,
    dropout: float | int = 0.0,
    rank_pattern: Mapping[str, int] = {},
    alpha_pattern: Mapping[str, float | int] = {},
    exclude: str | Sequence[str] = (),
    modules_to_save: Sequence[str] = (),
    bias: Literal["none", "all", "lora_only"] = "none",
    lora_bias: bool = False,
    invocation_tokens: Sequence[int] = (),
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] = (),
    fan_in_fan_out: bool = False,
    layout: Layouts = None,
    train_base: bool = False,
    dtype: Any = None,
) -> PyTree:
    """Adds low-rank adapters to a model's weights, leaving everything else unchanged.

    Call the result through [`quaxlike.quaxify`][], and select the leaves to train with
    [`quaxlike.trainable`][]. Tied weights (the same array object) share a single adapter.

    **Arguments:**

    - `model`: any pytree. Weights can be Values: for example, 4-bit weights give QLoRA.
    - `rank`: the rank of the adapters. As in PEFT, this issues a warning if it exceeds both of a weight's
        dimensions: the adapter then has more parameters than the weight.
    - `alpha`: adapters are scaled by `alpha / rank`. Default: `rank`.
    - `where`: which weights to adapt, as in [`quaxlike.select`][]. Biases and norms are skipped. Default:
        every linear layer.
    - `key`: a PRNG key used to initialise the adapters.
    - `init`: `"kaiming"` or `"gaussian"`, for adapters that initially add zero; `"pissa"`, `"pissa_niter_4"`
        (randomised, with 4 iterations) or `"olora"`, to move part of the weight into the adapter; or the
        result of [`quaxlike.loftq`][] or [`quaxlike.eva`][]. Default: `"kaiming"`.
    - `rslora`: whether to scale by `alpha / sqrt(rank)` instead. Default: False.
    - `dora`: whether to train the norm of each row separately from its direction. Default: False.
    - `dropout`: the dropout rate for the adapter inputs. This only changes the result if the adapters have a
        key: pass one at every training step with [`quaxlike.with_dropout_key`][]. Training without a key
        issues a warning. Default: 0.
    - `rank_pattern`, `alpha_pattern`: override the rank and alpha for particular layers. Keys are the last
        components of layer names, or regular expressions for them. If several keys match, then the first is
        used.
    - `exclude`: layers to leave out. Either a regular expression for the whole name, or a sequence of names
        or of their last components.
    - `modules_to_save`: modules to train directly, given by the last components of their names. As in
        PEFT, the head of a classifier is always among them, unless `where` or `exclude` names it.
    - `bias`: which biases to train: `"all"`, `"lora_only"` (only in adapted layers) or `"none"`. Default:
        `"none"`.
    - `lora_bias`: whether to add a bias to each adapter. This is added to the bias of the layer, so it isn't
        supported for embeddings, recurrent cells, and convolutions without a bias. Default: False.
    - `invocation_tokens`: makes activated LoRAs, acting only on the tokens from the last occurrence of this
        sequence onwards, as found by [`quaxlike.activate`][]. Default: adapters act on all tokens.
    - `trainable_token_indices`: tokens to train in the embedding called `embed_tokens`, or a mapping from
        embedding names to tokens. Default: none.
    - `fan_in_fan_out`: whether to treat matrices as `(in, out)`, as in GPT-2, instead of `(out, in)` if
        nothing else is known about them. Default: False.
    - `layout`: layouts that can't be inferred from the layer or the name, as in [`quaxlike.layouts`][].
        Default: none.
    - `train_base`: whether to train the weights themselves as well. These must not be quantised, unless you
        call [`quaxlike.train_scales`][] first. Default: False.
    - `dtype`: the dtype of the adapters. Default: the weight's dtype, or float32 for 16-bit weights.

    **Returns:**

    The model with each weight replaced by a [`quaxlike.LoraArray`][], or by an
    [`ALoRAArray`][quaxlike.adapters.ALoRAArray] if `invocation_tokens` are given.

    **Raises:**

    `ValueError` if a pattern matches nothing (the message includes close matches), if a weight already has an
    adapter, if a weight's layout is unknown, if `bias` or `lora_bias` finds no bias, if a weight in
    `modules_to_save` or with `train_base` is quantised and its scales aren't trained, or if an option is
    incompatible with `invocation_tokens`.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 64, depth=2, key=jax.random.key(0))
        adapted = ql.loraify(
            mlp, rank=4, key=jax.random.key(1), rank_pattern={"layers.0": 2}
        )
        ql.quaxify(adapted)(jnp.ones(2))
        ```

    Conventions and option names follow PEFT.
    """
    if not isinstance(init, str) and not callable(init):
        raise TypeError(
            f"loraify takes the name of an init, or the result of loftq or eva, as init; found {init!r}."
        )
    if invocation_tokens:
        _check_activated(init=init, dora=dora, lora_bias=lora_bias)
    model, targets, saved = weights_to_adapt(
        model, where, exclude, layout, fan_in_fan_out=fan_in_fan_out,
        modules_to_save=modules_to_save, trainable_token_indices=trainable_token_indices,
    )  # fmt: skip
    arrays = {name: record.array for name, record in targets.items()}
    checked_patterns("rank_pattern", rank_pattern, arrays)
    checked_patterns("alpha_pattern", alpha_pattern, arrays)
    above: dict[str, Any] = {}

    def made(name: str, w: Any, layout: Layout, key: Any) -> LoraArray:
        r = value_for(rank_pattern, layer_of(name), rank)
        shape, batch = tuple(w.shape), len(layout.batch_shape(tuple(w.shape)))
        if train_base:
            require_trainable(name, w)
        if all(r > math.prod(sizes(shape)[batch:]) for sizes in (layout.out_shape, layout.in_shape)):
            above[name] = w
        lora = blank(
            w, layout, r, dtype=dtype,
            alpha=value_for(alpha_pattern, layer_of(name), r if alpha is None else alpha),
            rslora=rslora, dropout=dropout, gradients=trained_if(train_base),
        )  # fmt: skip
        lora = initialise(init, layout.kind, name, lora, key)
        return with_magnitude(lora) if dora else lora

    adapters = adapters_on(targets, key, made)
    if above:
        warnings.warn(
            f"The rank is above both sizes of {listing(above)}: such an adapter has more parameters than "
            "the weight, and changes it no further than a smaller one. Set a lower `rank`, or one for these "
            "alone in `rank_pattern`.",
            stacklevel=3,  # beyond `checked`
        )
    extras = with_trained_extras(replace(model, adapters), targets, adapters, saved, bias, lora_bias)
    if not invocation_tokens:
        return extras
    from ..adapters import ALoRAArray  # imports all adapters; few programs need them

    activated = map_arrays(lambda _, lora: ALoRAArray.of(lora, invocation_tokens), adapters)
    return replace(extras, activated)


def _check_activated(**options: Any) -> None:
    """Raises `ValueError` for options that also affect the tokens before the invocation.

    Their cached keys and values are reused, so an activated LoRA must leave them unchanged.
    """
    found = next((name for name in ("dora", "lora_bias") if options[name]), None)
    if options["init"] not in ("kaiming", "gaussian"):
        found = f"init={options['init']!r}"
    if found:
        raise ValueError(
            f"loraify takes no {found} with invocation_tokens: it would change what tokens before these see."
        )


def blank(w: Any, layout: Layout, rank: int, *, dtype: Any, **options: Any) -> LoraArray:
    """Creates an adapter on `w` with both factors zero, to be initialised afterwards."""
    out_axes, in_axes, batch = layout.out_axes, layout.in_axes, layout.batch_shape(tuple(w.shape))
    dtype = in_float32(w.dtype) if dtype is None else dtype
    a = jnp.zeros((*batch, rank, *(w.shape[i] for i in in_axes)), dtype)
    b = jnp.zeros((*batch, *(w.shape[i] for i in out_axes), rank), dtype)
    return LoraArray(w, a, b, out_axes=out_axes, in_axes=in_axes, **options)


def with_magnitude(lora: LoraArray) -> LoraArray:
    """Turns a LoRA into a DoRA by adding the row norms of its weight as a parameter.

    This always computes the norms of the equivalent matrix: along the weight's own axes, they wouldn't be
    bitwise identical for every layout.
    """
    batch, *out = lora.b.shape[: -1 - len(lora.out_axes)], *lora.b.shape[-1 - len(lora.out_axes) : -1]
    matrix = LoraArray(
        as_matrix(lora, materialise(lora.w)),
        lora.a.reshape(*batch, lora.rank, -1),
        lora.b.reshape(*batch, math.prod(out), lora.rank),
        alpha=lora.alpha, rslora=lora.rslora,
    )  # fmt: skip
    norm, _ = row_norm(matrix)
    return lora.replace(magnitude=norm.reshape(lora.b.shape[:-1]).astype(lora.a.dtype))


def with_trained_extras(
    model: PyTree,
    targets: Mapping[str, Record],
    adapters: Mapping[str, LoraArray],
    saved: Mapping[str, Any],
    bias: str,
    lora_bias: bool,
) -> PyTree:
    """Adds the arrays trained beside the adapters, such as biases, to an adapted model."""
    arrays = named_arrays(model)
    beside = {**saved}
    if bias != "none":
        trained = _biases_to_train(arrays, adapters, bias)
        beside |= {name: TrainableArray(arrays[name]) for name in trained if name not in beside}
    if lora_bias:
        empty = _empty_leaves(model)
        for name, lora in adapters.items():
            own = _own_bias(name, targets[name], empty)
            w = beside.get(own, arrays.get(own))
            shape = lora.b.shape[:-1] if w is None else w.shape  # A convolution's bias has axes of size 1.
            beside[own] = LoraBias(w, jnp.zeros(shape, lora.b.dtype), lora.scaling)
    return replace(model, beside)


def _biases_to_train(arrays: Mapping[str, Any], adapters: Mapping[str, Any], bias: str) -> list[str]:
    """Returns the names of the biases selected by the option `bias`, either "all" or "lora_only"."""
    if bias == "all":
        names = [name for name in arrays if is_bias(name)]
    else:
        names = [name for weight in adapters for name in biases_beside(weight, arrays)]
    names = [name for name in names if jnp.issubdtype(arrays[name].dtype, jnp.floating)]
    if not names:
        where = "the model" if bias == "all" else "the adapted layers"
        raise ValueError(f"bias={bias!r} trains biases, and there are none in {where}, {listing(arrays)}.")
    return names


def _own_bias(name: str, record: Record, empty: set[str]) -> str:
    """Returns the name of the bias that an adapter can add its own to, or of the `None` in its place.

    `empty` are the names of all `None` leaves.

    **Raises:** `ValueError` if the layer doesn't read a bias there.
    """
    if record.bias is not None:
        return record.bias
    # A linear layer reads any bias but None, so one can be put there. A convolution checks another field, and
    # a recurrent cell adds the same bias to the products with two weights.
    is_linear = require_layout(name, record).kind in ("linear", "matrix")
    missing = bias_of(name, empty)
    if is_linear and missing is not None:
        return missing
    raise ValueError(
        f"lora_bias=True adds to the bias of each adapted layer; {listing({name: record.array})} has none "
        "that its layer would read. Leave it out with `exclude`, or do without `lora_bias`."
    )


def _empty_leaves(model: PyTree) -> set[str]:
    """Returns the names of all `None` leaves, for `replace`."""
    leaves = jtu.tree_leaves_with_path(model, is_leaf=lambda x: x is None or is_value(x))
    return {path_of(path, model) for path, leaf in leaves if leaf is None}


def checked_patterns(option: str, patterns: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """Raises `ValueError` if a pattern matches no adapted array, e.g. due to a typo."""
    for pattern in patterns:
        try:
            found = any(matches_layer(pattern, layer_of(name)) for name in arrays)
        except PatternError as error:
            raise ValueError(f"{pattern!r} in {option}: {error}.") from None
        if not found:
            hint = suggestion(pattern, arrays)
            raise ValueError(f"{pattern!r} in {option} matches none of the adapted layers. {hint}")
