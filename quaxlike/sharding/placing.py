"""Partition specs for the arrays of a model and the parts of Values; models placed on meshes by them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.quantized.base import AbstractQuantizedArray
from ..arrays.quantized.shape import with_most_leading_axes
from ..core.jaxprs.slots import LeafLayout, leaf_specs
from ..core.values import is_value
from ..surgery.trees import matches, named_arrays, path_of, suggestion

_Model = TypeVar("_Model")
NamedRule = Callable[[str, Any], Any]
Rule = NamedRule | Mapping[str, jax.P]


@checked
def specs_for(model: PyTree, rule: Rule) -> PyTree:
    """Finds the partition spec of each array of a model, including the parts of Values.

    Rules are about logical arrays: a spec for a weight of shape `(out, in)` applies whether that is a plain
    array, 4-bit codes with their scales, or either with an adapter.

    **Arguments:**

    - `model`: any pytree; its arrays may be shapes (`eqx.filter_eval_shape`).
    - `rule`: either a dict from regular expressions to partition specs, in which the first that matches a
        whole name wins (the name of a layer stands for its `weight`); or a callable that takes the name and
        the array or Value, and returns a spec, or for a Value also the Value with a spec for each of its
        arrays. [`fsdp`][quaxlike.sharding.fsdp] and [`tensor_parallel`][quaxlike.lm.tensor_parallel]
        make such callables. Arrays without a spec, or with None, are replicated.

    The blocks of doubly quantised scales cross the rows of a weight. If a spec splits rows, the specs are for
    the weight with float32 scales, to which [`shard`][quaxlike.sharding.shard] converts it: the same numbers,
    but 4.5 instead of 4.13 bits per weight in blocks of 64.

    **Returns:** the model with a `jax.P` for each array, including those inside Values, and None for leaves
    that are not arrays. Pass it to [`shard`][quaxlike.sharding.shard], `jax.shard_map` or `jax.jit`.

    **Raises:** `ValueError` for a pattern that matches nothing, with near misses, and for a spec that does
    not fit an array or a Value.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.sharding import specs_for

        mlp = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=2, key=jax.random.key(0)), "nf4")
        specs = specs_for(mlp, {r"layers\\.\\d": jax.P("model", None)})
        ```

    Partition rules by parameter name follow T5X and EasyLM.
    """
    arrays = named_arrays(model)
    spec_by_name = by_name(rule, arrays, arrays)
    specs = {name: spec_by_name(name, leaf) for name, leaf in arrays.items()}

    def spec_of(path: Sequence[Any], leaf: Any) -> Any:
        name = path_of(path, model)
        return leaf_specs_of(name, leaf, specs[name]) if name in specs else None

    return jtu.tree_map_with_path(spec_of, model, is_leaf=is_value)


def by_name(rule: Rule, names: Iterable[str], arrays: Mapping[str, Any] | None = None) -> NamedRule:
    """A rule as a callable. Raises if one of its regular expressions matches none of the names.

    **Arguments:** `arrays`, by these names, for hints in errors. Default: hints list names alone.
    """
    if not isinstance(rule, Mapping):
        return rule
    names = list(names)
    for pattern in rule:
        if not any(matches(pattern, name, regex=True) for name in names):
            hint = f"There are {', '.join(names[:8])}." if arrays is None else suggestion(pattern, arrays)
            raise ValueError(f"{pattern!r} matches none of the arrays of the model. {hint}")
    return lambda name, _: next((spec for p, spec in rule.items() if matches(p, name, regex=True)), None)


def leaf_specs_of(name: str, leaf: Any, spec: Any) -> Any:
    """The spec for an array; for a Value, the Value with a spec in place of each leaf.

    `spec` is the logical array's, None, or already a Value of specs.
    """
    if is_value(spec):
        return spec
    spec = jax.P() if spec is None else spec
    if not isinstance(spec, jax.P):
        raise TypeError(f"{name}: expected a `jax.P`, None or a rule; found {spec!r}.")
    if len(spec) > len(leaf.shape):
        raise ValueError(f"{name}: {spec} has more axes than the array, which is of shape {leaf.shape}.")
    if not is_value(leaf):
        return spec
    try:
        return _follow(leaf, spec)
    except ValueError as error:
        simpler = eqx.filter_eval_shape(unnested, leaf)
        if jtu.tree_structure(simpler) != jtu.tree_structure(leaf):
            return leaf_specs_of(name, simpler, spec)
        raise ValueError(f"{name}: {error}") from None


def _follow(leaf: Any, spec: jax.P) -> Any:
    leaves, treedef = jtu.tree_flatten(leaf)
    avals = (jax.core.ShapedArray(x.shape, x.dtype) for x in jax.eval_shape(lambda x: x, leaves))
    return jtu.tree_unflatten(treedef, leaf_specs(LeafLayout(treedef, tuple(avals)), spec))


def unnested(value: Any) -> Any:
    """A Value with float32 scales in place of doubly quantised ones, so that more axes can be spread."""

    def is_quantized(x: Any) -> Any:
        return isinstance(x, AbstractQuantizedArray)

    return jtu.tree_map(
        lambda x: with_most_leading_axes(x) if is_quantized(x) else x, value, is_leaf=is_quantized
    )


def axes_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes that one entry of a spec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


# Models on meshes ---------------------------------------------------------------------------------


@checked
def shard(model: _Model, mesh: jax.sharding.Mesh, specs: PyTree) -> _Model:
    """Places a model on a mesh, each array by its partition spec.

    Doubly quantised weights are spread with float32 scales, since nested scales have blocks that cross rows:
    see [`specs_for`][quaxlike.sharding.specs_for].

    **Arguments:**

    - `model`: any pytree.
    - `mesh`: the devices.
    - `specs`: a rule, as for [`specs_for`][quaxlike.sharding.specs_for], from
        [`fsdp`][quaxlike.sharding.fsdp] or [`tensor_parallel`][quaxlike.lm.tensor_parallel], or a dict
        of regular expressions unless the model itself is a dict; or the result of `specs_for`; or a prefix
        tree of the model, in which a spec applies to all arrays below it, and at a Value to the logical
        array.

    **Returns:** the model with its arrays on the devices of the mesh; other leaves are unchanged.

    **Raises:** `ValueError` for an axis that the mesh does not have, and for an array that its devices cannot
    share evenly; for a quantised one, if a block would be split.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql
        from quaxlike.lm import tensor_parallel
        from quaxlike.sharding import shard

        mesh = jax.make_mesh((len(jax.devices()),), ("model",))
        mlp = ql.quantize(
            eqx.nn.MLP(64, 64, 1024, depth=1, key=jax.random.key(0)), "nf4"
        )
        mlp = shard(mlp, mesh, tensor_parallel(mlp, mesh))
        ```
    """
    placed: dict[Any, tuple[Any, Any]] = {}  # by identity, so that what adapters share is placed once

    def put(x: Any, sharding: Any) -> Any:
        key = id(x), sharding
        if key not in placed:
            placed[key] = x, jax.device_put(x, sharding)
        return placed[key][1]

    return _each(model, mesh, specs, put)


@checked
def abstract(model: _Model, mesh: jax.sharding.Mesh, specs: PyTree) -> _Model:
    """Describes the result of `shard`: a `jax.ShapeDtypeStruct` with its sharding for each array.

    Checkpoint libraries such as Orbax read arrays straight into these shardings: on a mesh of another shape
    than the one that wrote them, on one device, or with another number of processes.

    **Arguments:**

    - `model`, `mesh`, `specs`: as for [`shard`][quaxlike.sharding.shard]; the arrays of `model` may be shapes
        (`eqx.filter_eval_shape`). Its arrays are not accessed.

    **Returns:** the model, with shapes for arrays; other leaves are unchanged.

    **Raises:** `ValueError` as `shard` does.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.sharding import abstract, fsdp


        def restored(path, model, mesh):
            import orbax.checkpoint as ocp

            arrays, rest = eqx.partition(model, eqx.is_array)
            found = ocp.StandardCheckpointer().restore(
                path, abstract(arrays, mesh, fsdp(mesh))
            )
            return eqx.combine(found, rest)
        ```
    """
    shapes = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_array(x) else x, model)

    def put(x: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return _each(shapes, mesh, specs, put)


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, np.ndarray | jax.ShapeDtypeStruct)


@checked
def constrain(model: _Model, mesh: jax.sharding.Mesh, specs: PyTree) -> _Model:
    """Tells the compiler, within `jax.jit`, how the arrays of a model are spread from here on.

    Use it on parameters that every device stores a part of ([`fsdp`][quaxlike.sharding.fsdp]), to gather them
    for use: codes and scales are gathered, not the dense weights, and activations stay sharded like the
    batch. If the axes of the mesh are explicit, arrays are resharded (`jax.sharding.reshard`).

    **Arguments:**

    - `model`, `mesh`, `specs`: as for [`shard`][quaxlike.sharding.shard]; in `specs`, None, or a rule that
        returns None, replicates an array.

    **Returns:** the model, constrained.

    **Raises:** `ValueError` as `shard` does.

    !!! example

        ```python
        import equinox as eqx, jax, jax.numpy as jnp, quaxlike as ql
        from quaxlike.sharding import constrain, fsdp, shard

        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=auto)
        mlp = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=2, key=jax.random.key(0)), "nf4")

        @eqx.filter_jit
        def apply(mlp, x):
            mlp = constrain(mlp, mesh, None)  # or tensor_parallel(mlp, mesh)
            return ql.quaxify(jax.vmap(mlp))(x)

        apply(shard(mlp, mesh, fsdp(mesh)), jnp.ones((8, 64)))
        ```
    """
    at_work: Any = jax.sharding.get_abstract_mesh()  # within `auto_axes` the same mesh, with other types
    if at_work.empty or at_work.shape != mesh.shape:
        at_work = mesh
    explicit = all(kind == jax.sharding.AxisType.Explicit for kind in at_work.axis_types)
    put = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return _each(model, at_work, specs, put)


def _each(model: _Model, mesh: Any, specs: Any, put: Callable[[Any, Any], Any]) -> _Model:
    made = callable(specs) and jtu.all_leaves([specs])  # a module with specs for arrays is callable too
    if made or (isinstance(specs, Mapping) and not isinstance(model, Mapping)):
        specs = specs_for(model, specs)

    def place(path: Sequence[Any], spec: Any, part: Any) -> Any:
        return jtu.tree_map_with_path(
            lambda below, leaf: _placed(path_of((*path, *below)), leaf, spec, mesh, put),
            part,
            is_leaf=is_value,
        )

    def is_spec(x: Any) -> Any:
        return x is None or isinstance(x, jax.P) or is_value(x)

    try:
        jtu.tree_map(lambda spec, part: None, specs, model, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(f"`specs` must be specs in the structure of `model`, or a rule: {error}") from None
    return jtu.tree_map_with_path(place, specs, model, is_leaf=is_spec)


def _placed(name: str, leaf: Any, spec: Any, mesh: Any, put: Callable[[Any, Any], Any]) -> Any:
    if not (is_value(leaf) or _is_array(leaf)):
        return leaf
    leaf, specs = spread(name, leaf, spec, mesh)
    return jtu.tree_map(lambda x, own: put(x, jax.NamedSharding(mesh, own)), leaf, specs)


def spread(name: str, leaf: Any, spec: Any, mesh: Any) -> tuple[Any, Any]:
    """An array, or a Value in the form in which it is spread over the mesh, and its specs; arrays may be
    shapes. Raises `ValueError` if the devices cannot share it evenly."""
    specs = leaf_specs_of(name, leaf, spec)
    if is_value(leaf) and jtu.tree_structure(specs) != jtu.tree_structure(leaf):
        are_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(leaf))
        leaf = eqx.filter_eval_shape(unnested, leaf) if are_shapes else unnested(leaf)
    if (reason := _refusal(leaf, specs, mesh)) is not None:
        raise ValueError(f"{name}{reason}")
    return leaf, specs


def _refusal(leaf: Any, specs: Any, mesh: Any) -> str | None:
    """Why an array cannot be spread over a mesh by these specs, as the end of a sentence that starts with its
    name; None if it can."""
    parts = [(path_of(path), x) for path, x in jtu.tree_leaves_with_path(leaf)]
    specs = jtu.tree_leaves(specs)
    for (part, x), spec in zip(parts, specs, strict=True):
        own = f".{part}, part of {type(leaf).__name__} of shape {leaf.shape}," if part else ""
        for axis, entry in enumerate(spec):
            unknown = [n for n in axes_of(entry) if n not in mesh.shape]
            if unknown:
                axes = ", ".join(mesh.shape)
                return f": {spec} names the axis {unknown[0]!r}, but the mesh has {axes}."
            devices = math.prod(mesh.shape[n] for n in axes_of(entry))
            if x.shape[axis] % devices:
                return (
                    f"{own} has shape {x.shape}, and {spec} would split its axis {axis} over {devices} "
                    f"devices: {x.shape[axis]} is not a multiple of that."
                    + (_remedy(leaf, specs, entry, devices) if part else " Shard another axis, or none.")
                )
    return None


def _remedy(leaf: Any, specs: Sequence[Any], entry: Any, devices: int) -> str:
    """A hint for a part of a Value: all parts that are spread over the same devices must be split evenly."""
    sizes = [
        x.shape[axis]
        for x, spec in zip(jtu.tree_leaves(leaf), specs, strict=True)
        for axis, own in enumerate(spec)
        if own == entry
    ]
    blocks = math.gcd(*sizes)
    fits = math.gcd(blocks, devices)
    return (
        f" Blocks, with a scale each, cannot be cut: the number of devices has to divide {blocks}"
        + (f", as {fits} does" if fits > 1 else "")
        + ". Or quantise in smaller blocks, or shard another axis, or none."
    )
