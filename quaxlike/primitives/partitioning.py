"""Partitioning a primitive over devices, for implementations that are opaque to the compiler.

In practice only kernels need this: the compiler can already partition plain JAX code by itself.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ..core import compat
from .forms import Flat

_NO_MESH = jax.sharding.AbstractMesh((), ())


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Specifies along which dimensions a primitive can be split over devices.

    !!! example

        ```python
        from quaxlike.primitives import Partitioning

        # x: (m, k), w: (n, k). Rows and columns of the result are independent. If
        # `k` is split, every device computes one summand of the result.
        Partitioning("m k, n k -> m n", sums=("k",))
        ```

    **Arguments:**

    - `rule`: the names of the dimensions for each operand (that is, each leaf, in order) and each result. A
        dimension can be split if its name appears in a result.
    - `sums`: any names that don't appear in a result, but can be split anyway. Each device then computes one
        summand of every result.
    - `first`: names taking precedence, in this order, if several dimensions could be split over the same
        devices. By default these are the names for results and then those for operands.
    - `shared`: any operands (leaves) added to every result, such as a bias. If a summed dimension is split
        then these are divided by the number of devices: every device adds them to its summand.

    **Raises:** `ValueError` if the rule can't be parsed.
    """

    rule: str
    sums: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    shared: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sequences = (self.sums, self.first, self.shared)
        if not isinstance(self.rule, str) or not all(isinstance(x, Sequence) for x in sequences):
            raise TypeError(f"a Partitioning takes a string and sequences of names; found {self!r}")
        if not re.fullmatch(r"[\w\s,]*->[\w\s,]*", self.rule):
            raise ValueError(
                f"cannot read the partitioning rule {self.rule!r}; it must give the dimensions of each "
                "operand and each result by name, such as 'm k, n k -> m n'"
            )
        contracted = _names(self.operands) - _names(self.results)
        if not contracted.issuperset(self.sums):
            raise ValueError(
                f"`sums` of the partitioning rule {self.rule!r} are dimensions of operands that no "
                f"result has; found {self.sums}, expected some of {sorted(contracted)}"
            )

    @property
    def operands(self) -> list[list[str]]:
        return [part.split() for part in self.rule.split("->")[0].split(",")]

    @property
    def results(self) -> list[list[str]]:
        return [part.split() for part in self.rule.split("->")[1].split(",")]

    def batched(self, dims: Sequence[int | None]) -> "Partitioning":
        """Returns the rule for operands with a batch axis at `dims`. The results have it at the front."""
        taken = _names(self.operands) | _names(self.results)
        batch = next(n for n in map("batch{}".format, range(len(taken) + 1)) if n not in taken)
        operands = [
            names if dim is None else [*names[:dim], batch, *names[dim:]]
            for names, dim in zip(self.operands, dims, strict=True)
        ]
        results = [[batch, *names] for names in self.results]
        rule = "->".join(", ".join(map(" ".join, side)) for side in (operands, results))
        return dataclasses.replace(self, rule=rule)

    @property
    def splittable(self) -> set[str]:
        """The dimensions that can be split."""
        return _names(self.results) & _names(self.operands) | set(self.sums)

    def spread(self, arrays: Sequence[tuple[list[str], Sequence[int], Any]], mesh: Any) -> Any:
        """Returns the mesh axes to split each name over. Dimensions are only split if evenly divisible.

        **Arguments:**

        - `arrays`: the names, shape and spec for each array, ordered by precedence, highest first.
        - `mesh`: the mesh of the specs.
        """
        wishes: dict[str, list[Any]] = {}
        sizes: dict[str, int] = {}
        for names, shape, spec in arrays:
            for name, size, axes in zip(names, shape, [*spec, *[None] * len(names)], strict=False):
                sizes[name] = math.gcd(sizes.get(name, 0), size)
                if axes is not None and name in self.splittable:
                    wishes.setdefault(name, []).append(axes)
        out: dict[str, Any] = {}
        for name in dict.fromkeys((*self.first, *wishes)):
            for axes in wishes.get(name, ()):
                # Use as many of the leading axes as are still available, and gather along the remaining ones.
                free = tuple(itertools.takewhile(lambda axis: axis not in _used(out), _axes(axes)))
                devices = math.prod(mesh.shape[axis] for axis in free)
                if free and name not in out and sizes[name] % devices == 0:
                    out[name] = free if len(free) > 1 else next(iter(free))
        return out

    def part(self, fn: Flat, spread: Mapping[str, Any], mesh: Any) -> Flat:
        """Returns a version of `fn` acting on just one device's part of the operands."""
        summed = tuple(axis for name in self.sums for axis in _axes(spread.get(name)))
        if not summed:
            return fn
        devices = math.prod(mesh.shape[axis] for axis in summed)

        def summand(*operands: Any) -> list[Any]:
            shares = [x / devices if i in self.shared else x for i, x in enumerate(operands)]
            return jax.lax.psum(fn(*shares), summed)

        return summand

    def apply(self, fn: Flat) -> Flat:
        """Partitions `fn` over the devices holding its operands and results."""

        def partition(mesh: Any, args: Any, results: Any) -> Any:
            operands = list(zip(self.operands, jtu.tree_leaves(args), strict=True))
            # The results take precedence. Summed dimensions don't appear in the results, so they can use any
            # mesh axes left over from the operands.
            arrays = [*zip(self.results, results, strict=True), *operands]
            spread = self.spread(
                [(names, x.shape, getattr(x.sharding, "spec", ())) for names, x in arrays], mesh
            )

            def sharding(names: Sequence[str]) -> NamedSharding:
                return NamedSharding(mesh, PartitionSpec(*map(spread.get, names)))

            arg_shardings = tuple(sharding(names) for names in self.operands)
            part = self.part(fn, spread, mesh)

            def shard_fn(*operands: Any) -> list[Any]:
                # If the mesh has explicit axes, then every type includes a sharding. This doesn't make sense
                # for one device's part, so evaluate it without a mesh.
                with jax.sharding.use_abstract_mesh(_NO_MESH):
                    return part(*operands)

            return mesh, shard_fn, [sharding(names) for names in self.results], arg_shardings

        in_order = dict.fromkeys(name for names in (*self.operands, *self.results) for name in names)
        partitioned = custom_partitioning(fn)
        partitioned.def_partition(
            partition,
            sharding_rule=self.rule,
            reduction_factors=tuple(name for name in in_order if name in self.sums),
            need_replication_factors=tuple(name for name in in_order if name not in self.splittable),
        )
        return partitioned

    def apply_to_types(self, fn: Flat) -> Flat:
        """Like `apply`, but for meshes with explicit axes, with shardings as part of the operand types."""

        def partitioned(*operands: Any) -> list[Any]:
            shardings = [jax.typeof(x).sharding for x in operands]
            mesh = next(s.mesh for s in shardings if any(axes is not None for axes in s.spec))
            # Don't use any mesh axes that a `vmap` is already using. (It gathers anything else sharded over
            # these axes.)
            mapped = compat.mapped_mesh_axes()
            specs = [[_without(mapped, axes) for axes in s.spec] for s in shardings]
            arrays = zip(self.operands, (x.shape for x in operands), specs, strict=True)
            spread = self.spread(list(arrays), mesh)

            def spec(names: Sequence[str]) -> PartitionSpec:
                return PartitionSpec(*map(spread.get, names))

            parts = [
                x
                if sharding.mesh.empty or sharding.spec == spec(names)
                else jax.sharding.reshard(x, spec(names))
                for names, x, sharding in zip(self.operands, operands, shardings, strict=True)
            ]
            if not (free := set(mesh.explicit_axes) - mapped):
                return fn(*parts)
            return jax.shard_map(
                self.part(fn, spread, mesh),
                mesh=mesh,
                in_specs=tuple(map(spec, self.operands)),
                out_specs=[spec(names) for names in self.results],
                axis_names=free,
            )(*parts)

        return partitioned


def _names(side: list[list[str]]) -> set[str]:
    return {name for names in side for name in names}


def _axes(axes: Any) -> tuple[Any, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _without(taken: frozenset[Any], axes: Any) -> Any:
    free = tuple(axis for axis in _axes(axes) if axis not in taken)
    return free[0] if len(free) == 1 else free or None


def _used(spread: dict[str, Any]) -> set[Any]:
    return {axis for axes in spread.values() for axis in _axes(axes)}
