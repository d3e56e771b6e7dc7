"""Reads arrays directly onto a mesh, possibly across several processes.

If possible, each process only reads the rows on its own devices. This requires each row of a Value to depend
only on the same row of every array inside it (`goes_by_rows`). Otherwise, it reads the whole array.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
import numpy as np

from ..core.values import is_value
from .placing import NamedRule, leaf_specs_of, spread, unnested


@dataclasses.dataclass(frozen=True)
class RowReader:
    """An array or Value readable in parts.

    `count` is the length of the first axis. It is None if the array can only be read as a whole: then `read`
    is called without arguments. Otherwise, `read(start, stop)` reads a range of rows, from and to multiples
    of `step` or the array's end. This may return a view of a file. `then` is applied to the rows read, and
    must operate on each row independently.
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
        """Returns the whole array as `jax.ShapeDtypeStruct`s, or None if any part isn't stored by rows."""
        if self.count is None:
            return None
        first = self.read(0, min(self.step, self.count))
        if not goes_by_rows(first):
            return None

        def longer(x: Any) -> Any:
            return (x.shape[0] * self.count // first.shape[0], *x.shape[1:])

        raw = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(longer(x), x.dtype), first)
        made = eqx.filter_eval_shape(self.then, raw)
        return made if goes_by_rows(made) else None


def read_onto(name: str, rows: RowReader, mesh: Any, rule: NamedRule) -> Any:
    """Reads an array or a Value onto a mesh.

    If every array in a Value is stored by rows, and no block spans several rows, then each process only reads
    the rows for its own devices. Otherwise it reads the whole array and discards the shards for other
    devices.

    **Raises:** `ValueError`, as for [`shard`][quaxlike.sharding.shard].
    """
    like = rows.like() if _is_shared(mesh) else None
    if like is None:
        value = rows.whole()
        return _placed(name, value, 0, value, mesh, rule)
    start, stop = _own_rows(like, _specs(name, like, mesh, rule)[1], mesh, rows)
    return _placed(name, rows.part(start, stop), start, like, mesh, rule)


def _is_shared(mesh: Any) -> bool:
    """Returns whether some devices in the mesh belong to other processes."""
    return any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def goes_by_rows(value: Any) -> bool:
    """Returns whether each row of a Value depends only on the same row of each array inside it.

    This is always true for plain arrays with at least one axis.
    """
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


def _specs(name: str, like: Any, mesh: Any, rule: NamedRule) -> tuple[Any, Any]:
    shapes = jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    return spread(name, shapes, rule(name, shapes), mesh)


def _own_rows(like: Any, specs: Any, mesh: Any, rows: RowReader) -> tuple[int, int]:
    """Returns the range of rows needed by this process's devices."""
    assert rows.count is not None
    starts, stops = [rows.count], [0]
    for x, spec in zip(jtu.tree_leaves(like), jtu.tree_leaves(specs), strict=True):
        for index in jax.NamedSharding(mesh, spec).addressable_devices_indices_map(x.shape).values():
            first, last, _ = (index or (slice(None),))[0].indices(x.shape[0])
            starts.append(first * rows.count // x.shape[0])
            stops.append(-(-last * rows.count // x.shape[0]))
    start = min(starts) // rows.step * rows.step
    return start, min(rows.count, math.ceil(max(stops) / rows.step) * rows.step)


def _placed(name: str, part: Any, start: int, like: Any, mesh: Any, rule: NamedRule) -> Any:
    """Places an array on the mesh. `part` may be just some rows, starting at `start`."""
    shapes, specs = _specs(name, like, mesh, rule)
    if jtu.tree_structure(shapes) != jtu.tree_structure(part):
        part = unnested(part)
    count, own = shapes.shape[0] if shapes.shape else 1, part.shape[0] if part.shape else 1

    def put(x: Any, whole: Any, spec: jax.P) -> Any:
        sharding = jax.NamedSharding(mesh, spec)
        if sharding.is_fully_addressable and isinstance(x, jax.Array):
            return jax.device_put(x, sharding)  # this copies directly between devices
        if own != count and x.shape[0] * count != whole.shape[0] * own:
            raise ValueError(
                f"{name}: {own} of {count} rows have a part of shape {x.shape}, all of them {whole.shape}."
            )
        local = np.asarray(x)
        offset = start * whole.shape[0] // count if whole.shape else 0

        def stored(index: tuple[slice, ...] | None) -> np.ndarray:
            if whole.shape and index:
                first, last, _ = index[0].indices(whole.shape[0])
                index = (slice(first - offset, last - offset), *index[1:])
            # Copy, or else the file stays mapped.
            return np.array(local[index or ()], order="C")

        return jax.make_array_from_callback(whole.shape, sharding, stored)

    return jtu.tree_map(put, part, shapes, specs)
