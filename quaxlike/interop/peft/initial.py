"""Adapters whose initialisation took a part of the base, in files that do not hold the base.

PEFT takes the part out again when it loads `"pissa"` and `"olora"`, which follow from the base alone. For all
others, and for layers where it does not, the part goes into the file: with `base + taken` for the base that
is adapted, `[a, a'], [b, b']` with `scaling * b' a' = taken` give the same sum on `base`, at twice the rank
(PEFT's `path_initial_model_for_weight_conversion`).
"""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from ..._checked import a_or_an
from ...arrays.lora import RANK, LoraArray, labels
from ...core.values import is_value
from ...surgery.inits import as_matrix, svd, taken_by, with_factors
from ...surgery.trees import named_arrays, replace, suggestion
from .config import CHANGES_BASE

_HINT = (
    "Pass `base`: the model before it was adapted, to put that part into the file; or this model, if its "
    "base is saved as well and the adapter will be loaded on that."
)


def initialisation(adapters: Mapping[str, LoraArray], in_peft: Mapping[str, bool]) -> str | bool:
    """The entry `init_lora_weights` for these adapters, by layer; `in_peft` says for which of them PEFT takes
    a part out of the base.

    Raises `ValueError` if the entry cannot tell what was taken out."""
    names = {str(lora.taken[0]) for lora in adapters.values() if lora.taken is not None}
    if not names:
        return True
    name = next(iter(names)) if len(names) == 1 else None
    for layer, lora in adapters.items():
        is_derivable = name in CHANGES_BASE and in_peft[layer] and lora.taken == taken_by(name, lora)
        if not (is_derivable or (lora.taken is None and not in_peft[layer])):
            raise ValueError(
                f"The initialisations of the adapters ({', '.join(sorted(names))}) changed the base, and a "
                f"file without the base cannot tell how for {layer}. {_HINT}"
            )
    assert name is not None
    return name


def relative_to_base(model: PyTree, base: PyTree) -> PyTree:
    """The model with adapters that give the same weights when they are put on the arrays of `base`."""
    arrays = named_arrays(base)
    new: dict[str, LoraArray] = {}
    for name, lora in named_arrays(model).items():
        if isinstance(lora, LoraArray):
            if name not in arrays:
                raise ValueError(f"`base` has no {name}, which the model adapts. {suggestion(name, arrays)}")
            w = arrays[name]
            new[name] = _relative(name, lora, w.w if isinstance(w, LoraArray) else w)
    return replace(model, new)


def _relative(name: str, lora: LoraArray, w: Any) -> LoraArray:
    if lora.w is w or eqx.tree_equal(lora.w, w) is True:
        return lora.replace(taken=None)
    kind = lambda x: f"{x.dtype} {type(x).__name__ if is_value(x) else 'array'} of shape {x.shape}"
    if is_value(w) or is_value(lora.w) or kind(w) != kind(lora.w):
        raise ValueError(
            f"`base` has {a_or_an(kind(w))} as {name}, and the adapted base is "
            f"{a_or_an(kind(lora.w))}: the file can hold the difference of plain arrays only. Quantise "
            "the model after the adapter is loaded."
        )
    before = as_matrix(lora, w)
    taken = as_matrix(lora, lora.w) - before
    u, s, vt = svd(taken, lora.rank)
    rest = taken - jnp.matmul(u * s[..., None, :], vt, precision="highest")
    share = float(jnp.linalg.norm(rest) / jnp.linalg.norm(before))
    if not share <= 8 * max(float(jnp.finfo(lora.dtype).eps), 1e-6):
        raise ValueError(
            f"`base` and the adapted base differ in {name} by more than an initialisation of rank "
            f"{lora.rank} takes out (the rest is {share:.1g} of the weight)."
        )
    root = jnp.sqrt(s / lora.scaling)
    other = with_factors(lora, root[..., :, None] * vt, u * root[..., None, :])
    _, a_labels, b_labels = labels(lora)
    return lora.replace(
        a=jnp.concatenate([lora.a, other.a], a_labels.index(RANK)),
        b=jnp.concatenate([lora.b, other.b], b_labels.index(RANK)),
        alpha=lora.alpha * (math.sqrt(2) if lora.rslora else 2),
        w=w,
        taken=None,
    )
