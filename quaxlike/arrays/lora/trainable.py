"""Arrays that are trained along with the adapters: in full, or as biases of adapters."""

from collections.abc import Sequence
from types import NotImplementedType
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.core
import jax.extend.core as jexc
from jaxtyping import ArrayLike

from ...core.jaxprs.slots import leading_axes
from ...core.jaxprs.unify import widened
from ...core.operators import ArrayOperators
from ...core.policy import map_values
from ...core.quaxify import quaxify
from ...core.values import ArrayValue, Value, is_value, materialise
from .array import frozen
from .dot import add


class Beside(ArrayOperators, ArrayValue):
    """Marks an array for `trainable`; every computation uses the plain array."""

    @staticmethod
    def default(
        primitive: jexc.Primitive, values: Sequence[ArrayLike | Value], params: dict[str, Any]
    ) -> Any:
        under = lambda values: [materialise(x) if isinstance(x, Beside) else x for x in values]
        plain = map_values(under, values)
        return quaxify(primitive.bind)(*plain, **primitive.get_bind_params(params))


class TrainableArray(Beside):
    """An array that is trained in full, in a model that is otherwise frozen.

    `loraify(..., modules_to_save=...)` and `bias=` insert it.

    **Arguments:**

    - `array`: any array.
    """

    array: Any

    linear: ClassVar[bool] = True

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.array.shape, self.array.dtype)

    def materialise(self) -> Any:
        return self.array

    def merged(self) -> jax.Array:
        """The array."""
        return self.array

    @classmethod
    def promote(cls, array: Any, like: Value) -> Value | NotImplementedType:
        assert isinstance(like, TrainableArray)
        array = widened(array, like.array)
        return cls(array) if is_value(array) == is_value(like.array) else NotImplemented

    def leading_axis(self) -> Sequence[int | None] | NotImplementedType:
        return leading_axes([(self.array, True)])

    def shard_spec(self, spec: jax.P) -> Sequence[jax.P] | NotImplementedType:
        return self.array.shard_spec(spec) if is_value(self.array) else [spec]


class LoraBias(Beside):
    """The bias of a layer whose adapter has its own bias: `w + scaling * b`, where `b` is trained.

    `loraify(..., lora_bias=True)` inserts it.

    **Arguments:**

    - `w`: the bias of the layer, frozen unless it is a `TrainableArray`; None if there is none.
    - `b`: the bias of the adapter.
    - `scaling`: the scaling of the adapter.
    """

    w: Any
    b: Any
    scaling: float = eqx.field(static=True)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(self.b.shape, (self.b if self.w is None else self.w).dtype)

    def materialise(self) -> jax.Array:
        trained = isinstance(self.w, TrainableArray)
        return self._sum(self.w if trained else frozen(self.w))

    def merged(self) -> jax.Array:
        """The sum, with gradients to both parts."""
        return self._sum(self.w)

    def _sum(self, w: Any) -> jax.Array:
        scaled = self.b * self.scaling
        return scaled if w is None else add(materialise(w), scaled)
