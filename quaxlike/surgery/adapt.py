"""`adapt`: puts adapters of any type on a model's weights."""

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
from ..core.values import is_value
from .records import Layouts, Record, records_of, require_layout
from .select import Where, select_matrices
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
    """Puts adapters of your own type on weights of a model, and leaves everything else unchanged.

    Call the result through [`quaxlike.quaxify`][], and train the leaves that [`quaxlike.trainable`][]
    selects. A weight that appears several times in the model (the same array object) gets one adapter.

    **Arguments:**

    - `model`: any pytree. Weights may be Values, such as 4-bit arrays.
    - `make`: a function. This is called as `make(w, key=..., layout=...)` for each weight, and must return a
        [`quaxlike.AdaptedArray`][] with the same shape as `w`. The [`quaxlike.Layout`][] says which axes of
        `w` are outputs and which are inputs. If `make` has a parameter `bias=None`, then it also receives the
        layer's bias, or None. If all adapters should share some arrays, give `make` an attribute `share`.
        This is called first, as `share(weights, key=key)` with all pairs `(w, layout)`, and returns a dict of
        further keywords for `make`. If `make` is a `functools.partial`, `share` receives its keywords too.
    - `where`: which weights to adapt, as for [`quaxlike.select`][]. Biases and norms are skipped. Default:
        every linear layer.
    - `exclude`: layers to leave out. This is either a regular expression for the whole name, or a sequence
        of names or their last components. Default: none.
    - `key`: a PRNG key. It is split, and each call of `make` receives one key. Default: None, which is passed
        on to `make`.
    - `modules_to_save`, `trainable_token_indices`: what else to train, as for [`quaxlike.loraify`][].
    - `layout`: layouts that neither a layer nor a name implies, as for [`quaxlike.layouts`][].
        Default: none.

    **Returns:**

    The model with each weight replaced by its adapted array.

    **Raises:**

    `ValueError` if a pattern matches nothing (the message lists near misses); if a weight already has an
    adapter; if a weight's layout is unknown; or if `make` returns anything but an adapted array with
    the weight's shape. `TypeError` if `make` cannot be called with these arguments.

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
    """Binds the keywords that `make.share` returns, if there is such a function."""
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
    """Selects the weights to adapt, without any that are trained directly.

    **Returns:** the model, the selected weights, and the arrays trained directly. A tied output
    layer is separated from its embedding if only one of the two is chosen.
    """
    tied, (model, head, embedding) = model, _with_own_head(model)
    records = records_of(model, layout, fan_in_fan_out=fan_in_fan_out)
    targets = select_matrices(model, records, where, exclude)
    arrays = {name: record.array for name, record in records.items()}
    inside = {name: TrainableArray(x) for name, x in _inside(arrays, modules_to_save).items()}
    taken = {**inside, **_token_rows(arrays, trainable_token_indices)}
    targets = {name: record for name, record in targets.items() if name not in taken}
    if embedding in targets:  # one array, and one adapter
        targets.pop(head, None)
    both = [jax.tree.structure(taken[name]) for name in (embedding, head) if name in taken]
    if len(both) == 2 and both[0] == both[1]:  # in full, or in the same rows
        taken.pop(head)
    if head not in targets and head not in taken:
        model = tied
    if not targets:
        raise ValueError("`modules_to_save` leaves nothing of what `where` selects.")
    return model, targets, taken


def _with_own_head(model: PyTree) -> tuple[PyTree, str, str]:
    """Unties the output layer from the embedding.

    Returns the model, and the names of both weights if they were tied. A model supports this with a method
    `with_separate_head`.
    """
    if not hasattr(model, "with_separate_head"):
        return model, "", ""
    own = model.with_separate_head()
    arrays, before = named_arrays(own), named_arrays(model)
    head = next((name for name in arrays if name not in before), "")
    embedding = next((name for name, leaf in before.items() if head and leaf is arrays[head]), "")
    return own, head, embedding


def _inside(arrays: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """Returns all floating-point arrays inside the modules with these names."""
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


def _token_rows(
    arrays: Mapping[str, Any], tokens: Sequence[int] | Mapping[str, Sequence[int]]
) -> dict[str, Any]:
    """Makes the rows of these tokens trainable in their embeddings."""
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
    """Calls `make(name, w, layout, key)` for each weight, with a separate key if `key` is given."""
    keys: dict[str, Any] = {}
    if key is not None:
        # Keys follow the order of names, so the same model starts from the same adapters in every
        # framework, whatever its order of fields. We index the keys instead of iterating over them, as JAX
        # compiles a separate program for each length to iterate.
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
    """A sort key that compares numbers inside names as numbers."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]
