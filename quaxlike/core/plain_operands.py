"""Plain operands of rules: JAX hands numbers and NumPy arrays to primitives as they are."""

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


def named_as_arrays(signature: "plum.Signature") -> tuple[bool, ...]:
    """For each operand of a rule, and for those that follow: whether its hint names `jax.Array`, and neither
    numbers nor NumPy arrays. Empty if there is none."""
    flags = tuple(map(_is_array, (*signature.types, signature.varargs)))
    return flags if any(flags) else ()


def as_arrays(operands: Sequence[Any], flags: tuple[bool, ...]) -> list[Any]:
    """The operands, with a `jax.Array` in place of a number or a NumPy array where the flag is True."""
    all_flags = itertools.chain(flags, itertools.repeat(flags[-1]))
    return [
        jnp.asarray(x) if flag and isinstance(x, _NO_ARRAYS) else x
        for x, flag in zip(operands, all_flags, strict=False)
    ]


def _is_array(hint: Any) -> bool:
    members = {*(typing.get_args(hint) or (hint,))}
    return jax.Array in members and members.isdisjoint(_NO_ARRAYS)
