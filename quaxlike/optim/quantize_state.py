"""`quantize_state`: keeps an optimiser's moments quantised between updates."""

import dataclasses
import itertools
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import Array, PyTree, UInt32

from .._checked import check_option, checked, did_you_mean
from ..arrays.quantized import CODECS, BlockArray, Codec
from ..arrays.quantized.scales import check_block_size, encode
from ..core.quaxify import quaxify
from ..surgery.trees import listing, path_of

Moment = Literal["linear", "root"]

# The fields containing moments in Optax states, as `State.field` where the name alone is ambiguous.
_MOMENTS: dict[str, Moment | None] = {
    **dict.fromkeys(("mu", "trace", "ema", "m", "m1", "m2", "exp_avg"), "linear"),
    **dict.fromkeys(("nu", "nu_max", "n", "v", "v_row", "v_col", "e_g", "e_x", "exp_avg_sq"), "root"),
    **dict.fromkeys(("sum_of_squares", "grad_sum_sq"), "root"),
    "ScaleByAdanState.v": "linear",
    "SophiaState.nu": "linear",
    # Here, `nu` is the momentum, and `mu` one small accumulator for each axis.
    "ScaleBySM3State.nu": "linear",
    "ScaleBySM3State.mu": None,
    # This computes the variance as a difference of moments, which rounding can make negative.
    **{f"ScaleByRStdDev{x}State.{moment}": None for x in ("", "WithCount") for moment in ("mu", "nu")},
}


class QuantizedState(NamedTuple):
    """The state of [`quaxlike.optim.quantize_state`][].

    **Attributes:**

    - `inner_state`: the state of the inner transformation, with quantised moments as
        [`quaxlike.BlockArray`][]s.
    - `key`: the key data for stochastic rounding, or None if this isn't used.
    """

    inner_state: PyTree
    key: UInt32[Array, " words"] | None


@checked(options=("stochastic",))
def quantize_state(
    transformation: optax.GradientTransformation,
    scheme: str = "q8_0",
    *,
    block_size: int | None = None,
    min_size: int = 4096,
    moments: Mapping[str, Moment | None] | None = None,
    stochastic: bool = False,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    """Quantises an optimiser's moments. Each update materialises them, then quantises the new ones.

    With 8 bits, this reduces the memory for AdamW's state to about a quarter.

    First moments are quantised using `scheme`. Second moments need more care: they are non-negative, and
    updates are divided by their square root. With a linear code, the smaller moments in a block would round
    to zero, and the resulting updates would be as large as the learning rate divided by `eps`. So we quantise
    their square roots instead, using one scale per block and the levels 1, 2, …, 256 (or 16 with 4 bits).
    Each root is then at least 1/256 of the largest root in its block, and elements with a smaller root get
    smaller updates than in float32. Gradients can underflow in float16, so all scales are float32.

    **Arguments:**

    - `transformation`: any optax transformation or chain, including masks, partitions, injected
        hyperparameters and extra arguments.
    - `scheme`: the codec for first moments: any [`quaxlike.BlockArray`][] codec with one floating-point scale
        per block and no zero points, such as `"q8_0"`, `"int8"`, `"fp8"`, `"nf4"`, `"q4_0"` or
        `"int4_block"`. Second moments use the same number of bits. Defaults to `"q8_0"`.
    - `block_size`: the number of elements per scale. Defaults to the codec's, e.g. 32 for `"q8_0"`.
    - `min_size`: arrays with fewer elements than this aren't quantised, and neither are scalars. Defaults to
        4096.
    - `moments`: a mapping that adds or overrides fields. Keys are either fields (`"velocity"`) or classes
        with fields (`"MyState.velocity"`). Values are `"linear"`, `"root"` for non-negative moments, or None
        to not quantise the field. Defaults to none.
    - `stochastic`: whether to use stochastic rounding. This is unbiased: on average, even changes of less
        than half a step count. Defaults to False.
    - `seed`: the seed for stochastic rounding. Defaults to 0.

    The fields containing moments in Optax's own states are known, e.g. `mu`, `nu`, `trace` or `v_row`. All
    other fields are left unquantised, including copies of the parameters (e.g. `z` in schedule-free
    optimisers) and accumulated gradients.

    **Returns:** a gradient transformation with state [`quaxlike.optim.QuantizedState`][].

    **Raises:** `ValueError` if the scheme or a value of `moments` isn't supported. `init` also raises this if
    the state contains large arrays, but none in a field known to contain moments.

    !!! example

        ```python
        import jax.numpy as jnp, optax, quaxlike as ql

        optimiser = ql.optim.quantize_state(optax.adamw(1e-3))
        params = {"weight": jnp.ones((128, 64)), "bias": jnp.ones(64)}
        state = optimiser.init(params)
        print(ql.summary(state))
        ```

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (2022). Excluding zero from the code
    for second moments follows Li et al., Memory Efficient Optimizers with 4-bit States (2023).
    """
    codec = _codec(scheme)
    check_block_size(block_size)
    moments = {} if moments is None else moments
    for field, kind in moments.items():
        if kind is not None:
            check_option("quantize_state", f"moments[{field!r}]", kind, Moment)
    known: dict[str, Moment | None] = {**_MOMENTS, **moments}
    block = codec.block if block_size is None else block_size
    inner = optax.with_extra_args_support(transformation)

    def rounded(state: PyTree, key: Any, params: PyTree) -> PyTree:
        """Quantises any large moments in a state, of an optimiser of such parameters."""
        numbers = itertools.count()

        def leaf(kind: Moment | None, x: Any) -> Any:
            if kind is None or not is_large(x):
                return x
            own = None if key is None else jax.random.fold_in(key, next(numbers))
            return _rounded(x, kind, codec, block, own)

        return _map_moments(leaf, state, known, _named_tuples(params))

    def is_large(x: Any) -> bool:
        is_float = bool(jnp.issubdtype(x.dtype, jnp.floating))
        return is_float and x.ndim > 0 and x.size >= max(min_size, 1)  # blocks lie along an axis

    def init(params: Any) -> Any:
        # Without this barrier, XLA spends a lot of time constant-folding large arrays.
        state = jax.lax.optimization_barrier(inner.init(params))
        large: dict[str, Any] = {}
        new = rounded(state, None, params)
        if not any(map(_is_rounded, jtu.tree_leaves(new, is_leaf=_is_rounded))):
            leaves = jtu.tree_leaves_with_path(state)
            large = {path_of(path): x for path, x in leaves if hasattr(x, "dtype") and is_large(x)}
        if large:
            fields = ", ".join(name for name, kind in known.items() if kind and "." not in name)
            raise ValueError(
                f"No large array of this state is known to be a moment; found {listing(large)}. Those in "
                f"fields named {fields} are. Name others with `moments={{'field': 'linear'}}`, or 'root' for "
                "what is not negative."
            )
        key = jax.random.key_data(jax.random.key(seed)) if stochastic else None
        return QuantizedState(new, key)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        key = own = None
        if stochastic:
            key, own = jax.random.split(jax.random.wrap_key_data(state.key))
            key = jax.random.key_data(key)
        new_updates, new = inner.update(updates, dense(state.inner_state), params, **extra)
        return new_updates, QuantizedState(rounded(new, own, updates), key)

    return optax.GradientTransformationExtraArgs(init, update)


def _codec(scheme: str) -> Codec:
    """Returns the codec for first moments, but with float32 scales."""
    allowed = {name: codec for name, codec in CODECS.items() if codec.scales == "float" and not codec.zeros}
    if scheme not in allowed:
        hint = did_you_mean(scheme.lower(), allowed, cutoff=0.5)
        raise ValueError(
            f"quantize_state takes a scheme with one floating scale for each block and no zero points, found "
            f"{scheme!r}.{hint} The schemes are {', '.join(allowed)}."
        )
    return dataclasses.replace(allowed[scheme], dtype="float32")


def _is_rounded(x: Any) -> bool:
    # If only a quantised parameter's scales are trained, its moments are BlockArrays without codes.
    return isinstance(x, BlockArray) and eqx.is_array_like(x.codes)


def dense(state: PyTree) -> PyTree:
    """Materialises the moments in a state, for the inner transformation."""
    return jtu.tree_map(lambda x: x.materialise() if _is_rounded(x) else x, state, is_leaf=_is_rounded)


def _named_tuples(tree: PyTree) -> set[type]:
    """Returns the classes of the named tuples in a tree."""
    found: set[type] = set()

    def note(node: Any) -> bool:
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            found.add(type(node))
        return False

    jtu.tree_leaves(tree, is_leaf=note)
    return found


def _map_moments(
    change: Any, state: PyTree, known: Mapping[str, Moment | None], of_params: Collection[type]
) -> PyTree:
    """Calls `change(kind, array)` on each array, with the `kind` of its field.

    The fields of named tuples in the parameters, of the classes `of_params`, may have the names of moments.
    """
    children, structure = jtu.tree_flatten_with_path(state, is_leaf=lambda x: x is not state)
    if jtu.treedef_is_leaf(structure):
        return change(None, state)

    def within(key: Any, child: Any) -> Any:
        is_state = isinstance(state, tuple) and hasattr(state, "_fields") and type(state) not in of_params
        name = key[0].name if is_state else ""
        own = f"{type(state).__name__}.{name}"
        found = own if own in known else name
        if found not in known:
            return _map_moments(change, child, known, of_params)
        return jtu.tree_map(lambda x: change(known[found], x), child)

    return structure.unflatten([within(key, child) for key, child in children])


def _rounded(x: Array, kind: Moment, codec: Codec, block: int | None, key: Any) -> BlockArray:
    """Quantises along the last axis divisible by the block size, or otherwise along the longest axis."""
    size = block or 32  # without blocks, prefer an axis needing few scales
    axis = next((i for i in reversed(range(x.ndim)) if x.shape[i] and x.shape[i] % size == 0), None)
    axis = max(range(x.ndim), key=x.shape.__getitem__) if axis is None else axis
    order = [*(i for i in range(x.ndim) if i != axis), axis]
    rows = x.transpose(order)
    if kind == "root":
        codec = Codec(codec.bits, bias=-1)  # this represents the integers starting from 1
        rows = jnp.sqrt(jnp.maximum(rows.astype(jnp.float32), 0))
    codes, scales = encode(rows, codec, rows.shape[-1] if block is None else block, key=key)
    out: Any = BlockArray.from_codes(codes, scales, codec=codec, block_size=block, dtype=x.dtype)
    out = quaxify(jnp.square)(out) if kind == "root" else out
    return out.with_axes([order.index(i) for i in range(x.ndim)])
