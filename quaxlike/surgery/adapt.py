"""`adapt`: puts adapters of any type on the weights of a model."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import PyTree

from .._checked import a_or_an, checked
from ..arrays.adapted import AdaptedArray
from .records import Layouts, Record, records_of, require_layout
from .select import Where, select_matrices
from .trees import map_arrays, named_arrays, replace
from .weight_axes import Layout


@checked
def adapt(
    model: PyTree,
    make: Callable[..., Any],
    *,
    where: Where = "all-linear",
    exclude: str | Sequence[str] | None = None,
    key: Any = None,
    layout: Layouts = None,
) -> PyTree:
    """Puts adapters of your own type on weights of a model, and leaves the rest of the model unchanged.

    Call the result through [`quaxlike.quaxify`][], and train the leaves that [`quaxlike.trainable`][]
    selects. A weight that appears several times in the model (the same array object) gets one adapter.

    **Arguments:**

    - `model`: any pytree. Weights may be Values, such as 4-bit arrays.
    - `make`: called as `make(w, key=..., layout=...)` for each weight; returns what stands in its place, a
        [`quaxlike.AdaptedArray`][] of the shape of `w`. `layout`, a [`quaxlike.Layout`][], says which axes of
        `w` are outputs and which inputs.
    - `where`: which weights, as for [`quaxlike.select`][]; biases and norms are skipped. Default: the weights
        of all linear layers.
    - `exclude`: layers to leave out: a regular expression for the whole name, or a sequence of names or
        their last components. Default: none.
    - `key`: a PRNG key, of which `make` gets a part for each weight. Default: None, which `make` gets too.
    - `layout`: which axes of weights are outputs and which inputs, as for [`quaxlike.layouts`][], where
        neither their layers nor their names say so. Default: none.

    **Returns:**

    The model, with what `make` returned in place of each weight.

    **Raises:**

    `ValueError` if a pattern matches nothing, with near misses; if a weight has an adapter already; if it
    cannot be told which of its axes are outputs and which are inputs; or if `make` returns anything but an
    adapted array of the weight's shape.

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
    model, targets, _ = weights_to_adapt(model, where, exclude or (), layout)

    def made(name: str, w: Any, layout: Layout, key: Any) -> Any:
        out = make(w, key=key, layout=layout)
        if not isinstance(out, AdaptedArray) or tuple(out.shape) != tuple(w.shape):
            found = f"{a_or_an(type(out))} of shape {getattr(out, 'shape', None)}"
            raise ValueError(
                f"`make` must return an AdaptedArray of the shape of {name}, {tuple(w.shape)}; found {found}."
            )
        return out

    return replace(model, adapters_on(targets, key, made))


def weights_to_adapt(
    model: PyTree,
    where: Where,
    exclude: str | Sequence[str],
    layout: Layouts,
    *,
    fan_in_fan_out: bool = False,
    saved: Callable[[dict[str, Any]], dict[str, Any]] = lambda arrays: {},
) -> tuple[PyTree, dict[str, Record], dict[str, Any]]:
    """The weights that are selected, but for those that `saved` takes from the arrays of the model.

    **Returns:** the model, with an output layer of its own if it was tied to an embedding and only one of the
    two is chosen; the weights; and what `saved` took.
    """
    tied, (model, head, embedding) = model, _with_own_head(model)
    records = records_of(model, layout, fan_in_fan_out=fan_in_fan_out)
    targets = select_matrices(model, records, where, exclude)
    taken = saved({name: record.array for name, record in records.items()})
    targets = {name: record for name, record in targets.items() if name not in taken}
    for chosen in (targets, taken):
        if embedding in chosen:  # one array, and one adapter
            chosen.pop(head, None)
    if head not in targets and head not in taken:
        model = tied
    if not targets:
        raise ValueError("`modules_to_save` leaves nothing of what `where` selects.")
    return model, targets, taken


def _with_own_head(model: PyTree) -> tuple[PyTree, str, str]:
    """The model with an output layer of its own, and if it had none, the names of that layer's weight and of
    the embedding that it was tied to. A model supports this with a method `with_separate_head`."""
    if not hasattr(model, "with_separate_head"):
        return model, "", ""
    own = model.with_separate_head()
    arrays, before = named_arrays(own), named_arrays(model)
    head = next((name for name in arrays if name not in before), "")
    embedding = next((name for name, leaf in before.items() if head and leaf is arrays[head]), "")
    return own, head, embedding


def adapters_on(
    targets: Mapping[str, Record], key: Any, make: Callable[[str, Any, Layout, Any], Any]
) -> dict[str, Any]:
    """`make(name, w, layout, key)` for each of these weights, with a key of its own if there is one."""
    keys: dict[str, Any] = {}
    if key is not None:
        # In the order of names, so that adapters start alike in frameworks that order fields otherwise.
        keys = dict(zip(sorted(targets, key=_natural), jax.random.split(key, len(targets)), strict=True))

    def adapted(name: str, w: Any) -> Any:
        if isinstance(w, AdaptedArray):
            raise ValueError(
                f"{name} is {a_or_an(type(w))} already. Merge the model before you adapt it again, or "
                "leave it out with `exclude`."
            )
        return make(name, w, require_layout(name, targets[name]), keys.get(name))

    return map_arrays(adapted, {name: record.array for name, record in targets.items()})


def _natural(name: str) -> list[Any]:
    """A sort key for names with numbers in them."""
    return [(part.isdigit(), int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]
