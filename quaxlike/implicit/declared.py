"""The shape and dtype that an ImplicitArray is given."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Declared:
    """A shape and a dtype that were given, as `shape=` and `dtype=`.

    Leading axes that the array shares with all its fields are only counted. Their sizes are read off the
    fields, so that the shape stays true when these are sliced or stacked or mapped over, and arrays that
    differ in nothing else are of one structure. Leading axes beyond those make a stack: of each of its
    items the array is what `materialize` says, so that is mapped over them.
    """

    shape: tuple[int, ...] | None = None
    ndims: tuple[int, ...] = ()  # of the fields, without those axes
    shared: int = 0  # the number of those axes
    dtype: Any = None

    @staticmethod
    def of(shape: Sequence[int], dtype: Any, fields: Sequence[tuple[int, ...]]) -> "Declared":
        shape, n = _as_shape(shape), 0
        while fields and n < len(shape) and all(s[n : n + 1] == shape[n : n + 1] for s in fields):
            n += 1
        return Declared(shape[n:], tuple(len(s) - n for s in fields), n, dtype)

    def with_dtype(self, dtype: Any) -> "Declared":
        return dataclasses.replace(self, dtype=canonical_dtype(dtype))

    def shape_of(self, fields: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        assert self.shape is not None
        leading = [s[: max(len(s) - n, 0)] for s, n in zip(fields, self.ndims, strict=True)]
        fewer = min((n - len(s) for s, n in zip(fields, self.ndims, strict=True)), default=0)
        return (*max(leading, key=len, default=()), *self.shape[max(fewer, 0) :])

    def stacking(self, fields: Sequence[tuple[int, ...]]) -> list[int]:
        """For each field, how many axes it has in front of those of an item."""
        return [max(len(s) - n - self.shared, 0) for s, n in zip(fields, self.ndims, strict=True)]


def canonical_dtype(dtype: Any) -> Any:
    try:
        return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
    except TypeError:
        found = reprlib.repr(dtype)
    raise TypeError(f"An ImplicitArray takes a dtype as `dtype`; found {found}.")


def _as_shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes: tuple[Any, ...] = tuple(shape)
    except TypeError:
        sizes = (None,)
    if isinstance(shape, str) or any(getattr(x, "ndim", 0) or not hasattr(x, "__index__") for x in sizes):
        raise TypeError(
            f"An ImplicitArray takes a sequence of sizes as `shape`; found {reprlib.repr(shape)}."
        )
    return sizes


def take_fields(bases: Sequence[type], namespace: dict[str, Any]) -> tuple[str, ...]:
    """Takes fields called `shape` or `dtype` out of a class that is being made: every ImplicitArray is given
    these in any case. Their defaults become `default_shape` and `default_dtype`.

    **Returns:** the names of the arguments by position, those two included.
    """
    base = next((base for base in bases if dataclasses.is_dataclass(base)), None)
    before = [] if base is None else getattr(base, "_order", [])
    annotations = namespace.get("__annotations__", {})
    own = [name for name, hint in annotations.items() if name != "_declared" and "ClassVar" not in str(hint)]
    for name in {"shape", "dtype"}.intersection(own):
        annotations.pop(name)
        default = namespace.pop(name, None)
        if isinstance(default, dataclasses.Field):
            default = None if default.default is dataclasses.MISSING else default.default
        if default is not None:
            namespace[f"default_{name}"] = default
    return (*before, *(name for name in own if name not in before))


def bind_fields(
    order: Sequence[str], args: Sequence[Any], shape: Any, dtype: Any
) -> tuple[list[Any], Any, Any]:
    """The arguments by position without a shape and a dtype that are among them; and those two."""
    given = dict(zip(order, args, strict=False))
    rest = [x for name, x in given.items() if name not in ("shape", "dtype")]
    return [*rest, *args[len(order) :]], given.get("shape", shape), given.get("dtype", dtype)
