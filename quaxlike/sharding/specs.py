"""Partition specs for the arrays of a model, including parts of Values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._checked import checked
from ..arrays.quantized.base import AbstractQuantizedArray
from ..arrays.quantized.shape import with_most_leading_axes
from ..core.jaxprs.slots import LeafLayout, leaf_specs
from ..core.values import is_value
from ..surgery.trees import matches, named_arrays, path_of, suggestion

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
        arrays. [`fsdp`][quaxlike.sharding.fsdp] and [`tensor_parallel`][quaxlike.sharding.tensor_parallel]
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
    is_quantized = lambda x: isinstance(x, AbstractQuantizedArray)
    return jtu.tree_map(
        lambda x: with_most_leading_axes(x) if is_quantized(x) else x, value, is_leaf=is_quantized
    )


def axes_of(entry: Any) -> tuple[Any, ...]:
    """The mesh axes that one entry of a spec names."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
