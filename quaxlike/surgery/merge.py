"""`merge` and `unmerge`: fold adapters into their weights, and take them out again."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import ArrayLike, PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray, innermost
from ..arrays.quantized import AbstractQuantizedArray
from ..core.values import is_value, materialise
from .calibrate import fit
from .trees import difference, map_arrays, named_arrays, replace


@checked
def merge(model: PyTree, *, exact: Mapping[str, ArrayLike] | None = None) -> PyTree:
    """Merges a model's adapters into its weights, so that inference is as fast as without adapters.

    **Arguments:**

    - `model`: the result of [`quaxlike.loraify`][], typically after training.
    - `exact`: for quantised weights, the sum of `x xᵀ` over the inputs `x` of their layers, as measured by
        [`quaxlike.input_moments`][] on the adapted model. GPTQ then chooses codes and scales that minimise
        the error in the outputs. Default: round to the nearest codes.

    **Returns:**

    A model with the same structure as before it was adapted. Requantising quantised weights rounds off part
    of what the adapter has learned, with a warning for weights not in `exact`. A model without adapters is
    returned unchanged, also with a warning.

    **Raises:**

    `ValueError` if an adapter has batch axes but its weight does not, i.e. if there are several adapters on
    one base. Pick one with [`quaxlike.choose_adapter`][] first.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 64, depth=2, key=jax.random.key(0))
        # an ordinary eqx.nn.MLP
        ql.merge(ql.loraify(mlp, rank=4, key=jax.random.key(1)))
        ```
    """
    requantised: list[str] = []
    adapted = {name: leaf for name, leaf in named_arrays(model).items() if isinstance(leaf, AdaptedArray)}
    if not adapted:
        warnings.warn(
            "merge found no adapters in the model, and returns it as it is. They are there after `loraify`, "
            "`adapt` or `load_adapter`, until they are merged.",
            stacklevel=3,  # beyond `checked`
        )
    out = replace(model, map_arrays(lambda name, x: _merged(name, x, requantised, exact or {}), adapted))
    if requantised:
        warnings.warn(
            f"Adapters were merged into quantised weights, which rounds them: {', '.join(requantised)}. "
            "Keep the adapters apart, or merge into the weights as they were before quantisation.",
            stacklevel=3,  # beyond `checked`
        )
    return out


@checked
def unmerge(merged: PyTree, adapted: PyTree) -> PyTree:
    """Undoes [`quaxlike.merge`][] by subtracting the adapters from the merged weights.

    For example, use this to swap out the adapter in a running model.

    **Arguments:**

    - `merged`: the result of [`quaxlike.merge`][].
    - `adapted`: the model before merging, with its adapters.

    **Returns:**

    `adapted`, with each adapter's base recovered from `merged`. This is exact up to rounding.

    **Raises:**

    `ValueError` if `merged` wasn't obtained by merging `adapted`, i.e. if any weight is not close to its base
    plus its adapter, or if the models differ in any other way. (Traced arrays aren't checked.) Also raised if
    an adapter does not implement `AdaptedArray.unmerged`.
    """
    weights = named_arrays(merged)
    adapters = {name: x for name, x in named_arrays(adapted).items() if isinstance(x, AdaptedArray)}
    if unknown := [name for name in adapters if name not in weights]:
        raise ValueError(f"The merged model has no {', '.join(unknown)}, which the adapted model has.")
    bare = map_arrays(lambda name, x: _unmerged(name, weights[name], x), adapters)
    bare = {name: x for name, x in bare.items() if x is not adapters[name]}
    _check_merged(merged, adapted, adapters, bare.keys(), weights)
    return replace(adapted, bare)


def _check_merged(
    merged: PyTree,
    adapted: PyTree,
    adapters: Mapping[str, Any],
    taken_out: Collection[str],
    weights: Mapping[str, Any],
) -> None:
    """Raises `ValueError` unless `merged` is the result of merging `adapted`, up to rounding.

    Adapters that replace their weight outright (rather than modifying it) don't determine their base. For
    these, the weights must be equal.
    """
    found = None
    for name in taken_out:
        if not _is_near(weights[name], adapters[name]):
            found = f"{name} is not the sum of its base and its adapter"
            break
    without = dict.fromkeys(taken_out)
    beside = {name: x.merged() for name, x in adapters.items() if name not in without}
    found = found or difference(replace(merged, without), replace(adapted, beside | without))
    if found is not None:
        raise ValueError(
            f"unmerge takes a model and what `merge` made of it; they do not belong together: {found}. Pass "
            "the adapted model that was merged."
        )


def _is_near(weight: Any, lora: AdaptedArray) -> bool:
    """Returns whether a weight equals its base plus its adapter, up to rounding.

    This is always true when tracing: values can't be compared then.
    """
    if tuple(weight.shape) != tuple(lora.shape):
        return False
    dense, whole = (jnp.asarray(x, jnp.float32) for x in (materialise(weight), lora.merged()))
    if isinstance(dense, jax.core.Tracer) or isinstance(whole, jax.core.Tracer):
        return True

    def norm(x: Any) -> Any:
        return jnp.linalg.norm(jnp.nan_to_num(x))

    eps = max(float(jnp.finfo(x.dtype).eps) for x in (weight, lora))
    allowed = 8 * eps * norm(jnp.abs(dense) + jnp.abs(whole))
    if isinstance(weight, AbstractQuantizedArray):  # `exact` doesn't necessarily choose the nearest codes.
        allowed += 3 * norm(materialise(weight.requantized(whole)).astype(jnp.float32) - whole)
    return bool(norm(dense - whole) <= allowed)


def _merged(name: str, leaf: AdaptedArray, requantised: list[str], moments: Mapping[str, ArrayLike]) -> Any:
    base = innermost(leaf)
    if base is not None and tuple(leaf.shape) != tuple(base.shape):
        raise ValueError(
            f"{name} has adapters of shape {leaf.shape} on a weight of shape {base.shape}: there are "
            "several of them. Pick one with `quaxlike.choose_adapter`, or combine them with "
            "`quaxlike.combine_adapters`, and merge that."
        )
    whole = leaf.merged()
    if base is None or is_value(whole):
        return whole
    if not is_value(base):
        return whole.astype(base.dtype)  # An adapter with a different dtype may have promoted it.
    if isinstance(base, AbstractQuantizedArray) and name in moments:
        return fit(name, whole, base, moments[name])
    if isinstance(base, AbstractQuantizedArray):
        requantised.append(name)
    return _like(name, whole, base)


def _like(name: str, dense: Any, base: Any) -> Any:
    if isinstance(base, AbstractQuantizedArray):
        return base.requantized(dense)
    out = type(base).promote(dense, base)
    if out is NotImplemented:
        raise ValueError(
            f"{name} cannot be merged: its base is of type {type(base).__name__}, which does not say how a "
            f"dense array becomes one (`{type(base).__name__}.promote`). Materialise the base first."
        )
    return out


def _unmerged(name: str, weight: Any, adapter: AdaptedArray) -> Any:
    if tuple(weight.shape) != tuple(adapter.shape):
        return None
    out = adapter.unmerged(materialise(weight))
    if out is NotImplemented:
        kind = type(adapter)
        raise ValueError(
            f"{name} is of type {kind.__name__}, which does not say how it is taken out of a weight "
            f"(`{kind.__name__}.unmerged`)."
        )
    same = out is adapter or not is_value(weight)
    return out if same else out.with_base(_like("The weight", out.w, weight))
