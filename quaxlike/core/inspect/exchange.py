"""The bytes that the devices of a compiled program exchange, read from its text."""

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All collectives of a compiled program that give each device arrays of one shape."""

    kind: str
    """`"all-gather"`, `"all-reduce"`, `"all-to-all"`, `"collective-permute"`, `"reduce-scatter"`."""
    dtype: str
    """As XLA writes it: `"u8"`, `"f32"`, ..."""
    shape: tuple[int, ...]
    """Of what each device has afterwards."""
    count: int
    """How often it stands in the program; once for the body of a loop."""
    bytes: int
    """How many bytes a device has of it afterwards, all `count` together."""
    packed: bool
    """Whether it is a gather of codes, or of what is stored with them: by the dtypes and sizes of the parts
    of arguments that are Values and hold integers."""

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
    """The collectives of a compiled program, those of most bytes first.

    **Arguments:**

    - `text`: of the program (`jax.stages.Compiled.as_text`).
    - `packed`: the arrays that packed weights are made of.
    """
    parts = {(_short(x.dtype), math.prod(x.shape)) for x in packed}
    counts: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for line in text.splitlines():
        if not (found := _COLLECTIVE.search(line)):
            continue
        arrays = _ARRAY.findall(found[1])
        if found[3] and found[2] != "all-reduce":  # operands, then results
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
    """A dtype of NumPy as XLA writes it."""
    name = str(dtype)
    for long, short in (("bfloat", "bf"), ("float8_", "f8"), ("float", "f"), ("uint", "u"), ("int", "s")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return {"bool": "pred"}.get(name, name)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8
