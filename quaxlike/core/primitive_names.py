"""Finds the primitives used by a JAX function, for suggestions when a rule is registered for a function."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp

from . import compat, high_level

MODULES = {
    "jax.numpy": jnp,
    "jax.lax": jax.lax,
    "jax.nn": jax.nn,
    "jax.numpy.linalg": jnp.linalg,
    "jax.scipy.special": jax.scipy.special,
}
# How to try calling a function, in order, with 2x2 arrays of floats, integers and booleans. (No strings:
# `jax.numpy.save` would go ahead and write a file.)
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
# Functions for which none of these calls works.
_CALLED_OTHERWISE = {
    **{"einsum": "dot_general", "astype": "convert_element_type", "while_loop": "while", "fori_loop": "scan"},
    **{"switch": "cond", "map": "scan", "select": "select_n", "conv": "conv_general_dilated"},
}
_CALLERS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")
_PREFIXES = {f"{name}.": name for name in MODULES} | {"jnp.": "jax.numpy", "lax.": "jax.lax", "nn.": "jax.nn"}
# Only used if there is nothing else.
_FORMS = ("broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy")


def function_called(name: str) -> tuple[str, Any] | None:
    """Returns the JAX function with this (NumPy-like) name, such as "multiply", and its full name."""
    modules = MODULES
    for prefix, module in _PREFIXES.items():
        if name.startswith(prefix) and "." not in name.removeprefix(prefix):
            name, modules = name.removeprefix(prefix), {module: MODULES[module]}
    for module, namespace in modules.items():
        if callable(function := getattr(namespace, name, None)) and not isinstance(function, type):
            return f"{module}.{name}", function
    return None


def primitives_of(function: Any) -> list[str]:
    """Returns the names of the primitives bound by a JAX or NumPy function.

    Traces the function with small arrays. If no call succeeds, falls back to a primitive of the same name.
    Empty for any other function.
    """
    package = (getattr(function, "__module__", None) or type(function).__module__).partition(".")[0]
    if package == "numpy" and (called := function_called(getattr(function, "__name__", ""))):
        return primitives_of(called[1])
    if not callable(function) or package != "jax":
        return []
    name = getattr(function, "__name__", "")
    if name in _CALLED_OTHERWISE:
        return [_CALLED_OTHERWISE[name]]
    args = [jax.ShapeDtypeStruct((2, 2), dtype) for dtype in (jnp.float32, jnp.int32, jnp.bool)]
    for call in CALLS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                jaxpr = jax.make_jaxpr(lambda *xs, call=call: call(function, *xs))(*args)
            except Exception:  # the function requires different arguments
                continue
        found = list(dict.fromkeys(_names(jaxpr)))
        if found := [name for name in found if name not in _FORMS] or found:
            return found
    return [name] if name in compat.named_primitives() else []


def _names(jaxpr: Any) -> Iterator[str]:
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        name, params = high_level.as_call(eqn.primitive, eqn.params)
        inside = list(jexc.jaxprs_in_params(params)) if name in _CALLERS else []
        if inside:
            yield from _names(inside[0])
        else:
            yield name
