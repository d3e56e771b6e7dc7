"""`ste`, the straight-through estimator."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jexc
import jax.numpy as jnp
import jax.tree_util as jtu

from .._checked import checked
from ..core.jaxprs.slots import leading_axes
from ..core.quaxify import quaxify, value_of
from ..core.values import is_value, materialise
from .array import ImplicitArray, bind


@checked
def ste(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Turns a function into a straight-through estimator, differentiated as if it were the identity.

    This is useful for training through a quantiser, or any other function with a zero or undefined
    derivative. Gradients are passed unchanged to the first argument, and don't reach any other arguments.

    **Arguments:**

    - `fn`: a function with an array or a pytree of arrays as its first argument. It can have any other
        arguments, and should return arrays or Values with the same shapes as its first argument.

    **Returns:**

    A function with the same arguments. If `fn` returns a Value, then the result behaves just like this Value
    and uses the same handlers, but has the derivative of the first argument. It is a pytree with the Value
    and the first argument as children, both inside and outside transformations, so it can be the carry of a
    loop. The Value itself is available as the attribute `value`.

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
    def estimated(*args: Any, **kwargs: Any) -> Any:
        if not args:  # the first argument was passed by name (either its actual name, or `x`)
            first = next(iter(inspect.signature(fn).parameters), "x")
            args = (kwargs.pop(first if first in kwargs else "x"),)
        x = args[0]
        args, kwargs = jtu.tree_map(_stop, (args, kwargs))
        return _all_through(fn(*args, **kwargs), x)

    return estimated


def _all_through(out: Any, x: Any) -> Any:
    if jtu.treedef_is_leaf(jtu.tree_structure(x, is_leaf=is_value)):
        return jtu.tree_map(lambda y: _through(y, x), out, is_leaf=is_value)
    (xs, wanted), (ys, found) = (jtu.tree_flatten(tree, is_leaf=is_value) for tree in (x, out))
    if found != wanted:
        raise ValueError(
            f"ste needs a function that keeps the structure of its first argument, since that takes the "
            f"gradient; found {wanted} in and {found} out."
        )
    return jtu.tree_unflatten(found, map(_through, ys, xs))


def _stop(x: Any) -> Any:
    return jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x


def _through(y: Any, x: Any) -> Any:
    """Returns `y`, but with the derivative of `x`."""
    if jnp.shape(y) != jnp.shape(x):
        raise ValueError(
            f"ste needs a function that keeps the shape of its first argument, which receives the "
            f"gradient; found {jnp.shape(x)} in and {jnp.shape(y)} out."
        )
    y = value_of(y)
    if is_value(y):
        x = jnp.asarray(materialise(x))
        return StraightThrough(y, x.astype(y.dtype) if _is_inexact(y) else x)
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jtu.tree_leaves(x)):
        # Here `x` isn't being differentiated. But `fn` may have closed over something that is.
        return jax.lax.stop_gradient(y)
    return _graft(y, jnp.asarray(materialise(x)))


@jax.custom_jvp
def _graft(y: Any, x: Any) -> Any:
    return y


@_graft.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (y, x), (dy, dx) = primals, tangents
    # Call `_graft` again rather than returning `y`, so higher-order derivatives are those of `x`, too.
    return _graft(y, x), dx.astype(dy.dtype) if _is_inexact(y) else dy


class StraightThrough(ImplicitArray, warn_on_materialize=False):
    """Combines a Value with the derivative of an array.

    This pretends to be the Value as far as possible. In particular, `isinstance` checks and attributes are
    forwarded to `value`.
    """

    value: Any
    array: Any  # only its derivative is used

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "value"), name)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        # `value` may not be a Value: a loop may have materialised it.
        return type(self.value) if is_value(self.value) else StraightThrough

    def compute_shape(self) -> tuple[int, ...]:
        return jax.typeof(self.value).shape

    def compute_dtype(self) -> Any:
        return jax.typeof(self.value).dtype

    def astype(self, dtype: Any) -> Any:
        # Cast both: the Value's handlers are called with `value`.
        if isinstance(self.value, ImplicitArray):
            value = self.value.astype(dtype)
        else:
            value = quaxify(lambda x: jax.lax.convert_element_type(x, dtype))(self.value)
        array = self.array.astype(dtype)
        return StraightThrough(value, array) if is_value(value) else _graft(value, array)

    def leading_axis(self) -> Any:
        return leading_axes([(self.value, True), (self.array, True)])

    # The default implementation looks at `__class__`, which isn't our actual class.
    def __reduce__(self) -> Any:
        return StraightThrough, (self.value, self.array)

    def materialize(self) -> Any:
        return _graft(materialise(self.value), self.array)

    @classmethod
    def default_handler(
        cls, primitive: jexc.Primitive, *args: Any, params: dict[str, Any] | None = None
    ) -> Any:
        """Computes with the handlers of `value`. The derivative is instead computed using plain arrays."""
        run = quaxify(lambda *xs: bind(primitive, xs, params or {}))
        arrays = [x.array if type(x) is StraightThrough else None for x in args]
        values = [x.value if type(x) is StraightThrough else x for x in args]

        def results_of(operands: Sequence[Any]) -> list[Any]:
            outs = run(*operands)
            return list(outs) if primitive.multiple_results else [outs]

        def dense(arrays: Sequence[Any], values: Sequence[Any]) -> list[Any]:
            at = [x if a is None else _graft(materialise(x), a) for a, x in zip(arrays, values, strict=True)]
            return materialise(results_of(at))

        @jax.custom_jvp
        def with_missing_tangent(outs: list[Any], arrays: list[Any], values: list[Any]) -> list[Any]:
            return outs

        @with_missing_tangent.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            d_outs, d_arrays, d_values = tangents
            _, owed = jax.jvp(dense, primals[1:], (d_arrays, d_values))
            return with_missing_tangent(*primals), [
                o.astype(d.dtype) if _is_inexact(out) else d
                for out, d, o in zip(primals[0], d_outs, owed, strict=True)
            ]

        outs = results_of(values)
        # A Value can't carry the tangent of an array, so use an array of zeros for this instead.
        carriers = [jnp.zeros(x.shape, x.dtype) if is_value(x) else x for x in outs]
        carriers = with_missing_tangent(carriers, arrays, values)
        results = [
            StraightThrough(out, carrier) if is_value(out) else carrier
            for out, carrier in zip(outs, carriers, strict=True)
        ]
        return results if primitive.multiple_results else results[0]


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
