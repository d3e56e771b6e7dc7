"""`MethodArray`: an adapter expressed in terms of combinators."""

import abc
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jexc
import jax.numpy as jnp
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from ..arrays import precedence
from ..arrays.adapted import constant, labels_of
from ..arrays.dot_axes import arrange
from ..arrays.lora.array import LoraArray
from ..core.jaxprs.evaluate import cached_trace
from ..core.jaxprs.unify import widened
from ..core.policy import map_values
from ..core.quaxify import quaxify
from ..core.rules import register_on_either_side
from ..core.values import Value, materialise
from .combinators import AxesArray


class MethodArray(AxesArray):
    """Base class for published adapter methods.

    Subclasses store the trained parameters and implement `composed`, which expresses the adapted weight in
    terms of combinators. All operations are delegated to its result, so a new method typically doesn't need
    any rules.
    """

    # The factor for the change, if the method supports this: one of `numbers`, or a property computed from
    # it. Not annotated, for the same reason as in `AdaptedArray`.
    scaling = 1.0

    @abc.abstractmethod
    def composed(self) -> Any:
        """Returns the equivalent array in terms of combinators and [`quaxlike.LoraArray`][]."""

    def on(self, kind: Any, *parts: Any, **options: Any) -> Any:
        """Creates another kind of adapter on the same weight and with the same axes.

        This is typically used in `composed`.
        """
        shared = ("gradients", "out_axes", "in_axes")
        return kind(self.w, *parts, **{name: getattr(self, name) for name in shared}, **options)

    def scaled(self, name: str) -> Any:
        """Returns a part (i.e. the field with this name) multiplied by the scaling.

        Stacked adapters can differ in their scaling, so this lines up the batch axes first.
        """
        own, of_scaling = labels_of(self)[name], labels_of(self)[self.numbers[0]]
        part, scaling = getattr(self, name), constant(jnp.asarray(self.scaling))
        more = [*(i for i in of_scaling if i not in own), *own]
        return arrange(part, own, more) * arrange(scaling.astype(part.dtype), of_scaling, more)

    @property
    def num_outputs(self) -> int:
        """The number of outputs."""
        return math.prod(self.w.shape[axis] for axis in self.out_axes)

    @property
    def num_inputs(self) -> int:
        """The number of inputs."""
        return math.prod(self.w.shape[axis] for axis in self.in_axes)

    def low_rank(self, a: Any, b: Any) -> LoraArray:
        """Returns `w + b @ a`, for matrices `a` and `b` with flattened inputs and outputs."""
        into, out = ([self.w.shape[axis] for axis in axes] for axes in (self.in_axes, self.out_axes))
        a = a if len(into) == 1 else jnp.reshape(materialise(a), (*a.shape[:-1], *into))
        b = b if len(out) == 1 else jnp.reshape(b, (*b.shape[:-2], *out, b.shape[-1]))
        return self.on(LoraArray, a, b)

    def as_matrix(self, w: jax.Array) -> jax.Array:
        """Reshapes a dense weight to matrices of shape `(..., outputs, inputs)`."""
        n = w.ndim
        ends = [n + axis for axis in (*self.out_axes, *self.in_axes)]
        order = [*(i for i in range(n) if i not in ends), *ends]
        moved = jnp.transpose(w, order)
        return jnp.reshape(moved, (*moved.shape[: n - len(ends)], self.num_outputs, self.num_inputs))

    def materialise(self) -> jax.Array:
        return self.composed().materialise()

    def unmerged(self, weight: jax.Array) -> Any:
        x = self.composed()
        while x is not self.w:
            out = x.unmerged(weight)
            if out is NotImplemented:
                return NotImplemented
            x, weight = x.w, out.w
        return self.with_base(weight)

    def widen(self, like: Value) -> Any:
        """Widens as in the base class, or widens `composed` if `like` has another type or axes."""

        def axes(x: Any) -> Any:
            return (type(x), x.out_axes, x.in_axes)

        same = isinstance(like, MethodArray) and axes(like) == axes(self)
        return super().widen(like) if same else widened(self.composed(), like)

    #: Takes precedence over fully trained arrays such as `TrainableArray`: these simply unwrap themselves.
    default_precedence = precedence.METHOD

    @staticmethod
    def default(
        primitive: jexc.Primitive, values: Sequence[ArrayLike | Value], params: dict[str, Any]
    ) -> Any:
        values = map_values(_composed, values)
        return quaxify(primitive.bind)(*values, **primitive.get_bind_params(params))


def _composed(values: Sequence[Any]) -> list[Any]:
    return [x.composed() if isinstance(x, MethodArray) else x for x in values]


@register_on_either_side("dot_general", MethodArray, precedence=precedence.METHOD)
@cached_trace
def _dot_general(primitive: Primitive, x: Any, y: Any, **params: Any):
    return quaxify(primitive.bind)(*_composed((x, y)), **params)
