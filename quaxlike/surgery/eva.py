"""Statistics for layer inputs, and `eva`, an initialisation based on their principal directions."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import ArrayLike, PyTree

from .._checked import checked
from ..arrays.lora import LoraArray
from ..arrays.lora.inits import Init
from ..arrays.lora.matrices import with_factors
from ..core.quaxify import quaxify
from ..core.rules import register_on_either_side
from ..core.values import ArrayValue
from .loraify import blank
from .records import Layouts, records_of, require_layout
from .select import Where, select_matrices
from .trees import layer_of, replace


@checked
def input_moments(
    fn: Callable[..., Any],
    where: Where = "all-linear",
    *,
    fan_in_fan_out: bool = False,
    layout: Layouts = None,
) -> Callable[..., dict[str, jax.Array]]:
    """Measures the second moments of each layer's inputs, i.e. the sum of `x xᵀ` over all inputs `x`.

    These are needed for [`quaxlike.balance`][], for [`quaxlike.eva`][], and for the `calibrate` argument in
    [`quaxlike.quantize`][].

    **Arguments:**

    - `fn`: a function `fn(model, ...)` that runs the model on some data. This is not compiled.
    - `where`: which layers to measure, as in [`quaxlike.select`][]. Default: every linear layer.
    - `fan_in_fan_out`, `layout`: as in [`quaxlike.loraify`][].

    **Returns:**

    A function taking the arguments of `fn`, and returning a dict from names to sums of shape `(in, in)`. Sum
    the results of several batches with `jax.tree.map`.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(8, 2, 16, depth=1, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (32, 8))
        moments = ql.input_moments(lambda model, x: jax.vmap(model)(x))(mlp, x)
        model = ql.loraify(mlp, rank=2, init=ql.eva(moments), key=jax.random.key(2))
        ```
    """
    return _measured("input_moments", fn, where, fan_in_fan_out, layout, lambda x: x.T @ x, jnp.add)


@checked
def input_maxima(
    fn: Callable[..., Any],
    where: Where = "all-linear",
    *,
    fan_in_fan_out: bool = False,
    layout: Layouts = None,
) -> Callable[..., dict[str, jax.Array]]:
    """Measures the largest magnitude of each layer's inputs, for use as `maxima` in [`quaxlike.quantize`][].

    A layer can then use a single static scale for its inputs, instead of computing their maximum on every
    call.

    **Arguments:** as [`quaxlike.input_moments`][].

    **Returns:**

    A function taking the arguments of `fn`, and returning a dict from names to scalars. Combine the results
    of several batches with `jax.tree.map(jnp.maximum, …)`.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(8, 2, 16, depth=1, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (32, 8))
        maxima = ql.input_maxima(lambda model, x: jax.vmap(model)(x))(mlp, x)
        eight = ql.quantize(mlp, "int8", activations="int8", maxima=maxima)
        ```
    """

    def largest(x: Any) -> Any:
        return jnp.max(jnp.abs(x), initial=0)

    return _measured("input_maxima", fn, where, fan_in_fan_out, layout, largest, jnp.maximum)


def _measured(
    label: str, fn: Callable[..., Any], where: Where, fan_in_fan_out: bool, layout: Layouts,
    of_rows: Callable[[jax.Array], Any], joined: Callable[[Any, Any], Any],
) -> Callable[..., dict[str, jax.Array]]:  # fmt: skip
    """Applies `of_rows` to the inputs of each layer, using `joined` to accumulate over repeated calls."""

    def measured(model: PyTree, *args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        records = records_of(model, layout, fan_in_fan_out=fan_in_fan_out)
        found: dict[str, Any] = {}

        def observe(name: str, x: Any) -> None:
            own = of_rows(x.astype(jnp.float32))
            found[name] = own if name not in found else joined(found[name], own)

        probes = {}
        for name, record in select_matrices(model, records, where, ()).items():
            w, own = record.array, require_layout(name, record)
            lora = blank(w, own, 1, dtype=jnp.float32)
            if own.kind not in ("linear", "matrix") or lora.a.ndim != 1 + len(lora.in_axes):
                raise ValueError(f"{label} measures linear layers; {name} is of shape {tuple(w.shape)}.")
            probes[name] = lora.replace(a=_Probe(lora.a, functools.partial(observe, name)))
        try:
            with jax.disable_jit():  # `observe` needs concrete arrays.
                quaxify(fn)(replace(model, probes), *args, **kwargs)
            if missing := [name for name in probes if name not in found]:
                raise ValueError(f"fn does not multiply by {', '.join(missing)}.")
            return dict(found)
        finally:
            # JAX's caches hold on to the probes' treedef, and thus to `observe` and its `found`: clear it, or
            # its arrays leak.
            found.clear()

    return measured


@checked
def eva(moments: Mapping[str, ArrayLike]) -> Init:
    """Initialises `a` with the principal directions of each layer's inputs, and `b` with zeros (EVA).

    The adapters thus start by learning along the directions of largest input variance. The paper reports
    convergence in fewer steps than from a random initialisation. In practice, a few batches of data are
    enough to estimate the directions.

    **Arguments:**

    - `moments`: for each layer, the sum of `x xᵀ` over its inputs `x`, from [`quaxlike.input_moments`][].

    **Returns:**

    An initialisation to pass to [`quaxlike.loraify`][] as `init`. EVA also adapts the ranks: see
    [`quaxlike.eva_ranks`][].

    Paischer et al., EVA (2024).
    """

    def init(name: str, lora: LoraArray, key: Any) -> LoraArray:
        if name not in moments:
            raise ValueError(f"eva has no moments for {name}; it has those for {', '.join(moments)}.")
        _, directions = jnp.linalg.eigh(jnp.asarray(moments[name]))
        a = directions[:, ::-1][:, : lora.rank].T
        return with_factors(lora, a, jnp.zeros((*lora.b.shape[:-1], lora.rank), a.dtype))

    return init


@checked(options=("moments", "rank", "most"))
def eva_ranks(moments: Mapping[str, ArrayLike], rank: int, *, most: int | None = None) -> dict[str, int]:
    """Distributes a rank budget over layers, based on the fraction of variance explained per direction.

    **Arguments:**

    - `moments`: as in [`quaxlike.eva`][].
    - `rank`: the average rank, which is never exceeded. Every layer has at least rank 1.
    - `most`: the maximum rank for any layer. Default: twice `rank`.

    **Returns:**

    A mapping to pass to [`quaxlike.loraify`][] as `rank_pattern`.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql

        mlp = eqx.nn.MLP(8, 2, 16, depth=1, key=jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (32, 8))
        moments = ql.input_moments(lambda model, x: jax.vmap(model)(x))(mlp, x)
        ranks = ql.eva_ranks(moments, 2)
        model = ql.loraify(
            mlp, rank=2, rank_pattern=ranks, init=ql.eva(moments), key=jax.random.key(2)
        )
        ```

    Paischer et al., EVA (2024).
    """
    directions: list[tuple[bool, float, str]] = []
    for name, moment in moments.items():
        variances = np.linalg.eigvalsh(np.asarray(moment, np.float64))[::-1]
        shares = variances / max(variances.sum(), np.finfo(np.float64).tiny)
        shares = shares[: 2 * rank if most is None else most]
        directions += [(i > 0, -share, name) for i, share in enumerate(shares)]
    # Each layer's first direction comes before all others, so every layer has at least rank 1.
    directions.sort(key=lambda direction: direction[:2])
    counts = Counter(name for _, _, name in directions[: rank * len(moments)])
    return {f"^{re.escape(layer_of(name))}": counts[name] for name in moments}


class _Probe(ArrayValue):
    """A factor `a` of zeros, calling `observe` with the rows it is multiplied by, of shape (n, in).

    In an adapter, it observes the layer's inputs without changing its outputs.
    """

    zeros: Any
    observe: Callable[[Any], None] = eqx.field(static=True)

    def materialise(self) -> jax.Array:
        return self.zeros


@register_on_either_side("dot_general", _Probe, other=ArrayLike)
def _dot_general(primitive: Primitive, x: Any, y: Any, *, dimension_numbers: Any, **params: Any) -> Any:
    side = int(isinstance(x, _Probe))
    probe, other = (y, x) if side == 0 else (x, y)
    contracted = dimension_numbers[0][side]
    if len(contracted) == probe.ndim - 1:
        own = dimension_numbers[0][1 - side]
        axes = [axis for _, axis in sorted(zip(own, contracted, strict=True))]
        rows = jnp.moveaxis(other, axes, range(-len(axes), 0))
        probe.observe(rows.reshape(-1, math.prod(other.shape[axis] for axis in axes)))
    x, y = (v.zeros if isinstance(v, _Probe) else v for v in (x, y))
    return primitive.bind(x, y, dimension_numbers=dimension_numbers, **params)
