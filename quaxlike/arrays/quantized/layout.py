"""What moves a quantised array about without touching its codes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from quaxlike.core.rules import register

from .base import AbstractQuantizedArray


@register("transpose")
def _transpose(w: AbstractQuantizedArray, *, permutation: Sequence[int], **params: Any) -> Any:
    return w.with_axes([w.permutation[axis] for axis in permutation])


@register("convert_element_type")
def _convert_element_type(w: AbstractQuantizedArray, *, new_dtype: Any, **params: Any) -> Any:
    if not jnp.issubdtype(new_dtype, jnp.floating) or params.get("sharding") is not None:
        return NotImplemented
    return dataclasses.replace(w, logical_dtype=jnp.dtype(new_dtype))
