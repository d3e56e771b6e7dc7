"""The given shape and dtype of an ImplicitArray."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Declared:
    """A shape and a dtype passed as `shape=` and `dtype=`.

    We store how many leading axes the array has in common with all of its fields, but not their sizes. The
    sizes are instead obtained from the fields, so that the shape remains correct if these are sliced, stacked
    or mapped over. (This also means that arrays that only differ in these sizes have the same pytree
    structure.) If there are additional leading axes then this is a stack, and `materialize` is mapped over
    its items.
    """

    shape: tuple[int, ...] | None = None
    ndims: tuple[int, ...] = ()  # the number of axes of each field, excluding the shared ones
    shared: int = 0  # the number of shared axes
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
        """Returns the number of stack axes of each field."""
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
    """Removes fields called `shape` or `dtype` from the namespace of a new class.

    These aren't necessary, as every ImplicitArray accepts them. Their defaults become `default_shape` and
    `default_dtype`.

    **Returns:** the names of positional arguments, including `shape` and `dtype`.
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
    """Returns the positional arguments (excluding the shape and dtype), the shape, and the dtype."""
    given = dict(zip(order, args, strict=False))
    rest = [x for name, x in given.items() if name not in ("shape", "dtype")]
    return [*rest, *args[len(order) :]], given.get("shape", shape), given.get("dtype", dtype)
