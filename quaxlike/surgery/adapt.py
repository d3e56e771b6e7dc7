"""`adapt`: adds any type of adapter to a model's weights."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.adapted import AdaptedArray
from ..arrays.layout import Layout
from ..arrays.lora import TrainableArray, TrainableRows, in_float32
from ..arrays.quantized import AbstractQuantizedArray
from ..core.values import is_value
from .records import Layouts, Record, records_of, require_layout
from .select import Where, select, select_matrices
from .trees import map_arrays, named_arrays, replace, suggestion


@checked
def adapt(
    model: PyTree,
    make: Callable[..., Any],
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] | None = None,
    key: Any = None,
    modules_to_save: Sequence[str] = (),
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] = (),
    layout: Layouts = None,
) -> PyTree:
    """Adds custom adapters to a model's weights, leaving everything else unchanged.

    Call the result through [`quaxlike.quaxify`][], and select the leaves to train with
    [`quaxlike.trainable`][]. Tied weights (the same array object) share a single adapter.

    **Arguments:**

    - `model`: any pytree. Weights can be Values, for example 4-bit arrays.
    - `make`: a function called as `make(w, key=..., layout=...)` for each weight, returning a
        [`quaxlike.AdaptedArray`][] of the same shape as `w`. Here `layout` is a [`quaxlike.Layout`][] with
        the output and input axes of `w`. If `make` has a parameter `bias=None`, then the layer's bias (or
        `None`) is passed as well.

        To share arrays between all adapters, set an attribute `make.share`. This is called beforehand as
        `share(weights, key=key)`, with a list `weights` of pairs `(w, layout)`, and should return a dict of
        additional keyword arguments for `make`. The keyword arguments of a `functools.partial` are passed to
        `share` as well.

    - `where`: which weights to adapt, as in [`quaxlike.select`][]. Biases and norms are skipped. Default:
        every linear layer.
    - `exclude`: layers to leave out. Either a regular expression for the whole name, or a sequence of names
        or of their last components. Default: none.
    - `key`: a PRNG key, split to give every call to `make` a different key. Default: `None`, passed on to
        `make`.
    - `modules_to_save`, `trainable_token_indices`: as in [`quaxlike.loraify`][].
    - `layout`: layouts that can't be inferred from the layer or the name, as in [`quaxlike.layouts`][].
        Default: none.

    **Returns:**

    The model with each selected weight replaced by an adapted array.

    **Raises:**

    `ValueError` if a pattern matches nothing (the message includes close matches), if a weight already has an
    adapter, if a weight's layout is unknown, if `modules_to_save` includes a quantised weight whose scales
    aren't trained, or if `make` returns anything other than an adapted array of the weight's shape.
    `TypeError` if `make` cannot be called with these arguments.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql

        class Scaled(ql.AdaptedArray):
            scale: jax.Array

            def materialise(self):
                return ql.materialise(self.base) * self.scale[:, None]

        mlp = eqx.nn.MLP(2, 2, 8, depth=1, key=jax.random.key(0))
        model = ql.adapt(mlp, lambda w, **_: Scaled(w, jnp.ones(w.shape[0])))
        ql.quaxify(model)(jnp.ones(2))
        ```
    """
    check_make(make)
    model, targets, saved = weights_to_adapt(
        model, where, exclude or (), layout,
        modules_to_save=modules_to_save, trainable_token_indices=trainable_token_indices,
    )  # fmt: skip

    weights = [(record.array, require_layout(name, record)) for name, record in targets.items()]
    make, arrays = _with_shared(make, weights, key), named_arrays(model)
    parameter = inspect.signature(make).parameters.get("bias")
    takes_bias = parameter is not None and parameter.default is None

    def made(name: str, w: Any, layout: Layout, key: Any) -> Any:
        beside = {"bias": arrays.get(targets[name].bias or "")} if takes_bias else {}
        out = make(w, key=key, layout=layout, **beside)
        if not isinstance(out, AdaptedArray) or tuple(out.shape) != tuple(w.shape):
            found = f"{type(out).__name__} of shape {getattr(out, 'shape', None)}"
            raise ValueError(
                f"`make` must return an AdaptedArray of the shape of {name}, {tuple(w.shape)}; found {found}."
            )
        return out

    return replace(model, {**adapters_on(targets, key, made), **saved})


def check_make(make: Any) -> None:
    """Raises `TypeError` unless `make` can be called as `make(w, key=..., layout=...)`."""
    try:
        inspect.signature(make).bind(None, key=None, layout=None)
    except TypeError as error:
        raise TypeError(
            f"`make` is called as make(w, key=..., layout=...); this cannot be called so: {error}."
        ) from None


def _with_shared(
    make: Callable[..., Any], weights: Sequence[tuple[Any, Layout]], key: Any
) -> Callable[..., Any]:
    """Binds the keyword arguments returned by `make.share`, if it exists."""
    inner, options = (make.func, make.keywords) if isinstance(make, functools.partial) else (make, {})
    share = getattr(inner, "share", None)
    return make if share is None else functools.partial(make, **share(weights, key=key, **options))


def weights_to_adapt(
    model: PyTree,
    where: Where,
    exclude: str | Sequence[str],
    layout: Layouts,
    *,
    fan_in_fan_out: bool = False,
    modules_to_save: Sequence[str] = (),
    trainable_token_indices: Sequence[int] | Mapping[str, Sequence[int]] = (),
) -> tuple[PyTree, dict[str, Record], dict[str, Any]]:
    """Selects the weights to adapt, excluding directly trained ones.

    **Returns:** the model, the selected weights, and the directly trained arrays. An output layer tied to the
    embedding is untied in this model if only the output layer is selected, or if both are trained in
    different ways.
    """
    tied, (model, head, embedding) = model, _with_own_head(model)
    records = records_of(model, layout, fan_in_fan_out=fan_in_fan_out)
    targets = select_matrices(model, records, where, exclude)
    arrays = {name: record.array for name, record in records.items()}
    inside = _inside(arrays, modules_to_save)
    heads = {
        name: x.array
        for name, x in records.items()
        if x.in_head and jnp.issubdtype(x.array.dtype, jnp.floating)
    }
    if heads:
        named = {*targets, *(select(model, exclude, layout=layout) if exclude else ())}
        inside |= {name: x for name, x in heads.items() if name not in named}
    for name, x in inside.items():
        require_trainable(name, x)
    inside = {name: TrainableArray(x) for name, x in inside.items()}
    taken = {**inside, **_token_rows(arrays, trainable_token_indices)}
    targets = {name: record for name, record in targets.items() if name not in taken}
    if head is not None:
        if embedding in targets:  # If both are selected, then keep them tied, to share an adapter.
            targets.pop(head, None)
        both = [jax.tree.structure(taken[name]) for name in (embedding, head) if name in taken]
        if len(both) == 2 and both[0] == both[1]:  # Either both are trained in full, or in the same rows.
            taken.pop(head)
        if head not in targets and head not in taken:
            model = tied
    if not targets:
        raise ValueError("`modules_to_save` leaves nothing of what `where` selects.")
    return model, targets, taken


def _with_own_head(model: PyTree) -> tuple[PyTree, str | None, str | None]:
    """Unties the output layer from the embedding.

    Returns the model, and the names of both weights if they were tied. Models opt into this by defining a
    `with_separate_head` method.
    """
    if not hasattr(model, "with_separate_head"):
        return model, None, None
    own = model.with_separate_head()
    arrays, before = named_arrays(own), named_arrays(model)
    head = next((name for name in arrays if name not in before), None)
    if head is None:
        return model, None, None
    return own, head, next((name for name, leaf in before.items() if leaf is arrays[head]), None)


def _inside(arrays: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Returns all floating-point arrays within the modules with these names."""
    inside: dict[str, Any] = {}
    for module in modules:
        pattern = re.compile(rf"(.*\.)?{re.escape(module)}(\..*)?")
        found = {name: leaf for name, leaf in arrays.items() if pattern.fullmatch(name)}
        if not found:
            raise ValueError(
                f"{module!r} in modules_to_save is not in the model. {suggestion(module, arrays)}"
            )
        inside |= found
    return {name: leaf for name, leaf in inside.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}


def require_trainable(name: str, w: Any) -> None:
    """Raises `ValueError` if a weight to train is quantised, unless its scales are trained."""

    def is_quantised(x: Any) -> bool:
        return isinstance(x, AbstractQuantizedArray)

    for x in jax.tree.leaves(w, is_leaf=is_quantised):
        if is_quantised(x) and not x.has_gradients:
            raise ValueError(
                f"{name} cannot be trained, because it is quantised ({type(x).__name__}). Leave it out with "
                "`exclude` when you quantise the model, make it dense with `quaxlike.materialise`, or train "
                "its scales: call `quaxlike.train_scales` first."
            )


def _token_rows(
    arrays: Mapping[str, Any], tokens: Sequence[int] | Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Makes the embedding rows of these tokens trainable."""
    if not isinstance(tokens, Mapping):
        tokens = {"embed_tokens": tokens} if len(tokens) else {}
    out: dict[str, Any] = {}
    for module, indices in tokens.items():
        for name, leaf in _inside(arrays, [module]).items():
            chosen = tuple(map(int, indices))
            fine = all(0 <= i < leaf.shape[0] for i in chosen) and len(set(chosen)) == len(chosen) > 0
            if is_value(leaf) or leaf.ndim != 2 or not fine:
                raise ValueError(
                    f"trainable_token_indices takes rows of a plain matrix, each once; {name} is a "
                    f"{type(leaf).__name__} of shape {tuple(leaf.shape)}, and the indices are {list(chosen)}."
                )
            rows = jnp.asarray(leaf)[jnp.asarray(chosen)]
            out[name] = TrainableRows(leaf, rows.astype(in_float32(rows.dtype)), chosen)
    return out


def adapters_on(
    targets: Mapping[str, Record], key: Any, make: Callable[[str, Any, Layout, Any], Any]
) -> dict[str, Any]:
    """Calls `make(name, w, layout, key)` for each weight, splitting `key` (if any) between them."""
    keys: dict[str, Any] = {}
    if key is not None:
        # Assign keys in the order of names: the same model then gets the same adapters, however its framework
        # flattens its fields. Index into the keys: iterating over an array would compile a program for every
        # length.
        split = jax.random.split(key, len(targets))
        keys = {name: split[i] for i, name in enumerate(sorted(targets, key=_natural))}

    def adapted(name: str, w: Any) -> Any:
        if isinstance(w, AdaptedArray):
            raise ValueError(
                f"{name} is of type {type(w).__name__} already. Merge the model before you adapt it again, "
                "or leave it out with `exclude`."
            )
        return make(name, w, require_layout(name, targets[name]), keys.get(name))

    return map_arrays(adapted, {name: record.array for name, record in targets.items()})


def _natural(name: str) -> list[Any]:
    """Returns a sort key for natural ordering, e.g. with `layers.2` before `layers.10`."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]
