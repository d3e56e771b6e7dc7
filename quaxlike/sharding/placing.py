"""Partition specs for models with Values, and functions sharding these models over a mesh.

A spec describes the logical array. From this we derive the specs for each array inside a Value. Every shard
of a Value must itself be a Value of the same type with whole blocks, or else devices can't compute with their
shards.
"""

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
    """Computes the partition spec for every array in a model, including arrays inside Values.

    Rules apply to logical arrays. For example, the spec for a weight of shape `(out, in)` works for a plain
    array, for 4-bit codes with scales, and for either with an adapter.

    **Arguments:**

    - `model`: any pytree. Its arrays can be `jax.ShapeDtypeStruct`s (see `eqx.filter_eval_shape`).
    - `rule`: a dict from regular expressions to partition specs. The first expression matching a full name is
        used, and a layer's name refers to its `weight`. Alternatively, a function of the name and the array
        or Value. This returns a spec, or a Value with a spec in place of each array; examples are
        [`fsdp`][quaxlike.sharding.fsdp] and [`tensor_parallel`][quaxlike.lm.tensor_parallel]. Arrays without
        a spec, or with None, are replicated.

    Quantised scales have blocks spanning several rows. If a spec shards the rows of a weight with quantised
    scales, then the output has specs for float32 scales instead, and [`shard`][quaxlike.sharding.shard]
    converts the weight accordingly. This leaves the weight's values unchanged, but increases its size from
    4.13 to 4.5 bits per element (for blocks of 64).

    **Returns:** the model, with each array (including arrays inside Values) replaced by a `jax.P`, and all
    other leaves by None. Pass this to [`shard`][quaxlike.sharding.shard], `jax.shard_map` or `jax.jit`.

    **Raises:** `ValueError` if a pattern doesn't match anything (the error message suggests similar names),
    or if a spec isn't valid for an array or Value.

    !!! example

        ```python
        import equinox as eqx, jax, quaxlike as ql
        from quaxlike.sharding import specs_for

        mlp = ql.quantize(eqx.nn.MLP(64, 64, 64, depth=2, key=jax.random.key(0)), "nf4")
        specs = specs_for(mlp, {r"layers\\.\\d": jax.P("model", None)})
        ```

    Partition rules based on parameter names follow T5X and EasyLM.
    """
    arrays = named_arrays(model)
    spec_by_name = by_name(rule, arrays, arrays)
    specs = {name: spec_by_name(name, leaf) for name, leaf in arrays.items()}

    def spec_of(path: Sequence[Any], leaf: Any) -> Any:
        name = path_of(path, model)
        return leaf_specs_of(name, leaf, specs[name]) if name in specs else None

    return jtu.tree_map_with_path(spec_of, model, is_leaf=is_value)


def by_name(rule: Rule, names: Iterable[str], arrays: Mapping[str, Any] | None = None) -> NamedRule:
    """Converts a rule to a callable. Raises an error if any regular expression matches nothing.

    **Arguments:** `arrays` maps these names to arrays, for better hints in error messages. By default, hints
    only list the names.
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
    """Returns the spec for an array. For a Value, this is the Value with a spec in place of each leaf.

    `spec` is either a spec for the logical array, None, or a Value already containing specs.
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
    """Replaces quantised scales with float32 scales, to allow sharding along more axes."""

    def is_quantized(x: Any) -> Any:
        return isinstance(x, AbstractQuantizedArray)

    return jtu.tree_map(
        lambda x: with_most_leading_axes(x) if is_quantized(x) else x, value, is_leaf=is_quantized
    )


def axes_of(entry: Any) -> tuple[Any, ...]:
    """Returns the mesh axes in one entry of a spec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


# Models on meshes ---------------------------------------------------------------------------------


@checked
def shard(model: _Model, mesh: jax.sharding.Mesh, specs: PyTree) -> _Model:
    """Shards a model over a mesh.

    Call this once, before training or generation. Inside `jax.jit`, use
    [`constrain`][quaxlike.sharding.constrain] instead.

    Quantised scales become float32 if their rows are sharded. (Their blocks span several rows; see
    [`specs_for`][quaxlike.sharding.specs_for].)

    **Arguments:**

    - `model`: any pytree.
    - `mesh`: the mesh.
    - `specs`: one of

        - a rule, as for [`specs_for`][quaxlike.sharding.specs_for]. This can be a dict of regular
            expressions, unless the model is itself a dict;
        - the output of `specs_for`;
        - a pytree of specs, as a prefix of the model. Each spec applies to all arrays below it. For Values, a
            spec refers to the logical array.

    **Returns:** the model with its arrays sharded over the mesh. All other leaves are unchanged.

    **Raises:** `ValueError` if the mesh doesn't have one of the named axes, if an array's shape isn't
    divisible by the device count, or if sharding would split a block of a quantised array.

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
    placed: dict[Any, tuple[Any, Any]] = {}  # keyed by identity, to place a shared array only once

    def put(x: Any, sharding: Any) -> Any:
        key = id(x), sharding
        if key not in placed:
            placed[key] = x, jax.device_put(x, sharding)
        return placed[key][1]

    return _each(model, mesh, specs, put)


@checked
def abstract(model: _Model, mesh: jax.sharding.Mesh, specs: PyTree) -> _Model:
    """Computes the shapes and shardings of `shard`'s output, without placing any arrays.

    Use this to restore a checkpoint directly into its final sharding, for example with Orbax. The mesh and
    the process count may differ from when it was saved.

    **Arguments:**

    - `model`, `mesh`, `specs`: as for [`shard`][quaxlike.sharding.shard]. The arrays in `model` can be
        `jax.ShapeDtypeStruct`s (see `eqx.filter_eval_shape`): their values aren't used.

    **Returns:** the model with each array replaced by a `jax.ShapeDtypeStruct` with a sharding. All other
    leaves are unchanged.

    **Raises:** `ValueError`, as for `shard`.

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
    """Constrains how the arrays in a model are sharded inside `jax.jit`.

    For example, use this to gather parameters under [`fsdp`][quaxlike.sharding.fsdp]. This way, codes and
    scales are gathered rather than the materialised weights, and activations remain sharded along the batch
    axis. For a mesh with explicit axes, this uses `jax.sharding.reshard`.

    **Arguments:**

    - `model`, `mesh`, `specs`: as for [`shard`][quaxlike.sharding.shard]. An array is replicated if its spec
        is None, or if a rule returns None for it.

    **Returns:** the model with its shardings constrained.

    **Raises:** `ValueError`, as for `shard`.

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
    at_work: Any = jax.sharding.get_abstract_mesh()  # the axis types differ inside `auto_axes`
    if at_work.empty or at_work.shape != mesh.shape:
        at_work = mesh
    explicit = all(kind == jax.sharding.AxisType.Explicit for kind in at_work.axis_types)
    put = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return _each(model, at_work, specs, put)


def _each(model: _Model, mesh: Any, specs: Any, put: Callable[[Any, Any], Any]) -> _Model:
    # Check for leaves: a module containing specs may also be callable.
    made = callable(specs) and jtu.all_leaves([specs])
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
    """Prepares an array or a Value for sharding, and returns it with its specs.

    The arrays can be `jax.ShapeDtypeStruct`s. Raises `ValueError` if they can't be divided evenly.
    """
    specs = leaf_specs_of(name, leaf, spec)
    if is_value(leaf) and jtu.tree_structure(specs) != jtu.tree_structure(leaf):
        are_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(leaf))
        leaf = eqx.filter_eval_shape(unnested, leaf) if are_shapes else unnested(leaf)
    if (reason := _refusal(leaf, specs, mesh)) is not None:
        raise ValueError(f"{name}{reason}")
    return leaf, specs


def _refusal(leaf: Any, specs: Any, mesh: Any) -> str | None:
    """Explains why an array can't be sharded according to these specs. Returns None if it can.

    The explanation continues a sentence starting with the array's name.
    """
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
    """Suggests how to shard a Value instead. (All its arrays must be divisible by the same device count.)"""
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
