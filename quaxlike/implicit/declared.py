"""An ImplicitArray's declared shape and dtype."""

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Declared:
    """A shape and dtype passed as `shape=` and `dtype=`.

    An array may have leading axes in common with all of its fields. This stores how many of these there are,
    but looks up their sizes from the fields, so the shape remains correct if the fields are sliced, stacked
    or mapped over. (Arrays differing only in these sizes thus have the same pytree structure.) If there are
    additional leading axes then this is a stack, and `materialize` is mapped over its items.
    """

    shape: tuple[int, ...] | None = None
    ndims: tuple[int, ...] = ()  # the number of axes of each field, not counting the shared ones
    shared: int = 0  # the number of shared axes
    dtype: Any = None
    casts: tuple[Any, ...] = ()  # dtypes to which it was cast before, if this makes a difference

    @staticmethod
    def of(shape: Sequence[int], dtype: Any, fields: Sequence[tuple[int, ...]]) -> "Declared":
        shape, n = _as_shape(shape), 0
        while fields and n < len(shape) and all(s[n : n + 1] == shape[n : n + 1] for s in fields):
            n += 1
        return Declared(shape[n:], tuple(len(s) - n for s in fields), n, dtype)

    def with_dtype(self, dtype: Any) -> "Declared":
        return dataclasses.replace(self, dtype=canonical_dtype(dtype), casts=())

    def cast(self, dtype: Any) -> "Declared":
        """Returns the result of `astype`, remembering the dtype it was cast from."""
        dtype = canonical_dtype(dtype)
        casts = self.casts if self.dtype is None else (*self.casts, self.dtype)
        while casts and _includes(casts[-1], dtype):
            casts = casts[:-1]
        return dataclasses.replace(self, dtype=dtype, casts=casts)

    def shape_of(self, fields: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        assert self.shape is not None
        leading = [s[: max(len(s) - n, 0)] for s, n in zip(fields, self.ndims, strict=True)]
        fewer = min((n - len(s) for s, n in zip(fields, self.ndims, strict=True)), default=0)
        return (*max(leading, key=len, default=()), *self.shape[max(fewer, 0) :])

    def stacking(self, fields: Sequence[tuple[int, ...]]) -> list[int]:
        """Returns how many leading axes each field has due to stacking."""
        return [max(len(s) - n - self.shared, 0) for s, n in zip(fields, self.ndims, strict=True)]


def _includes(wide: Any, narrow: Any) -> bool:
    """Returns whether a cast to `narrow` has the same result after a cast to `wide`."""
    if wide == narrow:
        return True
    if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in (wide, narrow)):
        return False
    a, b = jnp.finfo(wide), jnp.finfo(narrow)
    return a.nmant >= b.nmant and a.maxexp >= b.maxexp and a.minexp <= b.minexp


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
    """Removes any fields called `shape` or `dtype` from a new class's namespace.

    These fields aren't necessary: every ImplicitArray accepts a shape and dtype anyway. Their defaults become
    `default_shape` and `default_dtype`.

    **Returns:** the names of all positional arguments, still including `shape` and `dtype`.
    """
    base = next((base for base in bases if dataclasses.is_dataclass(base)), None)
    before = [] if base is None else getattr(base, "_order", [])
    annotations = namespace.get("__annotations__", {})
    own = [name for name, hint in annotations.items() if name != "_declared" and "ClassVar" not in str(hint)]
    for name in {"shape", "dtype"}.intersection(own):
        annotations.pop(name)
        default = namespace.pop(name, None)
        if isinstance(default, dataclasses.Field):
            made = default.default_factory
            default = default.default if made is dataclasses.MISSING else made()
            default = None if default is dataclasses.MISSING else default
        if default is not None:
            namespace[f"default_{name}"] = default
    return (*before, *(name for name in own if name not in before))


def bind_fields(
    order: Sequence[str], args: Sequence[Any], shape: Any, dtype: Any
) -> tuple[list[Any], Any, Any]:
    """Returns the other positional arguments, followed by the shape and then the dtype."""
    given = dict(zip(order, args, strict=False))
    rest = [x for name, x in given.items() if name not in ("shape", "dtype")]
    return [*rest, *args[len(order) :]], given.get("shape", shape), given.get("dtype", dtype)
