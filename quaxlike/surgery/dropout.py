"""Dropout on adapters."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.lora import LoraArray
from .trees import named_arrays, replace


@checked
def with_dropout_key(model: PyTree, key: Any) -> PyTree:
    """Switches the dropout of a model's adapters on or off.

    The mask depends on the key alone: pass a new key at each step, and with `jax.vmap` one key per sample. An
    adapter that is used several times in a call drops the same inputs each time.

    **Arguments:**

    - `model`: a model adapted with `dropout=`.
    - `key`: a PRNG key, or None to switch dropout off.

    **Returns:**

    The model, with a separate key for each adapter.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        model = ql.loraify(mlp, rank=4, dropout=0.1, key=jax.random.key(1))
        ql.quaxify(ql.with_dropout_key(model, jax.random.key(2)))(jnp.ones(2))
        ```
    """
    loras = {name: x for name, x in named_arrays(model).items() if isinstance(x, LoraArray) and x.dropout > 0}
    if key is None:
        return replace(model, {name: x.replace(key=None) for name, x in loras.items()})
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    keys = jax.random.split(key, max(1, len(loras)))
    new = {}
    for (name, x), k in zip(loras.items(), keys, strict=False):
        n_batch = x.ndim - len(x.out_axes) - len(x.in_axes)
        if n_batch:  # one for each of stacked layers
            batch = [size for i, size in enumerate(x.shape) if i - x.ndim not in (*x.out_axes, *x.in_axes)]
            k = jax.random.split(k, tuple(batch))
        new[name] = x.replace(key=k)
    return replace(model, new)
