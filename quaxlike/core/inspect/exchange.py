"""The bytes exchanged by devices in a compiled program, parsed from its HLO text.

XLA inserts collectives during compilation, and JAX doesn't have an API for inspecting them. Lines that aren't
recognised are skipped, so a new collective in XLA will be missing from the report.
"""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All collectives of one kind with the same result shape."""

    kind: str
    """`"all-gather"`, `"all-reduce"`, `"all-to-all"`, `"collective-permute"`, `"reduce-scatter"`."""
    dtype: str
    """XLA's name for the dtype: `"u8"`, `"f32"`, ..."""
    shape: tuple[int, ...]
    """The shape of each device's result."""
    count: int
    """How often this occurs in the program. (The body of a loop only counts once.)"""
    bytes: int
    """The total size of each device's results in bytes, over all `count` occurrences."""
    packed: bool
    """Whether this gathers a weight's codes, or arrays stored alongside them.

    HLO doesn't tell us what an array is for, so we go by dtype and size: these must match an integer array in
    a Value.
    """

    def __str__(self) -> str:
        times = f"{self.count} times " if self.count > 1 else ""
        what = ", of a packed weight" if self.packed else ""
        shape = ",".join(map(str, self.shape))
        return f"{self.kind} {times}of {self.dtype}[{shape}], {self.bytes:,} bytes{what}"


_COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(-start)?\("
)
_ARRAY = re.compile(r"\b(pred|[a-z]+\d+\w*)\[([\d,]*)\]")


def exchanges(text: str, packed: Iterable[Any] = ()) -> tuple[Exchange, ...]:
    """Lists the collectives in a compiled program, largest first.

    **Arguments:**

    - `text`: the program's text (`jax.stages.Compiled.as_text`).
    - `packed`: the arrays inside packed weights.
    """
    parts = {(_short(x.dtype), math.prod(x.shape)) for x in packed}
    counts: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for line in text.splitlines():
        if not (found := _COLLECTIVE.search(line)):
            continue
        arrays = _ARRAY.findall(found[1])
        if found[3] and found[2] != "all-reduce":  # the first half are operands
            arrays = arrays[len(arrays) // 2 :]
        for dtype, sizes in arrays:
            key = found[2], dtype, tuple(int(n) for n in sizes.split(",") if n)
            counts[key] = counts.get(key, 0) + 1
    out = [
        Exchange(kind, dtype, shape, count, count * _bytes(dtype, shape),
                 kind == "all-gather" and (dtype, math.prod(shape)) in parts)
        for (kind, dtype, shape), count in counts.items()
    ]  # fmt: skip
    return tuple(sorted(out, key=lambda e: -e.bytes))


def _short(dtype: Any) -> str:
    """Returns XLA's name for a NumPy dtype."""
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float8_", "f8"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return {"bool": "pred"}.get(name, name)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8
