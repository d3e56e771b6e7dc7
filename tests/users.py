"""Types as users begin them: a few rules, and no hook beyond `materialise`."""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

import quaxlike as ql


class Scaled(ql.ArrayValue):
    """An array and its scale."""

    array: jax.Array
    scale: jax.Array

    def materialise(self):
        return self.array * self.scale


@ql.register("mul")
def _(x: Scaled, y: jax.Array):
    return Scaled(x.array, x.scale * y) if y.ndim == 0 and y.dtype == x.dtype else NotImplemented


@ql.register(["neg", "transpose", "rev"])
def _(primitive: Primitive, x: Scaled, **params):
    return Scaled(primitive.bind(x.array, **params), x.scale)


class Transposed(ql.ArrayValue):
    """The transpose of an array."""

    array: jax.Array

    def materialise(self):
        return jnp.swapaxes(self.array, 0, 1)


@ql.register("mul")
def _(x: Transposed, y: Transposed):
    return Transposed(x.array * y.array)


@ql.register(["neg", "sin", "tanh", "exp"])
def _(primitive: Primitive, x: Transposed, **params):
    return Transposed(primitive.bind(x.array, **params))


class Rescaled(ql.ArrayValue):
    """Twice an array, and linear in it, with two rules."""

    linear = True
    array: jax.Array

    def materialise(self):
        return self.array + self.array


@ql.register("mul")
def _(x: Rescaled, y: jax.Array):
    return Rescaled(x.array * y) if x.shape == y.shape else NotImplemented


@ql.register("add")
def _(x: Rescaled, y: Rescaled):
    return Rescaled(x.array + y.array)


class Bare(ql.ArrayValue):
    """The product of two arrays, without a rule."""

    a: jax.Array
    b: jax.Array

    def materialise(self):
        return self.a * self.b


class Passing(ql.ArrayValue):
    """An array, which it passes to every primitive; each result is one again."""

    linear = True
    array: jax.Array

    def materialise(self):
        return self.array

    @staticmethod
    def default(primitive, values, params):
        arrays = [x.array if isinstance(x, Passing) else ql.materialise(x) for x in values]
        out = primitive.bind(*arrays, **primitive.get_bind_params(params))
        return [Passing(x) for x in out] if primitive.multiple_results else Passing(out)
