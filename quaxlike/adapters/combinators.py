"""The building blocks of adapters: `SumArray`, `ScaledArray`, `RotatedArray` and `HadamardArray`.

As in `LoraArray`, a weight can have several output and input axes, in any order. The matrices that adapt it
always have the shape `(*batch, outputs, inputs)`, with the weight's axes flattened in `out_axes` and
`in_axes` order.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp

from ..arrays.adapted import AdaptedArray, labels_of, reached_by
from ..arrays.dot_axes import Labels, arrange, cast, common_dtype, in_float32
from ..arrays.lora.dot import multiply
from ..core.quaxify import quaxify
from ..core.values import is_value, materialise


class AxesArray(AdaptedArray):
    """Base class for adapters on weights with one or more output and input axes, in any order."""

    out_axes: tuple[int, ...] = eqx.field(static=True, default=(-2,), kw_only=True)
    in_axes: tuple[int, ...] = eqx.field(static=True, default=(-1,), kw_only=True)

    def aval(self) -> jax.core.ShapedArray:
        return jax.core.ShapedArray(whole_shape(self), self.w.dtype)


class Combinator(AxesArray):
    """Base class for combinators, i.e. the building blocks of published adapter methods."""

    any_axes: ClassVar[bool] = True
    on_materialise: ClassVar[Literal["allow", "warn", "error"] | None] = "warn"

    def times(self, factor: jax.Array) -> Any:
        """Multiplies by a scalar by scaling the base. (This is correct for everything except for sums.)"""
        if factor.ndim:
            return NotImplemented
        return reached_by(self, factor).replace(w=quaxify(multiply)(self.base, factor))


def whole_shape(x: AdaptedArray) -> tuple[int, ...]:
    """Returns the weight's shape, preceded by the batch axes of all parts."""
    own = labels_of(x)
    sizes: dict[int, int] = {}
    for name, labels in own.items():
        for i, n in zip(labels, getattr(x, name).shape, strict=True):
            sizes[i] = max(n, sizes.get(i, n)) if n else 0
    return tuple(sizes[i] for i in sorted(sizes) if i >= 0)


def axes_of(x: AdaptedArray, axes: Sequence[int]) -> Labels:
    """Converts negative axes to their labels in `labels_of`."""
    return [x.ndim + axis for axis in axes]


class SumArray(Combinator):
    """The sum `w + delta`.

    Products with `w` and `delta` are computed separately, using the rules for their types. This is useful for
    a structured `delta`: neither the sum nor `delta` itself is then materialised.

    **Arguments:**

    - `w`: the base, as an array or Value. The sum has the same dtype as the base.
    - `delta`: an array or Value of shape `(..., outputs, inputs)`, for example a `KroneckerMatrix` or a
        `SparseArray`. Multiple output or input axes are flattened.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.adapters import SumArray
        from quaxlike.arrays.structured import KroneckerMatrix

        w = SumArray(jnp.ones((6, 6)), KroneckerMatrix(jnp.eye(2), jnp.ones((3, 3))))
        ql.quaxify(jnp.matmul)(w, jnp.ones(6))
        ```
    """

    delta: Any

    part_axes: ClassVar[Mapping[str, str]] = {"delta": "rows columns"}

    def materialise(self) -> jax.Array:
        return self._with(materialise(self.base), 1)

    def unmerged(self, weight: jax.Array) -> "SumArray":
        return self.with_base(self._with(weight, -1))

    def _with(self, w: jax.Array, sign: int) -> jax.Array:
        delta = like_weight(self, materialise(self.delta))
        dtype = common_dtype(w, delta)
        return cast(spread(self, cast(w, dtype)) + sign * cast(delta, dtype), w.dtype)

    def times(self, factor: jax.Array) -> Any:
        """Multiplies by a scalar. Unlike for other combinators, this scales both terms."""
        if factor.ndim:
            return NotImplemented
        return super().times(factor).replace(delta=quaxify(multiply)(self.delta, factor))

    def adds_nothing(self) -> bool:
        """Returns whether `delta` is zero if all its arrays are zero, i.e. whether it's linear in them."""
        return not is_value(self.delta) or bool(self.delta.linear)


class ScaledArray(Combinator):
    """A weight `w` scaled by `outputs` along its output axes, and by `inputs` along its input axes.

    **Arguments:**

    - `w`: the base, as an array or Value. The result has the same dtype as the base.
    - `outputs`: a factor for each output, of shape `(..., *outputs)`. Default: None, i.e. no scaling.
    - `inputs`: a factor for each input, of shape `(..., *inputs)`. Default: None, i.e. no scaling.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.adapters import ScaledArray

        w = ScaledArray(jnp.ones((4, 3)), inputs=jnp.arange(3.0))
        ql.quaxify(jnp.matmul)(w, jnp.ones(3))
        ```
    """

    outputs: Any = None
    inputs: Any = None

    part_axes: ClassVar[Mapping[str, str]] = {"outputs": "out", "inputs": "in"}
    cuttable: ClassVar[Sequence[str]] = ("out", "in")

    def materialise(self) -> jax.Array:
        w = spread(self, materialise(self.base))
        for factor in self.factors():
            w = multiply(w, factor)
        return w

    def unmerged(self, weight: jax.Array) -> "ScaledArray":
        for factor in self.factors():
            weight = multiply(weight, 1 / factor)
        return self.with_base(weight)

    def factors(self) -> list[Any]:
        """Returns all factors that aren't `None`, arranged for multiplying them with the base."""
        own = labels_of(self)
        return [arrange(getattr(self, name), own[name], range(self.ndim)) for name in own if name != "w"]


class RotatedArray(Combinator):
    """The product of a weight with a square matrix.

    This computes `x @ (w @ rotation).T` as `(x @ rotation.T) @ w.T`, using the rules for the types of
    `rotation` and `w`. In particular, `w @ rotation` is never formed.

    **Arguments:**

    - `w`: the base, as an array or Value. The product has the same dtype as the base.
    - `rotation`: an array or Value of shape `(..., n, n)`, where `n` is the number of inputs. Multiple input
        axes are flattened. Despite its name, this matrix doesn't need to be orthogonal.
    - `of_outputs`: whether to multiply along the outputs instead, e.g. for an embedding of shape
        `(vocabulary, n)`. Default: False.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.adapters import RotatedArray
        from quaxlike.arrays.structured import BlockDiagonalMatrix

        turn = BlockDiagonalMatrix(jnp.array([[[0.0, -1.0], [1.0, 0.0]]] * 3))
        w = RotatedArray(jnp.ones((4, 6)), turn)
        ql.quaxify(jnp.matmul)(w, jnp.arange(6.0))
        ```
    """

    rotation: Any
    of_outputs: bool = eqx.field(static=True, default=False, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {"rotation": "rows columns"}

    def rotated(self) -> Labels:
        """Returns the labels of the rotated axes."""
        return axes_of(self, self.out_axes if self.of_outputs else self.in_axes)

    def materialise(self) -> jax.Array:
        return self._on_rows(materialise(self.base), lambda rows, r: jnp.matmul(rows, r))

    def unmerged(self, weight: jax.Array) -> "RotatedArray":
        def solved(rows: Any, r: Any) -> Any:
            return jnp.swapaxes(jnp.linalg.solve(jnp.swapaxes(r, -1, -2), jnp.swapaxes(rows, -1, -2)), -1, -2)

        return self.with_base(self._on_rows(weight, solved))

    def _on_rows(self, w: jax.Array, multiplied: Any) -> jax.Array:
        """Applies `multiplied(rows, rotation)` in at least float32.

        Here `rows` is `w` as a matrix (with batch axes), with the rotated axes as its columns.
        """
        rotated, batch = self.rotated(), labels_of(self)["rotation"][:-2]
        order = [*batch, *(i for i in range(self.ndim) if i not in (*batch, *rotated)), *rotated]
        w, shape = spread(self, w), [self.shape[i] for i in order]
        dtype = in_float32(common_dtype(w, self.rotation))
        kept = self.ndim - len(rotated)
        sizes = (*shape[: len(batch)], math.prod(shape[len(batch) : kept]), math.prod(shape[kept:]))
        rows = jnp.reshape(arrange(cast(w, dtype), range(self.ndim), order), sizes)
        with jax.default_matmul_precision("highest"):
            out = multiplied(rows, cast(materialise(self.rotation), dtype))
        return cast(arrange(jnp.reshape(out, shape), order, range(self.ndim)), w.dtype)


class HadamardArray(Combinator):
    """The elementwise product `w * factor`.

    Matrix products with this array materialise it: in general there is no cheaper way to compute them.
    Lookups only compute the rows they need.

    **Arguments:**

    - `w`: the base, as an array or Value. The product has the same dtype as the base.
    - `factor`: an array or Value of shape `(..., *outputs, *inputs)`, such as a [`quaxlike.LoraArray`][].
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql
        from quaxlike.adapters import HadamardArray

        w = HadamardArray(jnp.ones((4, 3)), 2 * jnp.ones((4, 3)))
        ql.quaxify(jnp.matmul)(w, jnp.arange(3.0))
        ```
    """

    factor: Any

    part_axes: ClassVar[Mapping[str, str]] = {"factor": "out in"}
    cuttable: ClassVar[Sequence[str]] = ("out", "in")

    def materialise(self) -> jax.Array:
        return multiply(spread(self, materialise(self.base)), materialise(self.arranged()))

    def unmerged(self, weight: jax.Array) -> "HadamardArray":
        return self.with_base(multiply(weight, 1 / materialise(self.arranged())))

    def arranged(self) -> Any:
        """Returns the factor with its axes in the same order as this array's axes."""
        own = labels_of(self)["factor"]
        return quaxify(lambda factor: arrange(factor, own, range(self.ndim)))(self.factor)


# Dense arrays of the full shape ------------------------------------------------------------------


def like_weight(x: AdaptedArray, matrix: jax.Array) -> jax.Array:
    """Reshapes a matrix of shape `(*batch, outputs, inputs)` to broadcast it against `x`."""
    out, into = axes_of(x, x.out_axes), axes_of(x, x.in_axes)
    batch = [i for i in range(x.ndim) if i not in (*out, *into)]
    sizes = [x.shape[i] for i in (*out, *into)]
    split = jnp.reshape(matrix, (*matrix.shape[:-2], *sizes))
    return arrange(split, [*batch[len(batch) - (matrix.ndim - 2) :], *out, *into], range(x.ndim))


def spread(x: AdaptedArray, w: Any) -> Any:
    """Broadcasts the base over all batch axes of `x`, even if only its other parts have them."""
    return w if w.shape == x.shape else quaxify(jnp.broadcast_to)(w, x.shape)
