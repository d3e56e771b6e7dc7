"""`merge` and `unmerge`: adapters added into the weights, and taken out of them again."""

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
    """Adds all adapters of a model into its weights.

    **Arguments:**

    - `model`: the result of [`quaxlike.loraify`][], trained or not.
    - `exact`: for quantised weights, the sum of `x xᵀ` over the inputs of their layers, from
        [`quaxlike.input_moments`][] on the adapted model. GPTQ then chooses codes and scales for which the
        outputs are as close to those of base and adapter as codes allow. Default: the nearest codes.

    **Returns:**

    A model of the same structure as before it was adapted. A quantised weight is quantised again, with a
    warning if `exact` lacks it, since that rounds what the adapter has learned. A model without adapters is
    returned as it is, with a warning.

    **Raises:**

    `ValueError` if an adapter has batch axes that its weight does not have: several adapters on one base,
    of which [`quaxlike.choose_adapter`][] picks one.

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
    """Takes adapters out of the weights that they were merged into.

    **Arguments:**

    - `merged`: the result of [`quaxlike.merge`][].
    - `adapted`: the model with the adapters that were merged.

    **Returns:**

    `adapted`, over the weights of `merged` without the adapters; exact up to rounding.

    **Raises:**

    `ValueError` if `merged` is not `adapted` with its adapters merged: if the arrays have different names, a
    weight is not near the sum of base and adapter, or anything else differs. Traced arrays cannot be
    compared. Also if the type of an adapter does not say how it is taken out (`AdaptedArray.unmerged`).
    """
    weights = named_arrays(merged)
    adapters = {name: x for name, x in named_arrays(adapted).items() if isinstance(x, AdaptedArray)}
    if unknown := [name for name in adapters if name not in weights]:
        raise ValueError(f"The merged model has no {', '.join(unknown)}, which the adapted model has.")
    bare = {name: _unmerged(name, weights[name], x) for name, x in adapters.items()}
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
    """Raises `ValueError` unless `merged` is `adapted` with its adapters merged, up to rounding; those that
    are in place of a weight, and are not taken out of it, must be equal."""
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
    """Whether a weight is the sum of base and adapter, up to rounding; True if that is not known."""
    if tuple(weight.shape) != tuple(lora.shape):
        return False
    dense, whole = (jnp.asarray(x, jnp.float32) for x in (materialise(weight), lora.merged()))
    if isinstance(dense, jax.core.Tracer) or isinstance(whole, jax.core.Tracer):
        return True
    norm = lambda x: jnp.linalg.norm(jnp.nan_to_num(x))
    eps = max(float(jnp.finfo(x.dtype).eps) for x in (weight, lora))
    allowed = 8 * eps * norm(jnp.abs(dense) + jnp.abs(whole))
    if isinstance(weight, AbstractQuantizedArray):  # the nearest codes, or those that `exact` chose
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
        return whole.astype(base.dtype)  # which parts of another dtype may have widened
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
