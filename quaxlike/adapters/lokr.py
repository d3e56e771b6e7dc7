"""LoKr: adds a Kronecker product of (possibly low-rank) matrices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx

from ..arrays.structured import KroneckerMatrix
from .combinators import SumArray
from .lycoris import KINDS, OPTIONS, PATTERNS, tucker
from .method import MethodArray
from .record import Layer, Method, Weight, Written, as_written, count, flag, starts


class LoKrArray(MethodArray):
    """LoKr: adds `scaling` times the Kronecker product of two (possibly low-rank) matrices.

    **Arguments:**

    - `w`: the base, as an array or Value.
    - `first`: has shape `(..., o_1, i_1)`, or `(..., o_1, r)` if `first_b` is given.
    - `second`: has shape `(..., o_2, i_2)`, or `(..., o_2, r)` if `second_b` is given. Here `o_1 * o_2` is
        the number of outputs, and `i_1 * i_2` the number of inputs. Multiple output or input axes are
        flattened.
    - `first_b`, `second_b`: the second factors of either matrix, with shapes `(..., r, i_1)` and `(..., r,
        i_2)`. Default: None.
    - `core`: a core of shape `(r, r, *window)`, for convolution kernels in Tucker form. The second matrix is
        then `core` multiplied by both `second` and `second_b`, with `second_b` of shape `(r, channels)`.
        Default: None.
    - `alpha`, `rank`: scale the change by `alpha / rank`, regardless of the actual ranks of the matrices.
        `alpha` is not differentiated. Default: 1.
    - `out_axes`, `in_axes`, `gradients`: as in [`quaxlike.LoraArray`][].

    !!! example

        ```python
        import jax.numpy as jnp, quaxlike as ql

        first, second = jnp.ones((2, 2)), jnp.zeros((2, 3))
        lokr = ql.adapters.LoKrArray(jnp.ones((4, 6)), first, second)
        ql.quaxify(jnp.matmul)(lokr, jnp.arange(6.0))
        ```

    Yeh et al., Navigating Text-To-Image Customization (2023), as in LyCORIS.
    """

    first: Any
    second: Any
    first_b: Any = None
    second_b: Any = None
    core: Any = None
    alpha: Any = eqx.field(default=1.0, kw_only=True)
    rank: int = eqx.field(static=True, default=1, kw_only=True)

    part_axes: ClassVar[Mapping[str, str]] = {
        "first": "o_1 i_1", "second": "o_2 i_2", "first_b": "r i_1", "second_b": "r i_2",
        "core": "r s height width",
    }  # fmt: skip
    numbers: ClassVar[Sequence[str]] = ("alpha",)

    @property
    def scaling(self) -> Any:
        """The factor for the change."""
        return self.alpha / self.rank

    def adds_nothing(self) -> bool:
        return True

    def composed(self) -> SumArray:
        first = self.scaled("first")
        first = first if self.first_b is None else tucker(None, first, self.first_b)
        second = self.second if self.second_b is None else tucker(self.core, self.second, self.second_b)
        return self.on(SumArray, KroneckerMatrix(first, second))


@starts
def lokr(x: Weight, *, rank: int = 8, alpha: float = 8, decompose_factor: int = -1) -> LoKrArray:
    (o_1, o_2), (i_1, i_2) = (two_factors(n, decompose_factor) for n in (x.outputs, x.inputs))
    options: dict[str, Any] = {"alpha": float(alpha), "rank": rank}
    if rank >= max(o_2, i_2) / 2:
        return x.on(LoKrArray, x.zeros(o_1, i_1), x.kaiming(o_2, i_2, fan_in=i_2), **options)
    second, second_b = x.kaiming(o_2, rank, fan_in=rank), x.kaiming(rank, i_2, fan_in=i_2)
    return x.on(LoKrArray, x.zeros(o_1, i_1), second, second_b=second_b, **options)


def two_factors(n: int, limit: int) -> tuple[int, int]:
    """Factorises `n` into two factors as close to each other as possible.

    If `limit` is positive, then the first factor is at most `limit`. The shapes in the file depend on this,
    so it is the same as PEFT's `factorization`.
    """
    if limit > 0 and n % limit == 0:
        return limit, n // limit
    most = math.isqrt(n) if limit <= 0 else min(math.isqrt(n), limit)
    first = next(m for m in range(most, 0, -1) if n % m == 0)
    return first, n // first


def _read_lokr(layer: Layer) -> Any:
    r, alpha = layer.option("r"), layer.option("alpha")
    window, inputs = layer.window, layer.inputs // math.prod(layer.window)
    limit = layer.option("decompose_factor")
    (o_1, o_2), (i_1, i_2) = two_factors(layer.outputs, limit), two_factors(inputs, limit)
    if layer.has("first"):
        parts = {"first": layer.read("first", o_1, i_1)}
    else:
        parts = {"first": layer.read("first_a", o_1, r), "first_b": layer.read("first_b", r, i_1)}
    if layer.has("second"):
        parts["second"] = layer.read("second", o_2, i_2, *window).reshape(o_2, -1)
    elif layer.has("core"):
        parts["core"] = layer.read("core", r, r, *window)
        parts |= {"second": layer.read("second_a", r, o_2).T, "second_b": layer.read("second_b", r, i_2)}
    else:
        parts["second"] = layer.read("second_a", o_2, r)
        parts["second_b"] = layer.read("second_b", r, i_2 * math.prod(window))
    return layer.on(LoKrArray, **parts, alpha=float(alpha), rank=r)


def _write_lokr(layer: Written) -> tuple[dict[str, Any], dict[str, Any]]:
    x, window = layer.array, layer.window
    options = {"r": x.rank, "alpha": as_written(layer.path, x.alpha)}
    parts = {"first_b": x.first_b, "second_b": x.second_b, "core": x.core}
    parts["first" if x.first_b is None else "first_a"] = x.first
    if x.second_b is None:
        parts["second"] = x.second.reshape(len(x.second), -1, *window)
    else:
        parts["second_a"] = x.second if x.core is None else x.second.T
        options |= {"use_effective_conv2d": x.core is not None} if math.prod(window) > 1 else {}
    return parts, options


def _settle_lokr(
    layers: Mapping[str, Written], options: dict[str, dict[str, Any]], targets: Sequence[str]
) -> dict[str, Any]:
    """Returns the limit on the first factors, and whether the first matrices are low-rank too.

    PEFT doesn't store the matrix shapes, so this finds a limit that reproduces them all.
    """
    shapes: dict[str, Any] = {}  # the shapes of both matrices, excluding the window
    for name, layer in layers.items():
        x, inputs = layer.array, layer.array.num_inputs // math.prod(layer.window)
        o_1, i_1 = len(x.first), (x.first if x.first_b is None else x.first_b).shape[-1]
        shapes[name] = (o_1, i_1), (x.num_outputs // o_1, inputs // i_1)
    factors = [pair for matrices in shapes.values() for pair in zip(*matrices, strict=True)]
    limits = (-1, *range(1, max(map(max, factors)) + 1))
    limit = next((n for n in limits if all(two_factors(x * y, n) == (x, y) for x, y in factors)), None)
    if limit is None:
        raise ValueError(f"PEFT's LoKr has one `decompose_factor` for all layers; none gives {shapes}.")
    both = any(layer.array.first_b is not None for layer in layers.values())
    for name, (first, second) in shapes.items():
        x = layers[name].array

        def low(shape: Any, r: Any = x.rank) -> Any:
            return r < max(shape) / 2

        if low(second) == (x.second_b is None) or (low(first) and both) == (x.first_b is None):
            raise ValueError(
                f"PEFT's LoKr of rank {x.rank} has low-rank matrices where that is less than half of their "
                f"size, and the first only if all layers have; {name} has others."
            )
    return {"decompose_factor": limit, "decompose_both": both}


LOKR = Method(
    "LOKR", LoKrArray, lokr,
    parts={"first": ".lokr_w1", "first_a": ".lokr_w1_a", "first_b": ".lokr_w1_b", "second": ".lokr_w2",
           "second_a": ".lokr_w2_a", "second_b": ".lokr_w2_b", "core": ".lokr_t2"},
    options={**OPTIONS, "decompose_both": flag(), "decompose_factor": count(-1, -1),
             "rank_dropout_scale": flag()},
    read=_read_lokr, write=_write_lokr, settle=_settle_lokr, kinds=KINDS, conv1d=False, patterns=PATTERNS,
)  # fmt: skip
