"""Partitioning of a primitive over devices, where the compiler cannot see into it.

Plain JAX code needs none of this: the compiler splits it by what it does. A kernel is opaque to it.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .forms import Flat


@dataclasses.dataclass(frozen=True)
class Partitioning:
    """Says along which dimensions a primitive can be split over devices.

    !!! example

        ```python
        from quaxlike.primitives import Partitioning

        # x: (m, k), w: (n, k). Rows and columns of the result are independent of each other; where
        # `k` is split, every device has a summand of the result.
        Partitioning("m k, n k -> m n", sums=("k",))
        ```

    **Arguments:**

    - `rule`: the dimensions of each operand (each leaf, in order) and each result by name. A
      dimension can be split if its name is in a result.
    - `sums`: names that are in no result and can be split nevertheless, since each device then
      computes a summand of every result.

    **Raises:** `ValueError` for a rule that cannot be read.
    """

    rule: str
    sums: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w\s,]*->[\w\s,]*", self.rule):
            raise ValueError(
                f"cannot read the partitioning rule {self.rule!r}; it gives the dimensions of each "
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
        """The rule for operands with a batch axis at `dims`, and in front of every result."""
        taken = _names(self.operands) | _names(self.results)
        batch = next(n for n in map("batch{}".format, range(len(taken) + 1)) if n not in taken)
        operands = [
            names if dim is None else [*names[:dim], batch, *names[dim:]]
            for names, dim in zip(self.operands, dims, strict=True)
        ]
        results = [[batch, *names] for names in self.results]
        rule = "->".join(", ".join(map(" ".join, side)) for side in (operands, results))
        return Partitioning(rule, self.sums)

    def apply(self, fn: Flat) -> Flat:
        """`fn`, split over the devices that its operands and results are spread over."""

        def partition(mesh: Any, args: Any, results: Any) -> Any:
            spread: dict[str, Any] = {}
            operands = list(zip(self.operands, jtu.tree_leaves(args), strict=True))
            # What the results are spread over decides; a dimension that is summed over takes of its
            # operands what is left.
            arrays = [*zip(self.results, results, strict=True), *operands]
            for names, array in arrays:
                spec = [*array.sharding.spec, *[None] * len(names)]
                for name, axes in zip(names, spec, strict=False):
                    free = axes is not None and not set(_axes(axes)) & _used(spread)
                    if name in splittable and name not in spread and free:
                        spread[name] = axes

            def sharding(names: list[str]) -> NamedSharding:
                return NamedSharding(mesh, PartitionSpec(*map(spread.get, names)))

            summed = tuple(axis for name in self.sums for axis in _axes(spread.get(name)))

            def shard_fn(*operands: Any) -> list[Any]:
                out = fn(*operands)
                return jax.lax.psum(out, summed) if summed else out

            arg_shardings = tuple(sharding(names) for names in self.operands)
            return mesh, shard_fn, [sharding(names) for names in self.results], arg_shardings

        splittable = _names(self.results) | set(self.sums)
        partitioned = custom_partitioning(fn)
        partitioned.def_partition(
            partition,
            sharding_rule=self.rule,
            reduction_factors=self.sums,
            need_replication_factors=tuple(sorted(_names(self.operands) - splittable)),
        )
        return partitioned


def _names(side: list[list[str]]) -> set[str]:
    return {name for names in side for name in names}


def _axes(axes: Any) -> tuple[Any, ...]:
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def _used(spread: dict[str, Any]) -> set[Any]:
    return {axis for axes in spread.values() for axis in _axes(axes)}
