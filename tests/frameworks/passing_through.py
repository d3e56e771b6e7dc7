"""`quaxlike.numpy`, with every array a Value that passes all primitives through."""

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp

jax.config.update("jax_enable_x64", True)

import quaxlike as ql  # noqa: E402
import quaxlike.numpy as qnp  # noqa: E402


class Passing(ql.ArrayOperators, ql.ArrayValue):
    """An array."""

    array: jax.Array

    def materialise(self):
        return self.array

    @staticmethod
    def default(primitive, values, params):
        arrays = [v.array if isinstance(v, Passing) else v for v in values]
        out = primitive.bind(*arrays, **primitive.get_bind_params(params))
        return [_wrapped(x) for x in out] if primitive.multiple_results else _wrapped(out)

    def __array_namespace__(self, *, api_version=None):
        return _NAMESPACE


def _wrapped(x: Any) -> Any:
    return Passing(x) if isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _lifted(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(_wrapped, function(*args, **kwargs), is_leaf=ql.is_value)

    return call


# About dtypes and shapes, and makes no arrays.
_AS_THEY_ARE = {"finfo", "iinfo", "isdtype", "issubdtype", "result_type", "can_cast", "broadcast_shapes"}
_AS_THEY_ARE |= {"__array_namespace_info__", "__array_api_version__"}


class _Namespace(types.ModuleType):
    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _AS_THEY_ARE:
            raise AttributeError(name)
        member = getattr(self._module, name)
        if isinstance(member, types.ModuleType):
            return _Namespace(name, member)
        is_dtype = hasattr(member, "dtype") and not isinstance(member, jax.Array)
        plain = isinstance(member, type) or is_dtype or not callable(member)
        return member if plain or name in _AS_THEY_ARE else _lifted(member)


_NAMESPACE = _Namespace("passing_through", qnp)
__getattr__ = _NAMESPACE.__getattr__
