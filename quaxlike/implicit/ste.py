"""`ste`: the straight-through estimator."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu

from ..core.quaxify import quaxify, value_of
from ..core.values import aval_of, is_value, materialise
from .array import ImplicitArray, bind


def ste(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The straight-through estimator: computes `fn`, and differentiates as if it were the identity.

    For training through a quantiser or another function whose derivative is zero or does not exist:
    gradients pass it unchanged to its first argument, and do not reach the others.

    **Arguments:**

    - `fn`: a function of an array, and of whatever else (keyword and static arguments included), that
        returns an array of the same shape, or a Value that stands for one.

    **Returns:**

    A function of the same arguments. Where `fn` returns a Value, the result passes for that Value and
    follows its handlers; only derivatives are taken as if it were the first argument.

    !!! example

        ```python
        import jax, jax.numpy as jnp
        from quaxlike.implicit import ste

        rounded = ste(jnp.round)
        assert rounded(1.4) == 1.0 and jax.grad(rounded)(1.4) == 1.0
        ```

    Source: [Bengio, Léonard and Courville, 2013](https://arxiv.org/abs/1308.3432).
    """

    @functools.wraps(fn)
    def estimated(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = jtu.tree_map(_stop, (args, kwargs))
        return jtu.tree_map(lambda y: _through(y, x), fn(_stop(x), *args, **kwargs), is_leaf=is_value)

    return estimated


def _stop(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x


def _through(y: Any, x: Any) -> Any:
    """`y` with the derivative of `x`."""
    if jnp.shape(y) != jnp.shape(x):
        raise ValueError(
            f"ste needs a function that keeps the shape of its first argument, since that takes the "
            f"gradient; found {jnp.shape(x)} in and {jnp.shape(y)} out."
        )
    y, x = value_of(y), jnp.asarray(x)
    return StraightThrough(y, x) if is_value(y) else _graft(y, x)


@jax.custom_jvp
def _graft(y: Any, x: Any) -> Any:
    return y


@_graft.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (y, _), (dy, dx) = primals, tangents
    return y, dx.astype(dy.dtype) if _is_inexact(y) else dy


class StraightThrough(ImplicitArray, warn_on_materialize=False):
    """A Value that is differentiated as if it were an array. Passes for the Value: `isinstance` and
    attributes are those of `value`."""

    value: Any
    array: Any  # only its derivative counts

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "value"), name)

    __class__ = property(lambda self: type(self.value))  # pyright: ignore[reportIncompatibleMethodOverride]

    def compute_shape(self) -> tuple[int, ...]:
        return aval_of(self.value).shape

    def compute_dtype(self) -> Any:
        return aval_of(self.value).dtype

    def materialize(self) -> Any:
        return _graft(materialise(self.value), self.array)

    @classmethod
    def default_handler(cls, primitive: jexc.Primitive, *args: Any, params: dict[str, Any]) -> Any:
        """Follows the handlers of `value`, and adds what the results owe to the derivative of `array`."""
        run = quaxify(lambda *xs: bind(primitive, xs, params))
        is_estimated = [type(x) is StraightThrough for x in args]
        arrays = [x.array for x in args if type(x) is StraightThrough]
        values = [x.value if type(x) is StraightThrough else x for x in args]

        def through(arrays: Sequence[Any], values: Sequence[Any]) -> list[Any]:
            """The tangents of the results, for tangents `arrays`: the primitive is differentiated where it
            is computed, at `values`."""

            def dense(*estimated: Any) -> Any:
                rest = iter(estimated)
                operands = [next(rest) if e else x for e, x in zip(is_estimated, values, strict=True)]
                outs = materialise(run(*operands))
                return outs if primitive.multiple_results else [outs]

            at = [materialise(x) for e, x in zip(is_estimated, values, strict=True) if e]
            return jax.jvp(dense, at, [d.astype(x.dtype) for d, x in zip(arrays, at, strict=True)])[1]

        @jax.custom_jvp
        def owing(outs: list[Any], arrays: list[Any], values: list[Any]) -> list[Any]:
            return outs

        @owing.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            (outs, _, values), (d_outs, d_arrays, _) = primals, tangents
            extra = through(d_arrays, values)
            return outs, [
                d + e.astype(d.dtype) if _is_inexact(out) else d
                for out, d, e in zip(outs, d_outs, extra, strict=True)
            ]

        outs = run(*values)
        outs = list(outs) if primitive.multiple_results else [outs]
        # A Value has no derivative of its own kind; an array of its shape has it in its stead.
        carriers = [jnp.zeros(x.shape, x.dtype) if is_value(x) else x for x in outs]
        carriers = owing(carriers, arrays, values)
        results = [
            StraightThrough(out, carrier) if is_value(out) else carrier
            for out, carrier in zip(outs, carriers, strict=True)
        ]
        return results if primitive.multiple_results else results[0]


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
