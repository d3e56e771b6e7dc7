"""Models on meshes of devices, arrays of any type included."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .core.jaxprs.slots import Slot, leaf_specs
from .core.values import is_value
from .surgery.select import matches, named_arrays, near, path_of

__all__ = ["shard", "specs_for"]

Rule = Callable[[str, Any], jax.P | None] | Mapping[str, jax.P]

_Model = TypeVar("_Model")


def specs_for(model: PyTree, rule: Rule) -> PyTree:
    """Says how each array of a model is spread over the axes of a mesh, parts of Values included.

    A rule speaks of logical arrays: what it says of a weight of shape `(out, in)` holds whether that is a
    plain array, 4-bit codes with their scales, or either with an adapter.

    **Arguments:**

    - `model`: any pytree; its arrays may be shapes (`eqx.filter_eval_shape`).
    - `rule`: either partition specs by regular expressions, the first of which that matches a whole name
        counts (the name of a layer stands for its `weight`); or a callable that takes the name and the array
        or Value. Arrays for which there is no spec, or None, are on every device.

    **Returns:** the model with a `jax.P` for each array, including those inside Values, and None for all that
    is no array: for [`shard`][quaxlike.sharding.shard], for `jax.shard_map` and for `jax.jit`.

    **Raises:** `ValueError` for a pattern that matches nothing, with near misses, and for a spec that an
    array, or a Value of its kind, cannot follow.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.sharding import specs_for

        mlp = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=2, key=jax.random.key(0)), "nf4")
        specs = specs_for(mlp, {r"layers\\.\\d": jax.P("model", None)})
        ```

    Partition rules by the names of parameters are those of T5X and EasyLM.
    """
    arrays = named_arrays(model)
    if isinstance(rule, Mapping):
        for pattern in rule:
            if not any(matches(pattern, name, regex=True) for name in arrays):
                hint = near(pattern, arrays)
                raise ValueError(f"{pattern!r} matches none of the arrays of the model. {hint}")
        specs = {
            name: next((spec for p, spec in rule.items() if matches(p, name, regex=True)), None)
            for name in arrays
        }
    else:
        specs = {name: rule(name, leaf) for name, leaf in arrays.items()}

    def spec_of(path: Sequence[Any], leaf: Any) -> Any:
        name = path_of(path)
        return _specs(name, leaf, specs[name] or jax.P()) if name in specs else None

    return jtu.tree_map_with_path(spec_of, model, is_leaf=is_value)


def shard(model: _Model, mesh: jax.sharding.Mesh, specs: PyTree) -> _Model:
    """Places a model on a mesh, each array as its partition spec says.

    **Arguments:**

    - `model`: any pytree.
    - `mesh`: the devices.
    - `specs`: what [`specs_for`][quaxlike.sharding.specs_for] returned; or a tree of the same form from the
        top, in which a spec stands for all arrays below it, and at a Value for the logical array.

    **Returns:** the model with its arrays on the devices of the mesh; what is no array stays.

    **Raises:** `ValueError` for an axis that the mesh does not have, and for an array that its devices cannot
    share evenly: of a quantised one, if a block would be cut.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql
        from quaxlike.sharding import shard, specs_for

        mesh = jax.make_mesh((len(jax.devices()),), ("model",))
        mlp = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=2, key=jax.random.key(0)), "nf4")
        mlp = shard(mlp, mesh, specs_for(mlp, {r"layers\\.\\d": jax.P("model", None)}))
        ```
    """

    def place(path: Sequence[Any], spec: Any, part: Any) -> Any:
        return jtu.tree_map_with_path(
            lambda below, leaf: _placed(path_of((*path, *below)), leaf, spec, mesh), part, is_leaf=is_value
        )

    is_spec = lambda x: x is None or isinstance(x, jax.P) or is_value(x)
    return jtu.tree_map_with_path(place, specs, model, is_leaf=is_spec)


def _specs(name: str, leaf: Any, spec: jax.P) -> Any:
    """The spec for an array; for a Value, the Value with one in place of each of its leaves."""
    if len(spec) > len(leaf.shape):
        raise ValueError(f"{name}: {spec} has more axes than the array, which is of shape {leaf.shape}.")
    if not is_value(leaf):
        return spec
    leaves, treedef = jtu.tree_flatten(leaf)
    avals = (jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(lambda x: x, leaves))
    try:
        return jtu.tree_unflatten(treedef, leaf_specs(Slot(treedef, tuple(avals)), spec))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _placed(name: str, leaf: Any, spec: Any, mesh: jax.sharding.Mesh) -> Any:
    """`spec` is that of the logical array, None, or a Value with one for each leaf."""
    if not (is_value(leaf) or eqx.is_array(leaf) or isinstance(leaf, np.ndarray)):
        return leaf
    specs = spec if is_value(spec) else _specs(name, leaf, spec or jax.P())
    if not is_value(leaf):
        return _put(name, leaf, specs, mesh, "")
    what = f", part of a {type(leaf).__name__} of shape {leaf.shape},"
    return jtu.tree_map_with_path(
        lambda path, x, own: _put(f"{name}.{path_of(path)}", x, own, mesh, what), leaf, specs
    )


def _put(name: str, x: Any, spec: jax.P, mesh: jax.sharding.Mesh, what: str) -> jax.Array:
    for axis, entry in enumerate(spec):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        unknown = [n for n in names if n not in mesh.shape]
        if unknown:
            raise ValueError(
                f"{name}: {spec} names the axis {unknown[0]!r}, but the mesh has {', '.join(mesh.shape)}."
            )
        devices = int(np.prod([mesh.shape[n] for n in names]))
        if x.shape[axis] % devices:
            raise ValueError(
                f"{name}{what} has shape {x.shape}, and {spec} would split its axis {axis} over {devices} "
                f"devices: {x.shape[axis]} is not a multiple of that"
                + (", and blocks, with a scale each, cannot be cut" if what else "")
                + ". Shard another axis, or none."
            )
    return jax.device_put(x, jax.NamedSharding(mesh, spec))
