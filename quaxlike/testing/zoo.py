"""Several kinds of Values that can be made from any array."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp

from ..core import policy
from ..core.quaxify import quaxify
from ..core.trace import ValueTracer
from ..core.values import ArrayValue, is_value, kind_of, replace_fields
from .refusing import is_revealing

_DEFAULT_DTYPES = (jnp.float32, jnp.float64)


class Keeps(ArrayValue):
    """Wraps an array. Primitives are applied to the array, and then their results are wrapped again."""

    linear: ClassVar[bool] = True
    array: Any

    def aval(self) -> Any:
        return jax.typeof(self.array)

    def materialise(self) -> Any:
        return self.array

    def leading_axis(self) -> list[int | None]:
        return [0]

    def shard_spec(self, spec: jax.P) -> list[jax.P]:
        return [spec]

    @classmethod
    def promote(cls, array: Any, like: Any) -> Any:
        return replace_fields(like, array=array)

    @staticmethod
    def default(primitive: Any, values: Any, params: Any) -> Any:
        like = next(x for x in values if isinstance(x, Keeps))
        arrays = [x.array if isinstance(x, Keeps) else x for x in values]

        def bind(*arrays: Any) -> Any:
            return primitive.bind(*arrays, **primitive.get_bind_params(params))

        out = (quaxify(bind) if any(map(is_value, arrays)) else bind)(*arrays)

        def boxed(x: Any) -> Any:
            return replace_fields(like, array=x) if is_plain(x) else x

        return [boxed(x) for x in out] if primitive.multiple_results else boxed(out)


class Refuses(Keeps):
    """Like `Keeps`, but refuses to be materialised.

    Anything computed from this also has this type. In particular this includes conditions, so their elements
    are available to transforms but not to Python.
    """

    def materialise(self) -> Any:
        if is_revealing():
            return self.array
        what, by_python = _asking()
        if by_python or _is_inexact(self.array):
            raise Refused(f"{what} needs the elements of a Value, which it refuses to give.")
        return self.array


class Refused(RuntimeError):
    """Raised when materialising a Value that refuses to be materialised."""


class Thing(eqx.Module):
    """Metadata without any arrays."""

    name: str = eqx.field(static=True)


class Described(Keeps):
    """Wraps an array, together with metadata stored as a module with static fields."""

    about: Thing


class Scaled(ArrayValue):
    """An array multiplied by a scalar. This isn't linear in its leaves, and has no rules."""

    array: Any
    scale: Any

    def materialise(self) -> Any:
        return self.array * self.scale

    def leading_axis(self) -> list[int | None]:
        return [0, None]


class Stacked(ArrayValue):
    """The sum of two arrays, stacked as a single leaf. This has no rules either."""

    linear: ClassVar[bool] = True
    parts: Any

    def materialise(self) -> Any:
        return self.parts[0] + self.parts[1]

    def leading_axis(self) -> list[int | None]:
        return [1]


def is_plain(x: Any) -> bool:
    """Returns whether a Value can replace the array `x`. (For example, this is False for random keys.)"""
    return kind_of(x) == "array" and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _asking() -> tuple[str, bool]:
    """Returns what required an array, and whether this was Python or NumPy (i.e. `bool`, `float`, ...)."""
    what, frame = "", sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is _BY_PYTHON:
            return f"`{frame.f_locals['what']}` of Python or NumPy", True
        if frame.f_code is _BY_POLICY:
            what = what or f"`{frame.f_locals['what']}`"
        frame = frame.f_back
    return what or "`quaxlike.materialise`", False


# The two functions that request an array. Both have a local variable `what` describing the reason. (Unwrap
# them, as a run-time type checker may have wrapped them.)
_BY_PYTHON = inspect.unwrap(ValueTracer._concrete).__code__  # pyright: ignore[reportPrivateUsage]
_BY_POLICY = inspect.unwrap(policy._densify).__code__  # pyright: ignore[reportPrivateUsage]


# Functions creating a Value from an array. They return None if this isn't possible for a particular array.
ZOO: dict[str, Callable[[Any], Any]] = {
    "passes through": Keeps,
    "refuses": Refuses,
    "metadata": lambda x: Described(x, Thing("an array")),
    # Halving and doubling are both exact in floating point, so this doesn't change the values.
    "non-linear": lambda x: Scaled(x / 2, jnp.asarray(2, x.dtype)) if _is_inexact(x) else None,
    "stacked": lambda x: Stacked(jnp.stack([x / 2, x / 2])) if _is_inexact(x) else None,
    "half precision": lambda x: Keeps(x.astype(jnp.bfloat16)) if x.dtype in _DEFAULT_DTYPES else None,
}
