"""Arrays read onto a mesh: each process reads, and makes, what its own devices store."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ..core.values import is_value
from ..surgery.trees import named_arrays
from .layouts import Rule, divides_layers, fsdp
from .placing import refusal
from .specs import leaf_specs_of, unnested


@dataclasses.dataclass(frozen=True)
class Rows:
    """An array, or a Value, that can be read in part.

    **Arguments:**

    - `count`: its length along the first axis; None if it can only be read as a whole.
    - `read`: called without arguments for all of it; with two, for the rows from the first up to but without
        the second. What it returns may be a view of a file.
    - `step`: parts begin and end at multiples of it, or at the end.
    - `then`: what is made of them: rows of rows, and of the whole the whole. Default: they stay.
    """

    count: int | None
    read: Callable[..., Any]
    step: int = 1
    then: Callable[[Any], Any] = lambda rows: rows

    def whole(self) -> Any:
        return self.then(self.read() if self.count is None else self.read(0, self.count))

    def part(self, start: int, stop: int) -> Any:
        return self.then(self.read(start, stop))

    def like(self) -> Any:
        """The whole, with shapes for arrays; None if its parts do not all go by rows."""
        if self.count is None:
            return None
        first = self.read(0, min(self.step, self.count))
        if not goes_by_rows(first):
            return None
        longer = lambda x: (x.shape[0] * self.count // first.shape[0], *x.shape[1:])
        raw = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(longer(x), x.dtype), first)
        made = eqx.filter_eval_shape(self.then, raw)
        return made if goes_by_rows(made) else None


def usual_rule(mesh: Any, model: PyTree = None, *, fully: bool = True) -> Rule:
    """Along an axis that is called "model", "tensor" or "tp" the rule is that of `tensor_parallel`, along one
    that is called "expert" or "ep" that of `expert_parallel`, along the others that of `fsdp`.

    **Arguments:**

    - `model`: tells layers by their classes. Default, and for weights that are stored in another form than
        in the model: by the names of weights alone.
    - `fully`: whether weights are spread along the others, too.
    """
    by_layers: Rule | None = None
    if rule_for := divides_layers(mesh):
        like = {} if model is None else named_arrays(model)
        whole: Any = None if model is None else rule_for(model, mesh)

        def by_layer(name: str, leaf: Any) -> Any:
            known = name in like and jtu.tree_structure(leaf) == jtu.tree_structure(like[name])
            return (whole if known else rule_for({name: leaf}, mesh))(name, leaf)

        by_layers = by_layer
    return fsdp(mesh, over=by_layers) if fully else by_layers or (lambda name, leaf: None)


def read_onto(name: str, rows: Rows, mesh: Any, rule: Rule) -> Any:
    """Reads an array or a Value onto a mesh.

    A process reads the rows that its own devices store some of, where all parts of a Value go by rows and the
    blocks of none cross them; else it reads the whole of this one array. It keeps what its devices store.

    **Arguments:**

    - `name`: what the rule, and errors, call it.
    - `rows`: where it is read from.
    - `mesh`: the devices, of this process and others.
    - `rule`: name and array to a spec, as of [`specs_for`][quaxlike.sharding.specs_for].

    **Raises:** `ValueError` as [`shard`][quaxlike.sharding.shard] does.
    """
    like = rows.like() if _is_shared(mesh) else None
    if like is None:
        value = rows.whole()
        return _placed(name, value, 0, value, mesh, rule)
    start, stop = _own_rows(like, _specs(name, like, mesh, rule)[1], mesh, rows)
    return _placed(name, rows.part(start, stop), start, like, mesh, rule)


def _is_shared(mesh: Any) -> bool:
    """Whether other processes have devices of the mesh."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def goes_by_rows(value: Any) -> bool:
    """Whether rows of an array, or of a Value, are made of rows of each of its parts, and of no others."""
    if not value.shape:
        return False
    if not is_value(value):
        return True
    try:
        specs = leaf_specs_of("", value, jax.P("rows"))
    except ValueError:
        return False
    if jtu.tree_structure(specs) != jtu.tree_structure(value):
        return False
    return all(spec and spec[0] == "rows" for spec in jtu.tree_leaves(specs))


def _specs(name: str, like: Any, mesh: Any, rule: Rule) -> tuple[Any, Any]:
    """A Value as it is spread, with shapes for arrays and possibly in another form, and its specs."""
    shapes = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    specs = leaf_specs_of(name, shapes, rule(name, shapes))
    if is_value(shapes) and jtu.tree_structure(specs) != jtu.tree_structure(shapes):
        shapes = eqx.filter_eval_shape(unnested, shapes)
    if (reason := refusal(shapes, specs, mesh)) is not None:
        raise ValueError(f"{name}{reason}")
    return shapes, specs


def _own_rows(like: Any, specs: Any, mesh: Any, rows: Rows) -> tuple[int, int]:
    """The rows that devices of this process store some of."""
    assert rows.count is not None
    starts, stops = [rows.count], [0]
    for x, spec in zip(jtu.tree_leaves(like), jtu.tree_leaves(specs), strict=True):
        for index in jax.NamedSharding(mesh, spec).addressable_devices_indices_map(x.shape).values():
            first, last, _ = (index or (slice(None),))[0].indices(x.shape[0])
            starts.append(first * rows.count // x.shape[0])
            stops.append(-(-last * rows.count // x.shape[0]))
    start = min(starts) // rows.step * rows.step
    return start, min(rows.count, math.ceil(max(stops) / rows.step) * rows.step)


def _placed(name: str, part: Any, start: int, like: Any, mesh: Any, rule: Rule) -> Any:
    """The array on the mesh, of which `part` are the rows from `start` on."""
    shapes, specs = _specs(name, like, mesh, rule)
    if jtu.tree_structure(shapes) != jtu.tree_structure(part):
        part = unnested(part)
    count, own = shapes.shape[0] if shapes.shape else 1, part.shape[0] if part.shape else 1

    def put(x: Any, whole: Any, spec: jax.P) -> Any:
        sharding = jax.NamedSharding(mesh, spec)
        if sharding.is_fully_addressable and isinstance(x, jax.Array):
            return jax.device_put(x, sharding)  # from device to device
        if own != count and x.shape[0] * count != whole.shape[0] * own:
            raise ValueError(
                f"{name}: a part of {own} rows of {count} has {x.shape}, all of it {whole.shape}."
            )
        local = np.asarray(x)
        offset = start * whole.shape[0] // count if whole.shape else 0

        def stored(index: tuple[slice, ...] | None) -> np.ndarray:
            if whole.shape and index:
                first, last, _ = index[0].indices(whole.shape[0])
                index = (slice(first - offset, last - offset), *index[1:])
            return np.array(local[index or ()], order="C")  # not a view of the file

        return jax.make_array_from_callback(whole.shape, sharding, stored)

    return jtu.tree_map(put, part, shapes, specs)
