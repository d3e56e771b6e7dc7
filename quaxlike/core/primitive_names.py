"""Finds the primitives behind a JAX function, for rules registered by a function's name."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from . import compat

MODULES = {
    "jax.numpy": jnp,
    "jax.lax": jax.lax,
    "jax.nn": jax.nn,
    "jax.numpy.linalg": jnp.linalg,
    "jax.scipy.special": jax.scipy.special,
}
# Arguments that a function may accept, in the order in which we try them: floats, integers and booleans, all
# 2x2. (No strings: `jax.numpy.save` would write a file.)
CALLS: list[Callable[..., Any]] = [
    lambda f, x, i, b: f(x),
    lambda f, x, i, b: f(x, x),
    lambda f, x, i, b: f(b, x, x),
    lambda f, x, i, b: f(x, x, x),
    lambda f, x, i, b: f([x, x]),
    lambda f, x, i, b: f(i),
    lambda f, x, i, b: f(i, i),
    lambda f, x, i, b: f(x, i),
    lambda f, x, i, b: f(x, 1),
    lambda f, x, i, b: f(x, (2, 2)),
]
_CALLERS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_FORMS = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy")  # only named if alone
