"""Adapter initialisations. Some also move a part of the base into the adapter.

Either way, the adapted array is initially equal to the original weight.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ...core.values import is_value
from .array import LoraArray
from .matrices import as_array, as_matrix, halves, in_size, scaling_of, svd, with_factors

# Called with the weight's name, the weight with a zero adapter, and a key. Returns the initialised adapter.
Init = Callable[[str, LoraArray, Any], LoraArray]


def initialise(init: str | Init, kind: str | None, name: str, lora: LoraArray, key: Any) -> LoraArray:
    """Initialises the adapter. `name` is the weight's name, and `kind` the kind of layer."""
    out = _initialised(init, kind, name, lora, key)
    return out if out.w is lora.w else out.replace(taken=taken_by(init, out))


def taken_by(init: str | Init, lora: LoraArray) -> tuple[Any, ...]:
    """Returns a record of what `init` subtracted from the base for this adapter.

    If the initialisation is deterministic, this record and the original base suffice to recompute it.
    """
    name = "a function" if callable(init) else init
    sizes = tuple(lora.w.shape[axis] for axis in (*lora.out_axes, *lora.in_axes))
    return name, lora.rank, _known_scaling(lora), lora.out_axes, lora.in_axes, sizes


def _known_scaling(lora: LoraArray) -> float | tuple[float, ...] | None:
    """Returns the scaling as a Python number, or a tuple for a stack of matrices. None if it's traced."""
    if isinstance(lora.alpha, jax.core.Tracer):
        return None
    divisor = math.sqrt(lora.rank) if lora.rslora else lora.rank
    found = [alpha / divisor for alpha in np.ravel(lora.alpha).tolist()]
    return found[0] if len({*found}) == 1 else tuple(found)


def _initialised(init: str | Init, kind: str | None, name: str, lora: LoraArray, key: Any) -> LoraArray:
    if callable(init):
        return init(name, lora, key)
    if init == "kaiming" and kind == "embedding":
        return _embedding(name, lora, key)
    if init in _INITS:
        return _INITS[init](name, lora, key)
    if found := re.fullmatch(r"pissa_niter_(\d+)", init):
        return _pissa(name, lora, key, iterations=int(found[1]))
    raise ValueError(
        f"init must be one of {', '.join(map(repr, _INITS))}, 'pissa_niter_<number>', or a callable; "
        f"found {init!r}."
    )


# -- initialisations leaving the base unchanged: the adapter adds zero


def _kaiming(name: str, lora: LoraArray, key: Any) -> LoraArray:
    """Draws `a` uniformly within ±1/sqrt(in), like PEFT's `kaiming_uniform_(a=sqrt(5))`. Sets `b` to zero."""
    bound = in_size(lora) ** -0.5
    return lora.replace(a=jax.random.uniform(key, lora.a.shape, lora.a.dtype, -bound, bound))


def _gaussian(name: str, lora: LoraArray, key: Any) -> LoraArray:
    """Draws `a` from a normal distribution with standard deviation 1/rank. Sets `b` to zero."""
    return lora.replace(a=jax.random.normal(key, lora.a.shape, lora.a.dtype) / lora.rank)


def _embedding(name: str, lora: LoraArray, key: Any) -> LoraArray:
    """Sets `a` to zero, and draws `b` from a normal distribution, like PEFT for embeddings."""
    return lora.replace(b=jax.random.normal(key, lora.b.shape, lora.b.dtype))


# -- initialisations moving a part of the base into the adapter: their sum is unchanged


def _pissa(name: str, lora: LoraArray, key: Any, iterations: int | None = None) -> LoraArray:
    """Uses the principal singular vectors and values. With `iterations`, these come from a randomised SVD.

    Meng et al., PiSSA (2024).
    """
    w = dense_base(name, lora, "init='pissa'")
    u, s, vt = svd(w, lora.rank, None if iterations is None else (key, iterations))
    # The adapter is going to be multiplied by the scaling, so divide by it.
    return _moved(lora, w, *halves(u, s / scaling_of(lora, s), vt))


def _olora(name: str, lora: LoraArray, key: Any) -> LoraArray:
    """Uses the first columns of Q and the first rows of R. Büyükakyüz, OLoRA (2024)."""
    w = dense_base(name, lora, "init='olora'")
    q, r = jnp.linalg.qr(w)
    # As in PEFT, the factors aren't divided by the scaling.
    return _moved(lora, w, r[..., : lora.rank, :], q[..., :, : lora.rank])


def dense_base(name: str, lora: LoraArray, init: str) -> jax.Array:
    """Returns the base as a matrix. Raises a `ValueError` if no part of it can be subtracted."""
    if is_value(lora.w):
        raise ValueError(
            f"{init} takes a part of the base into the adapter, and {name} is of type "
            f"{type(lora.w).__name__}. Adapt the model first, then quantise it."
        )
    w = as_matrix(lora, lora.w)
    if lora.rank > min(w.shape[-2:]):
        raise ValueError(
            f"{init} needs a rank of at most min(out, in) = {min(w.shape[-2:])} for {name}; "
            f"found {lora.rank}."
        )
    return w


def _moved(lora: LoraArray, w: jax.Array, a: jax.Array, b: jax.Array) -> LoraArray:
    """Subtracts `scaling * b @ a` from the base, and uses `a` and `b` as the adapter."""
    taken = jnp.matmul(b, a, precision="highest")
    taken = scaling_of(lora, taken, 2) * taken
    return with_factors(lora, a, b).with_base(as_array(lora, w - taken))


_INITS: dict[str, Init] = {"kaiming": _kaiming, "gaussian": _gaussian, "pissa": _pissa, "olora": _olora}
