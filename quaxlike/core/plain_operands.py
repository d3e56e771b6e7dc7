"""Plain operands of rules: JAX hands numbers and NumPy arrays to primitives as they are."""

import functools
import itertools
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    import plum

NUMBERS = (bool, int, float, complex)
_NO_ARRAYS = (*NUMBERS, np.ndarray, np.generic)


def as_annotated(signature: "plum.Signature", operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of a rule, with a `jax.Array` for a number or NumPy array where its annotation says so."""
    if not any(isinstance(x, _NO_ARRAYS) for x in operands):
        return operands
    hints = itertools.chain(signature.types, itertools.repeat(signature.varargs))
    return [
        jnp.asarray(x) if isinstance(x, _NO_ARRAYS) and _is_array(hint) else x
        for x, hint in zip(operands, hints, strict=False)
    ]


@functools.cache
def _is_array(hint: Any) -> bool:
    """Whether a hint names `jax.Array`, and neither numbers nor NumPy arrays."""
    members = {*(typing.get_args(hint) or (hint,))}
    return jax.Array in members and members.isdisjoint(_NO_ARRAYS)
