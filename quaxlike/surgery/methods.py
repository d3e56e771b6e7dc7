"""How adapters of published methods begin: functions for `adapt`, by the names of their methods.

`make(w, *, key, layout, **options)` puts a new adapter on a weight. It adds nothing at first. Options, their
defaults and initial values are those of PEFT, but for C³A and FourierFT, which begin at zero here.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from ..adapters import (
    AdaLoRAArray,
    BOFTArray,
    C3AArray,
    DeLoRAArray,
    FourierFTArray,
    GraLoRAArray,
    HiRAArray,
    HRAArray,
    IA3Array,
    LoHaArray,
    LoKrArray,
    MiSSArray,
    OFTArray,
    RandLoRAArray,
    SHiRAArray,
    VeRAArray,
)
from ..arrays.dot_axes import common_dtype, in_float32
from ..arrays.sparse import SparseArray
from ..core.values import materialise
from .random_numbers import Generator, randlora_projections, vera_projections
from .weight_axes import Layout

_Make = Callable[..., Any]


class _Weight(NamedTuple):
    """A weight and the shapes of its batch axes, outputs and inputs."""

    w: Any
    layout: Layout
    batch: tuple[int, ...]
    out: tuple[int, ...]
    into: tuple[int, ...]
    dtype: Any
    """Of the parts: the weight's, or float32 for 16-bit weights."""
    keys: Any

    @property
    def outputs(self) -> int:
        return math.prod(self.out)

    @property
    def inputs(self) -> int:
        return math.prod(self.into)

    def on(self, kind: Any, *parts: Any, **options: Any) -> Any:
        return kind(
            self.w, *parts, out_axes=self.layout.out_axes, in_axes=self.layout.in_axes, **options
        )  # fmt: skip

    def zeros(self, *shape: int) -> jax.Array:
        return jnp.zeros((*self.batch, *shape), self.dtype)

    def ones(self, *shape: int) -> jax.Array:
        return jnp.ones((*self.batch, *shape), self.dtype)

    def normal(self, *shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(self.keys), (*self.batch, *shape), self.dtype)

    def kaiming(self, *shape: int, fan_in: int) -> jax.Array:
        """PyTorch's `kaiming_uniform_(a=sqrt(5))`."""
        bound = fan_in**-0.5
        return jax.random.uniform(next(self.keys), (*self.batch, *shape), self.dtype, -bound, bound)

    def must_divide(self, method: str, option: str, n: int, *sizes: int) -> None:
        if n < 1 or any(size % n for size in sizes):
            found = " and ".join(map(str, sizes))
            raise ValueError(f"{method} needs {option} that divides {found}; found {n}.")


#: The functions that need no more arguments, by the names of their methods.
METHODS: dict[str, _Make] = {}


def _method(start: Callable[..., Any]) -> _Make:
    """`make` from a function of a `_Weight` and options."""

    @functools.wraps(start)
    def make(w: Any, *, key: Any, layout: Layout, **options: Any) -> Any:
        shape = tuple(w.shape)
        out, into = (tuple(shape[axis] for axis in axes) for axes in (layout.out_axes, layout.in_axes))
        keys = iter(() if key is None else jax.random.split(key, 4))
        weight = _Weight(w, layout, layout.batch_shape(shape), out, into, in_float32(w.dtype), keys)
        return start(weight, **options)

    _, *own = inspect.signature(start).parameters.values()
    named = [inspect.Parameter("w", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    named += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("key", "layout")]
    make.__signature__ = inspect.Signature([*named, *own])  # pyright: ignore[reportAttributeAccessIssue]
    if all(option.default is not option.empty for option in own):
        METHODS[start.__name__] = make
    return make


@_method
def ia3(x: _Weight, *, of_inputs: bool | None = None, bias: Any = None) -> IA3Array:
    """A factor of one for each output, or `of_inputs`. Default: of inputs if there is a bias, which stays as
    it is then: PEFT scales it with the outputs, by the same numbers, which two arrays cannot share."""
    if not (bias is not None if of_inputs is None else of_inputs):
        return x.on(IA3Array, outputs=x.ones(*x.out))
    if x.layout.kind == "grouped conv":
        raise ValueError(
            "The kernel of a grouped convolution does not tell how many channels it is applied to. Let (IA)³ "
            "adapt its outputs (`of_inputs=False`)."
        )
    if x.layout.is_conv:
        return x.on(IA3Array, channels=x.ones(x.into[0]))
    return x.on(IA3Array, inputs=x.ones(*x.into))


@_method
def oft(x: _Weight, *, block_size: int = 32) -> OFTArray:
    of_outputs = x.layout.kind == "embedding"
    size = x.outputs if of_outputs else x.inputs
    x.must_divide("OFT", "a block_size", block_size, size)
    skew = x.zeros(size // block_size, block_size * (block_size - 1) // 2)
    return x.on(OFTArray, skew, of_outputs=of_outputs)


@_method
def boft(x: _Weight, *, block_size: int = 4, n_butterfly_factor: int = 1) -> BOFTArray:
    x.must_divide("BOFT", "a block_size", block_size, x.inputs)
    blocks = x.zeros(n_butterfly_factor, x.inputs // block_size, block_size, block_size)
    return x.on(BOFTArray, blocks, x.ones(*x.out))


@_method
def hra(x: _Weight, *, rank: int = 8) -> HRAArray:
    """Random reflections in pairs, which undo each other."""
    if rank % 2 or rank < 2:
        raise ValueError(f"HRA begins with pairs of reflections; found a rank of {rank}.")
    return x.on(HRAArray, jnp.repeat(x.kaiming(x.inputs, rank // 2, fan_in=rank // 2), 2, axis=-1))


@_method
def loha(x: _Weight, *, rank: int = 8, alpha: float = 8) -> LoHaArray:
    a, b_1, b_2 = x.normal(x.outputs, rank, scale=0.1), x.normal(rank, x.inputs), x.normal(rank, x.inputs)
    return x.on(LoHaArray, a, b_1, x.zeros(x.outputs, rank), b_2, scaling=alpha / rank)


@_method
def lokr(x: _Weight, *, rank: int = 8, alpha: float = 8, decompose_factor: int = -1) -> LoKrArray:
    (o_1, o_2), (i_1, i_2) = (two_factors(n, decompose_factor) for n in (x.outputs, x.inputs))
    options: dict[str, Any] = {"alpha": float(alpha), "rank": rank}
    if rank >= max(o_2, i_2) / 2:
        return x.on(LoKrArray, x.zeros(o_1, i_1), x.kaiming(o_2, i_2, fan_in=i_2), **options)
    second, second_b = x.kaiming(o_2, rank, fan_in=rank), x.kaiming(rank, i_2, fan_in=i_2)
    return x.on(LoKrArray, x.zeros(o_1, i_1), second, second_b=second_b, **options)


def two_factors(n: int, limit: int) -> tuple[int, int]:
    """Two factors of `n`, as near to each other as can be; if `limit` is positive, the first is at most that.
    PEFT's `factorization`."""
    if limit > 0 and n % limit == 0:
        return limit, n // limit
    most = math.isqrt(n) if limit <= 0 else min(math.isqrt(n), limit)
    first = next(m for m in range(most, 0, -1) if n % m == 0)
    return first, n // first


@_method
def hira(x: _Weight, *, rank: int = 32) -> HiRAArray:
    return x.on(HiRAArray, x.kaiming(rank, *x.into, fan_in=x.inputs), x.zeros(*x.out, rank))


@_method
def shira(x: _Weight, *, rank: int = 32) -> SHiRAArray:
    """Random elements, as many as LoRA of this rank trains."""
    n, size = rank * (x.outputs + x.inputs), x.outputs * x.inputs
    if x.batch or not 0 < n <= size:
        raise ValueError(
            f"SHiRA of rank {rank} trains {n} elements of one matrix; found a weight of shape {x.w.shape}."
        )
    at = jnp.sort(jax.random.permutation(next(x.keys), size)[:n])
    places = jnp.stack([at // x.inputs, at % x.inputs], axis=-1)
    return x.on(SHiRAArray, SparseArray.from_coo(x.zeros(n), places, (x.outputs, x.inputs)))


@_method
def c3a(x: _Weight, *, block_size: int = 256) -> C3AArray:
    x.must_divide("C³A", "a block_size", block_size, x.outputs, x.inputs)
    return x.on(C3AArray, x.zeros(x.outputs // block_size, x.inputs // block_size, block_size))


@_method
def fourierft(
    x: _Weight, *, n_frequency: int = 1000, scaling: float = 150.0, seed: int = 777
) -> FourierFTArray:
    """At the places that PEFT draws with `seed`, which are the same for all weights of a size."""
    size = x.outputs * x.inputs
    if not 0 < n_frequency <= size:
        raise ValueError(f"FourierFT takes an n_frequency from 1 to {size}; found {n_frequency}.")
    places = jnp.broadcast_to(Generator(seed).permutation(size, n_frequency), (*x.batch, n_frequency))
    return x.on(FourierFTArray, x.zeros(n_frequency), places, scaling=scaling, seed=seed)


@_method
def adalora(x: _Weight, *, rank: int = 12, alpha: float = 8) -> AdaLoRAArray:
    a, b = x.normal(rank, x.inputs, scale=0.02), x.normal(x.outputs, rank, scale=0.02)
    return x.on(AdaLoRAArray, a, b, x.zeros(rank), scaling=alpha / (rank + 1e-5))


@_method
def delora(x: _Weight, *, rank: int = 8, strength: float = 15.0) -> DeLoRAArray:
    w = jnp.asarray(materialise(x.w)).astype(x.dtype)
    norms = jnp.sqrt(jnp.sum(w * w, axis=tuple(x.layout.out_axes)))
    a, b = x.kaiming(rank, x.inputs, fan_in=x.inputs), x.zeros(x.outputs, rank)
    return x.on(DeLoRAArray, a, b, strength * x.ones(), norms.reshape(*x.batch, x.inputs))


@_method
def miss(x: _Weight, *, rank: int = 64) -> MiSSArray:
    return x.on(MiSSArray, x.zeros(rank, x.outputs))


@_method
def gralora(x: _Weight, *, rank: int = 32, alpha: float = 64, k: int = 2) -> GraLoRAArray:
    x.must_divide("GraLoRA", "a k", k, rank, x.outputs, x.inputs)
    a = x.kaiming(k, x.inputs // k, rank, fan_in=x.inputs // k)
    return x.on(GraLoRAArray, a, x.zeros(k, rank, x.outputs // k), scaling=alpha / rank)


# VeRA and RandLoRA, whose layers share random matrices --------------------------------------------


@_method
def vera(
    x: _Weight, *, rank: int = 256, d_initial: float = 0.1, seed: int | None = None, a: Any = None,
    b: Any = None,
) -> VeRAArray:  # fmt: skip
    """All layers share the random matrices `a` and `b`. Default: those that PEFT draws with `seed`, or with a
    number that follows from the key."""
    a, b = _given("VeRA", a, b)
    return x.on(VeRAArray, a, b, d_initial * x.ones(a.shape[-2]), x.zeros(*x.out), seed=seed)


@_method
def randlora(
    x: _Weight, *, rank: int = 32, alpha: float = 640, seed: int | None = None,
    sparsity: Literal["dense", "sparse", "very_sparse"] = "dense", a: Any = None, b: Any = None,
) -> RandLoRAArray:  # fmt: skip
    """All layers share the random matrices `a` and `b`, as for `vera`."""
    if sparsity not in ("dense", "sparse", "very_sparse"):
        raise ValueError(f"RandLoRA is 'dense', 'sparse' or 'very_sparse'; found {sparsity!r}.")
    a, b = _given("RandLoRA", a, b)
    rank, few = a.shape[0], min(x.outputs, x.inputs)
    bases = math.ceil(few / rank)
    gamma = x.ones(bases, few) / max(x.outputs, x.inputs)
    options: dict[str, Any] = {"scaling": alpha / rank, "seed": seed, "sparsity": sparsity}
    return x.on(RandLoRAArray, a, b, x.zeros(rank, bases), gamma, **options)


def _given(method: str, a: Any, b: Any) -> tuple[Any, Any]:
    if a is None or b is None:
        raise ValueError(
            f"{method} needs both matrices, `a` and `b`, which all layers share. Without either, "
            "`quaxlike.adapt` draws them for all weights that it adapts."
        )
    return a, b


def _draws(make: Any, draw: Callable[..., Any]) -> None:
    """Gives `make` the function `share`, which `adapt` calls first. It draws the matrices for all weights by
    `draw(generator, inputs, outputs, options)`, with their largest numbers of inputs and outputs."""
    defaults = {name: option.default for name, option in inspect.signature(make).parameters.items()}

    def share(weights: Sequence[tuple[Any, Layout]], *, key: Any, **options: Any) -> dict[str, Any]:
        options = defaults | options
        if options["a"] is not None or options["b"] is not None:
            return {}
        size = lambda w, axes: math.prod(w.shape[axis] for axis in axes)
        inputs = max(size(w, layout.in_axes) for w, layout in weights)
        outputs = max(size(w, layout.out_axes) for w, layout in weights)
        seed = options["seed"]
        if seed is None:
            seed = 0 if key is None else int(jax.random.bits(key) >> 1)
        dtype = common_dtype(jax.ShapeDtypeStruct((), jnp.float32), *(w for w, _ in weights))
        a, b = (jnp.asarray(x, dtype) for x in draw(Generator(seed), inputs, outputs, options))
        return {"a": a, "b": b, "seed": seed}

    make.share = share


_draws(vera, lambda generator, n, m, options: vera_projections(generator, n, m, options["rank"]))
_draws(
    randlora,
    lambda generator, n, m, options: randlora_projections(
        generator, min(n, m), max(n, m), options["rank"], options["sparsity"]
    ),
)
