"""Several adapters on a single base: serving and combining them, their dropout and activation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import ArrayLike, PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray, frozen_parts, labels_of, matrix_labels
from ..core.quaxify import quaxify, value_of
from ..core.values import is_value
from .trees import difference, map_arrays, named_arrays, replace


@checked(options=("models",))
def stack_adapters(models: Sequence[PyTree]) -> PyTree:
    """Stacks the adapters from several models, on top of the first model's base.

    This is useful for serving many adapters from a single copy of the weights, e.g. a different one for each
    request.

    **Arguments:**

    - `models`: models with the same base but different adapters, of equal or different ranks. They can also
        be on different layers, if adapters of this type add nothing when all their parts are zero (so not for
        DoRA, BOFT, HRA and IA3).

    **Returns:**

    A model with an additional leading axis in its adapters, with one entry per model. Weights are only stored
    once. Before calling the model, pick an adapter with [`quaxlike.choose_adapter`][].

    **Raises:**

    `ValueError` if the models differ in anything other than their adapters. Arrays are compared first by
    identity and then by value; traced arrays always count as equal.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        keys = jax.random.split(jax.random.key(1), 32)
        models = ql.stack_adapters(
            [ql.loraify(mlp, rank=4, init="gaussian", key=k) for k in keys]
        )


        @jax.vmap
        def run(adapter_index, x):  # one adapter for each sample
            return ql.quaxify(ql.choose_adapter(models, adapter_index))(x)


        run(jnp.array([3, 0, 31]), jnp.ones((3, 2)))
        ```
    """
    adapters = _adapters("stack_adapters", models, _adding_nothing)
    return replace(models[0], map_arrays(_stacked, adapters))


@checked
def choose_adapter(model: PyTree, adapter_index: ArrayLike) -> PyTree:
    """Picks one of the adapters stacked by [`quaxlike.stack_adapters`][].

    The index can be traced, so switching between adapters doesn't recompile. `jax.vmap` over both indices and
    samples uses a different adapter for every sample, but still computes the product with the base as a
    single batch.

    **Arguments:**

    - `model`: a model with stacked adapters.
    - `adapter_index`: an integer, which can be traced.

    **Returns:**

    The model with just this adapter.

    **Raises:**

    `ValueError` if there are no stacked adapters. `IndexError` if the index is concrete and out of range.
    """
    if not jnp.issubdtype(jnp.asarray(adapter_index).dtype, jnp.integer) or jnp.ndim(adapter_index) != 0:
        raise ValueError(
            f"adapter_index must be one integer; found {adapter_index!r}. Use jax.vmap for several."
        )
    found = False

    def chosen(leaf: Any) -> Any:
        nonlocal found
        if not is_stacked(leaf):
            return leaf
        found = True
        size = leaf.shape[0]
        if isinstance(adapter_index, int | np.integer) and not -size <= adapter_index < size:
            raise IndexError(f"adapter_index {adapter_index} is out of range for {size} adapters.")
        own = [name for name, labels in labels_of(leaf).items() if 0 in labels]
        return leaf.replace(**{name: _entry(getattr(leaf, name), adapter_index) for name in own})

    out = jtu.tree_map(chosen, model, is_leaf=is_value)
    if not found and any(isinstance(value_of(leaf), AdaptedArray) for leaf in jtu.tree_leaves(model)):
        raise ValueError(
            "choose_adapter was called within a function that `quaxlike.quaxify` runs, which sees arrays in "
            "place of adapters. Choose the adapter first, and give that function the model that comes out."
        )
    if not found:
        raise ValueError("The model has no stacked adapters; make them with `quaxlike.stack_adapters`.")
    return out


@checked(options=("models", "method", "rank"))
def combine_adapters(
    models: Sequence[PyTree],
    weights: Sequence[float | int | jax.Array] | jax.Array | np.ndarray,
    *,
    method: Literal["linear", "cat", "svd"] = "cat",
    rank: int | None = None,
) -> PyTree:
    """Combines several adapters into their weighted sum, on top of the first model's base.

    This is useful for serving several trained adapters as one, or for interpolating between them.

    **Arguments:**

    - `models`: models with the same base but different adapters, of a type that implements
        `AdaptedArray.combined`. The options below are LoRA's.
    - `weights`: a sequence or array with one weight per model. This can be traced.
    - `method`: `"cat"` is exact, but its rank is the sum of all ranks. `"svd"` is the best approximation of
        the sum by an adapter of rank `rank`. `"linear"` sums the factors, each scaled by the square root of
        its weight. This is inexact and requires all ranks to be equal. Default: `"cat"`.
    - `rank`: the rank to use for `"svd"`. Default: the largest rank among the adapters.

    **Returns:**

    The model with the combined adapter, which has a `scaling` of 1.

    **Raises:**

    `ValueError` if the number of weights is wrong, if the method is unknown, if `"linear"` is used with
    different ranks, or if the adapters cannot be combined. Also raised if the models differ in anything other
    than their adapters, as in [`quaxlike.stack_adapters`][].

    The methods are the same as in PEFT's `add_weighted_adapter`.
    """
    if isinstance(weights, str) or not hasattr(weights, "__len__"):
        raise TypeError(f"combine_adapters takes a sequence as weights; found {weights!r}.")
    if len(weights) != len(models):
        raise ValueError(
            f"combine_adapters takes one weight a model; found {len(weights)} for {len(models)} models."
        )
    each: Any = weights
    numbers = [x.astype(jnp.float32) if isinstance(x, jax.Array) else float(x) for x in each]
    bases = named_arrays(models[0])
    adapters = _adapters("combine_adapters", models, lambda w, like: None)

    def combined(name: str, leaves: list[Any]) -> Any:
        return _combined(name, bases[name], leaves, numbers, method, rank)

    return replace(models[0], map_arrays(combined, adapters))


def _entry(part: Any, index: ArrayLike) -> Any:
    return part[index] if is_value(part) else jnp.asarray(part)[index]


def is_stacked(leaf: Any) -> bool:
    """Returns whether a leaf stacks several adapters on a single weight."""
    return isinstance(leaf, AdaptedArray) and leaf.w is not None and len(leaf.shape) > len(leaf.w.shape)


def _adapters(
    function: str, models: Sequence[PyTree], without: Callable[[Any, Any], Any]
) -> dict[str, list[Any]]:
    """Collects the adapters on each weight from all models.

    Models without an adapter on a weight get `without(w, like)`.
    """
    if not models:
        raise ValueError(f"{function} takes at least one model; found none.")
    arrays = [named_arrays(model) for model in models]
    if any(other.keys() != arrays[0].keys() for other in arrays):
        raise ValueError("The models must be adapted from the same base; their arrays have different names.")
    out: dict[str, list[Any]] = {}
    for name in arrays[0]:
        leaves = [each[name] for each in arrays]
        adapted = [x for x in leaves if isinstance(x, AdaptedArray)]
        for x in adapted:
            if not {*x.part_axes, *x.numbers} >= {*_parts(x)}:
                raise ValueError(
                    f"The models must differ in adapters alone; {name} is trained too: {type(x).__name__}, "
                    "which does not say which axes its parts have (`part_axes`)."
                )
        if adapted:
            like = adapted[0]
            out[name] = [x if isinstance(x, AdaptedArray) else without(x, like) for x in leaves]
            missing = next((i for i, x in enumerate(out[name]) if x is NotImplemented), None)
            if missing is not None:
                raise ValueError(
                    f"Model {missing} has no adapter on {name}, where others have {like.description()}. An "
                    "adapter of this kind changes its weight even if all parts are zero, so none can be "
                    "filled in. Adapt the same layers in all models."
                )
            present = [x for x in out[name] if x is not None]
            one_type = {*map(type, present)} == {type(like)}
            if not one_type or like.alike(present) is NotImplemented:
                raise ValueError(
                    f"The adapters on {name} do not fit each other: they must be of the same type and "
                    "shape, axes, dropout and trained bases, all or none DoRAs, and have all batch axes of "
                    "the weight."
                )
            for x in present:
                if (found := difference(_shared(like), _shared(x))) is not None:
                    raise ValueError(f"The adapters on {name} share what they do not train; {found}.")
    if not out:
        raise ValueError("The models have no adapters.")
    _check_bases(function, models, arrays)
    return out


def _parts(x: AdaptedArray) -> list[str]:
    """Lists the parts free to differ between adapters. All others must be shared."""
    return [name for name in (*x.trained(), *x.numbers) if name != "w"]


def _shared(x: AdaptedArray) -> dict[str, Any]:
    return {name: getattr(x, name) for name in frozen_parts(x)}


def _check_bases(function: str, models: Sequence[PyTree], arrays: Sequence[Mapping[str, Any]]) -> None:
    bare = [
        replace(model, {name: x.w for name, x in named.items() if isinstance(x, AdaptedArray)})
        for model, named in zip(models, arrays, strict=True)
    ]
    for i, other in enumerate(bare[1:], 1):
        if (found := difference(bare[0], other)) is not None:
            raise ValueError(
                f"{function} takes models that differ in their adapters alone, since the result has the base "
                f"of the first; between models 0 and {i}, {found}. Adapt the same base, or merge each "
                "adapter into its own base with `quaxlike.merge`."
            )


def _adding_nothing(w: Any, like: AdaptedArray) -> Any:
    """Returns an adapter on `w` equal to `like`, but with zeros for its trained numbers.

    `promote` only knows the shapes of `like`, so all parts of its result are zero.
    """
    out = type(like).promote(w, like)
    if out is NotImplemented:
        return NotImplemented

    def zeros(own: Any, zeros: Any) -> Any:
        return zeros if jnp.issubdtype(own.dtype, jnp.inexact) else own  # Keep patterns, such as indices.

    parts = {name: jtu.tree_map(zeros, getattr(like, name), getattr(out, name)) for name in _parts(like)}
    return out.replace(**parts, **_shared(like), gradients=like.gradients)


def _stacked(name: str, adapters: Sequence[AdaptedArray]) -> AdaptedArray:
    first, *_ = adapters = adapters[0].alike(adapters)
    parts = {part: [getattr(x, part) for x in adapters] for part in _parts(first)}
    own = {name for name in parts if name not in first.numbers or not _is_one_number(parts[name])}
    out = first.replace(**{name: quaxify(jnp.stack)(parts[name]) for name in own})
    if out.shape != (len(adapters), *first.shape):
        kind = type(first).__name__
        raise ValueError(
            f"{name} is of type {kind}, whose parts do not take a leading axis for several adapters: "
            f"of {len(adapters)}, `{kind}.materialise` makes an array of shape {out.shape}."
        )
    return out


def _is_one_number(numbers: Sequence[Any]) -> bool:
    """Returns whether all adapters have the same number, e.g. `alpha`, which is then stored once."""
    if numbers[0] is None:
        return True
    known = all(not isinstance(x, jax.core.Tracer) and not is_value(x) and x.ndim == 0 for x in numbers)
    return known and len({np.asarray(x).item() for x in numbers}) == 1


def _combined(
    name: str,
    w: Any,
    adapters: Sequence[AdaptedArray | None],
    weights: Sequence[Any],
    method: str,
    rank: int | None,
) -> Any:
    found = {i: x for i, x in enumerate(adapters) if x is not None}
    first, *_ = own = list(found.values())
    try:
        out = first.combined(own, [weights[i] for i in found], method, rank)
    except ValueError as error:
        raise ValueError(f"The adapters on {name} cannot be combined: {error}.") from None
    if out is NotImplemented:
        kind = type(first)
        raise ValueError(
            f"The adapters on {name} are of the type {kind.__name__}, which does not say how they are "
            f"combined (`{kind.__name__}.combined`)."
        )
    return out if adapters[0] is first else out.with_base(w)


@checked
def with_dropout_key(model: PyTree, key: Any) -> PyTree:
    """Enables or disables dropout in a model's adapters.

    The mask only depends on the key: pass a new key at every step, and a different one for every sample under
    `jax.vmap`. An adapter used several times in a forward pass drops the same inputs each time.

    **Arguments:**

    - `model`: a model adapted with `dropout=`.
    - `key`: a PRNG key, or `None` to disable dropout.

    **Returns:**

    The model, with a different key in each adapter.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        model = ql.loraify(mlp, rank=4, dropout=0.1, key=jax.random.key(1))
        ql.quaxify(ql.with_dropout_key(model, jax.random.key(2)))(jnp.ones(2))
        ```
    """
    arrays = named_arrays(model)
    adapters = {name: x for name, x in arrays.items() if isinstance(x, AdaptedArray) and x.dropout > 0}
    if key is None:
        return replace(model, map_arrays(lambda _, x: x.replace(key=None), adapters))
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    keys = dict(zip(adapters, jax.random.split(key, max(1, len(adapters))), strict=False))

    def with_key(name: str, x: Any) -> Any:
        own = keys[name]
        if batch := [size for i, size in enumerate(x.shape) if i not in matrix_labels(x)]:
            own = jax.random.split(own, tuple(batch))  # Each layer of a stack needs a different key.
        return x.replace(key=own)

    return replace(model, map_arrays(with_key, adapters))


@checked
def activate(model: PyTree, ids: ArrayLike, segments: ArrayLike | None = None) -> PyTree:
    """Tells a model's activated LoRAs which tokens of a text to act on.

    An activated LoRA acts on all tokens from the last occurrence of its invocation tokens onwards, or on none
    without an occurrence. Call this function for every text, outside [`quaxlike.quaxify`][]. For a batch of
    texts, use `jax.vmap`. [`quaxlike.lm.generate`][], [`quaxlike.lm.Conversation`][] and
    `python -m quaxlike.lm.finetune` already do this.

    **Arguments:**

    - `model`: a model with adapters from `loraify(..., invocation_tokens=)`, or from an aLoRA saved by PEFT.
        Any other model is returned unchanged.
    - `ids`: the text's tokens, as integers of shape `(tokens,)`. These can be padded on either side, and can
        be traced.
    - `segments`: the segment id of each token, starting from 0, if several texts are packed into one row.
        Default: all tokens belong to the same text.

    **Returns:**

    The model to call on this text.

    **Raises:**

    `ValueError` if `ids` is not a one-dimensional integer array, or if `segments` is not an integer array of
    the same shape.

    !!! example

        ```python
        import jax, quaxlike as ql


        @jax.vmap
        def logits(model, ids, seen):  # of a decoder
            return ql.quaxify(ql.activate(model, ids))(ids, seen)
        ```
    """
    ids = jnp.asarray(ids)
    if ids.ndim != 1 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"activate takes the tokens of one text, integers of shape (tokens,); found {ids.dtype} of shape "
            f"{ids.shape}. Use jax.vmap for several texts."
        )
    order = jnp.arange(len(ids))
    if segments is None:
        return activated(model, lambda invocation: order >= last_occurrence(ids, invocation))
    segments = jnp.asarray(segments)
    if segments.shape != ids.shape or not jnp.issubdtype(segments.dtype, jnp.integer):
        raise ValueError(
            f"`segments` must be integers of shape {ids.shape}; found {segments.dtype} of shape "
            f"{segments.shape}."
        )

    def in_segments(invocation: tuple[int, ...]) -> Any:
        starts = _occurrences(ids, invocation)
        # Discard matches crossing from one text into the next.
        whole = segments == jnp.roll(segments, 1 - len(invocation))
        last = jax.ops.segment_max(jnp.where(whole, starts, -1), segments, len(ids) + 1)[segments]
        return (last >= 0) & (order >= last)

    return activated(model, in_segments)


def activated(model: PyTree, active: Callable[[tuple[int, ...]], Any]) -> PyTree:
    """Makes each activated LoRA act on exactly the tokens for which `active(invocation)` is true.

    `active` is called once for each distinct invocation, not for each adapter.
    """
    found = {invocation: active(invocation) for invocation in invocations(model)}
    if not found:
        return model
    adapters: dict[str, Any] = {
        name: x for name, x in named_arrays(model).items() if isinstance(x, AdaptedArray) and x.invocation
    }
    return replace(model, {name: x.replace(active=found[x.invocation]) for name, x in adapters.items()})


def invocations(model: PyTree) -> set[tuple[int, ...]]:
    """Collects the invocation tokens for all adapters in a model."""
    leaves = jax.tree.leaves(model, is_leaf=is_value)
    return {x.invocation for x in leaves if isinstance(x, AdaptedArray) and x.invocation}


def last_occurrence(ids: Any, tokens: Sequence[int]) -> Any:
    """Returns the start of the last occurrence of a token sequence, or `len(ids)` if there is none."""
    return jnp.max(_occurrences(ids, tokens), initial=-1) % (len(ids) + 1)


def _occurrences(ids: Any, tokens: Sequence[int]) -> Any:
    """Returns an array equal to `i` at every index `i` where the token sequence starts, and -1 elsewhere."""
    n = len(ids)
    after = jnp.pad(ids, (0, len(tokens) - 1), constant_values=-1)
    same = [after[i : i + n] == token for i, token in enumerate(tokens)]
    return jnp.where(jnp.all(jnp.stack(same), axis=0), jnp.arange(n), -1)
